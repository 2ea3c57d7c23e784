"""Threads of servers and clients: how they wait, wake and share work. Any process.

A server's loop waits on file descriptors only. It has two threads, of which one leads
and the other is its deputy; others run the bound functions, and one runs each `postfn`
after the replies.
"""

from __future__ import annotations

import logging
import os
import queue
import resource
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

LATE = 0.005  # Seconds after which the deputy takes over from the leading thread.
MAX_FAILURES = 100  # Steps of a loop that may fail in a row.
FAILURE_PAUSE = 0.01  # Seconds after a step that failed, so that it does not spin.
STOP = None

log = logging.getLogger("embodied.rpc")


def join_all(threads: list[threading.Thread], deadline: float | None) -> bool:
    """Waits for threads that were started; True if all ended before the deadline."""
    current = threading.current_thread()
    started = [x for x in threads if x.ident is not None and x is not current]
    for thread in started:
        thread.join(deadline and max(0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in started)


def raise_descriptor_limit() -> None:
    """Lets this process have more descriptors than the usual 1024.

    A client without descriptors may be ended by libzmq.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No more: programs that are started from here may go through all descriptors.
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            pass  # The system's own limit is lower; the flood test shows the effect.


class Wakeup:
    """Wakes a thread that polls. Any thread may call any method, also after `close`.

    The number of a closed descriptor is soon reused, for example by libzmq, which ends
    the process if its socket is woken for nothing. So the number is neither written to
    nor read from after `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Guards the descriptors.
        self._closed = False
        if hasattr(os, "eventfd"):
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._read

    def set(self) -> None:
        """Makes the descriptor readable."""
        with self._lock:
            if self._closed:
                return
            try:
                os.write(self._write, b"\1\0\0\0\0\0\0\0")
            except BlockingIOError:
                pass  # It is readable already.

    def clear(self) -> None:
        """Makes the descriptor unreadable until the next `set`."""
        with self._lock:
            if self._closed:
                return
            try:
                os.read(self._read, 4096)
            except BlockingIOError:
                pass  # Nobody has set it.

    def close(self) -> None:
        """Frees the descriptors. No thread may poll them any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._read)
            if self._write != self._read:
                os.close(self._write)


class Poller:
    """Waits for descriptors, and calls the handlers of their events.

    It does the same as `selectors`, in less time.
    """

    def __init__(self) -> None:
        epoll = hasattr(select, "epoll")
        self._poll: Any = select.epoll() if epoll else select.poll()
        self._second = 1 if epoll else 1000
        self._handlers: dict[int, Callable[[int], Any]] = {}
        # Changes the events that are waited for. Any thread, on Linux.
        self.modify: Callable[[int, int], None] = self._poll.modify

    def add(self, descriptor: int, handler: Callable[[int], Any]) -> None:
        """Calls the handler with the events whenever the descriptor is readable."""
        self._poll.register(descriptor, select.POLLIN)
        self._handlers[descriptor] = handler

    def remove(self, descriptor: int) -> None:
        """Stops waiting for a descriptor. It must still be open."""
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]

    def wait(self, seconds: float) -> None:
        """Waits at most `seconds` for events, and handles them."""
        for descriptor, events in self._poll.poll(seconds * self._second):
            handler = self._handlers.get(descriptor)
            if handler is not None:  # Else an earlier handler removed it.
                handler(events)

    def close(self) -> None:
        """Frees the descriptor of epoll."""
        if hasattr(self._poll, "close"):
            self._poll.close()


class Loop:
    """Calls a function repeatedly, in one of two threads, until it is closed.

    It is fastest if the thread that received a batch also runs its function: waking
    another thread for it takes longer than many functions do. But a function that was
    quick so far may block one day, and no thread would receive meanwhile. So a deputy
    checks, LATE seconds after it sees a job, whether the leading thread is still at
    that job. If it is, the deputy leads from then on, and the previous leader becomes
    the deputy when it is done.

    Args:
      name: name of the threads.
      step: called in a loop by the leading thread. It may call `run` only at its end,
        since another thread may lead afterwards. Its errors are logged, and the loop
        goes on.
      on_failure: called with the error after MAX_FAILURES failed steps in a row, which
        end the loop, in the thread of the last one.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ):
        self._name = name
        self._step = step
        self._on_failure = on_failure
        self._failures = 0  # In a row: any step that succeeds resets it.
        self._closed = False
        # Guards changes of everything below, except that `run` begins a job without it.
        self._changed = threading.Condition()
        self._leader = 0
        self._job = 0  # Number of the job that the leader runs now; 0 if none.
        self._jobs = 0
        self._watched = True  # Whether the deputy watches; else it sleeps.
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
        """Runs a job in the leading thread; False if it no longer leads afterwards."""
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
        """Makes both threads end after their current step."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self, deadline: float | None = None) -> bool:
        """Waits for the threads; True if both ended before the deadline."""
        return join_all(self._threads, deadline)

    def _main(self, index: int) -> None:
        while not self._closed:
            if self._leader != index:
                self._watch(index)
                continue
            try:
                self._step()
                self._failures = 0
            except BaseException as error:  # A method may call `sys.exit`.
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # The 1st, 2nd, 4th, 8th, ...
            log.exception(
                "%s: the loop failed (%d in a row).", self._name, self._failures
            )
        if self._failures < MAX_FAILURES:
            time.sleep(FAILURE_PAUSE)
            return
        self.close()
        self._on_failure(error)

    def _watch(self, index: int) -> None:
        """Waits until this thread has to lead, or the loop is closed."""
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
                if not self._job:  # Else a job began that will not notify.
                    self._changed.wait()


class ThreadPool:
    """Threads that run jobs, one after the other for each owner of jobs.

    Any thread may put jobs in. Jobs of one owner, such as a client, run in the order
    they came, however many threads there are.
    """

    def __init__(self, workers: int, name: str, run: Callable[[Any], None]):
        self._run = run
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        # Jobs that wait for an earlier job of their owner, by owner.
        self._behind: dict[Any, deque] = {}
        self._lock = threading.Lock()  # Guards the one above.
        self._ordered = workers == 1  # One worker keeps the order by itself.
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(workers)
        ]

    @property
    def waiting(self) -> int:
        """Jobs that wait for a worker, but not for an earlier job of their owner."""
        return self._jobs.qsize()

    def start(self) -> None:
        """Starts the workers."""
        for thread in self._threads:
            thread.start()

    def put(self, job: Any, owner: Any = None) -> None:
        """Adds a job; jobs of the same owner run one after the other."""
        if self._ordered:
            owner = None
        if owner is not None:
            with self._lock:
                if owner in self._behind:
                    self._behind[owner].append(job)
                    return
                self._behind[owner] = deque()
        self._jobs.put((job, owner))

    def stop(self, deadline: float) -> bool:
        """Drops waiting jobs and waits for the running ones; True if all ended."""
        while not self._jobs.empty():
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break  # A worker was faster.
        for _ in self._threads:
            self._jobs.put(STOP)
        return join_all(self._threads, deadline)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not STOP:
            job, owner = entry
            try:
                self._run(job)
            except BaseException:
                # Errors of bound functions are sent to their callers. This one is the
                # server's own, and the thread is needed for the next job.
                log.exception(
                    "A worker thread failed while running a %s.", type(job).__name__
                )
            if owner is not None:
                self._take_next(owner)
            # Drop the references now, so that a call's shared memory can be freed.
            del entry, job, owner

    def _take_next(self, owner: Any) -> None:
        with self._lock:
            if not self._behind[owner]:
                del self._behind[owner]
                return
            job = self._behind[owner].popleft()
        self._jobs.put((job, owner))


class PostThread:
    """Runs the `postfn` of each job after its replies, in the order of tickets.

    A ticket is drawn when a worker begins a call, or is given a batch. A worker
    that is done before its turn does not wait, unless `limit` results are waiting
    already, which slows it down.
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
        """Draws the next place in the order."""
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
        return join_all([self._thread], deadline)

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
            del entry  # Drop the reference now, so that the result can be freed.

    def _call(self, function: Callable, argument: Any) -> None:
        try:
            function(argument)
        except BaseException as error:
            # The reply is sent and the next calls must go on, so that the error is only
            # reported.
            self._failed(error)
