"""The loop of a server, in one of two threads that stand in for each other.

The thread that has received a batch runs its function best itself: to hand it to
another thread, and to let that one run, takes longer than many functions do. But a
function that was quick so far may wait one day, and nobody would receive meanwhile. So
a second thread looks now and then whether the first is still at the same job. If it is,
it goes on with the loop; the first, when it is done, becomes the second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

LATE = 0.005  # Seconds after which the other thread takes over.


class Loop:
    """Calls a function again and again, until it is closed.

    Args:
      name: of the threads.
      step: called in a loop by the thread that leads. If it calls `run`, then last.
    """

    def __init__(self, name: str, step: Callable[[], None]):
        self._step = step
        self._closed = False
        self._changed = threading.Condition()  # Guards everything below.
        self._leader = 0
        self._job = 0  # Number of the job that the leader runs now; 0 if none.
        self._jobs = 0
        self._watched = True  # Whether the other thread looks after the leader.
        self._threads = [
            threading.Thread(target=self._main, args=(index,), name=name, daemon=True)
            for index, name in enumerate((name, f"{name}-deputy"))
        ]

    def start(self) -> None:
        """Starts the threads, unless it is closed already."""
        with self._changed:
            if not self._closed:
                for thread in self._threads:
                    thread.start()

    def run(self, work: Callable[[Any], None], job: Any) -> bool:
        """Runs a job in the thread that leads; False if it does not lead any more."""
        self._jobs += 1
        number = self._job = self._jobs
        if not self._watched:
            with self._changed:
                self._watched = True
                self._changed.notify()
        try:
            work(job)
        finally:
            with self._changed:
                leads = self._job == number
                if leads:
                    self._job = 0
        return leads

    def close(self) -> None:
        """Lets both threads end after what they do now."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self, deadline: float | None = None) -> bool:
        """Waits for the threads; True if both ended before the deadline."""
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            left = None if deadline is None else max(0, deadline - time.monotonic())
            thread.join(left)
        return not any(thread.is_alive() for thread in started)

    def _main(self, index: int) -> None:
        while not self._closed:
            if self._leader == index:
                self._step()
            else:
                self._watch(index)

    def _watch(self, index: int) -> None:
        """Returns when this thread has to lead, or when all is over."""
        with self._changed:
            while not self._closed:
                seen = self._job
                if seen:
                    self._changed.wait(LATE)
                    if self._job == seen:
                        self._leader = index
                        self._job = 0
                        return
                    continue
                self._watched = False
                if not self._job:  # Else it began before it could know.
                    self._changed.wait()
