"""The threads of a server: workers that keep each client's order, and the one after.

The loop thread puts jobs in; workers take them out. Calls of one client to one pool
run one after the other, in the order they came, however many workers there are.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

STOP = None

log = logging.getLogger("embodied.rpc")


class Pool:
    """Threads that run jobs, in order for each owner of jobs."""

    def __init__(self, workers: int, name: str, run: Callable[[Any], None]):
        self._run = run
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()  # Guards the owners' queues.
        self._ordered = workers == 1  # One worker keeps all order by itself.
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(workers)
        ]

    @property
    def waiting(self) -> int:
        """Jobs that no worker has taken yet."""
        return self._jobs.qsize()

    def start(self) -> None:
        """Starts the workers."""
        for thread in self._threads:
            thread.start()

    def put(self, job: Any, queues: dict[Any, deque] | None = None) -> None:
        """Adds a job; jobs with the same `queues` run one after the other."""
        if self._ordered or queues is None:
            self._jobs.put((job, None))
            return
        with self._lock:
            behind = queues.get(self)
            if behind is not None:
                behind.append(job)
                return
            queues[self] = deque()
        self._jobs.put((job, queues))

    def stop(self, deadline: float) -> bool:
        """Drops waiting jobs and waits for the running ones; True if all ended."""
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._jobs.put(STOP)
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not STOP:
            job, queues = entry
            try:
                self._run(job)
            except Exception:
                # Errors of bound functions are answered; this is one of ours, and
                # the thread is needed for the next job.
                log.exception("A worker failed at %s.", type(job).__name__)
            if queues is not None:
                self._next(queues)
            # Nothing of a call, such as its client's memory, outlives it here.
            del entry, job, queues

    def _next(self, queues: dict[Any, deque]) -> None:
        with self._lock:
            behind = queues[self]
            if not behind:
                del queues[self]
                return
            job = behind.popleft()
        self._jobs.put((job, queues))


class Afterwork:
    """Runs functions after their replies, in the order the calls came.

    Tickets are drawn in that order; a worker that is done early waits for nobody,
    unless `limit` results are waiting: then it is slowed down.
    """

    def __init__(self, name: str, limit: int, failed: Callable[[BaseException], None]):
        self._limit = limit
        self._failed = failed
        self._changed = threading.Condition()  # Guards everything below.
        self._ready: dict[int, tuple[Callable, Any] | None] = {}
        self._drawn = 0
        self._next = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def waiting(self) -> int:
        """Results that wait for their turn."""
        return len(self._ready)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def ticket(self) -> int:
        """Draws the place of a call in the order."""
        with self._changed:
            self._drawn += 1
            return self._drawn - 1

    def put(self, ticket: int, function: Callable | None, argument: Any = None) -> None:
        """Hands over the function of a ticket, or None if there is nothing to do."""
        with self._changed:
            while (
                len(self._ready) >= self._limit
                and ticket != self._next
                and not self._closed
            ):
                self._changed.wait()
            self._ready[ticket] = (function, argument) if function else None
            self._changed.notify_all()

    def stop(self, deadline: float) -> bool:
        """Runs what is ready, then ends; True if it did before the deadline."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(max(0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._next not in self._ready:
                    if self._closed:
                        return
                    self._changed.wait()
                entry = self._ready.pop(self._next)
                self._next += 1
                self._changed.notify_all()
            if entry:
                self._call(*entry)
            del entry  # What it refers to must not outlive it here.

    def _call(self, function: Callable, argument: Any) -> None:
        try:
            function(argument)
        except Exception as error:
            # The reply is out and the next calls must go on; the owner of the
            # server learns of it.
            self._failed(error)
