"""Turns: threads wait in line for something to be allowed. Any process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Turns:
    """Threads that wait for one thing and are served in the order they came.

    All methods are called with the lock held.
    """

    def __init__(self, lock: threading.Lock):
        self._condition = threading.Condition(lock)
        self._tickets: deque[object] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tickets)

    def wait(self, allowed: Callable[[], bool], timeout: float | None) -> bool:
        """Returns True when it is this thread's turn and allowed, else False."""
        ticket = object()
        self._tickets.append(ticket)

        def over() -> bool:
            return self._closed or (self._tickets[0] is ticket and allowed())

        try:
            return self._condition.wait_for(over, timeout) and not self._closed
        finally:
            self._tickets.remove(ticket)
            self.wake()  # The next one in line may be allowed, too.

    def wake(self) -> None:
        """Has the waiting threads look again."""
        self._condition.notify_all()

    def free(self) -> bool:
        """Returns whether nobody waits and the line is open."""
        return not self._tickets and not self._closed

    def close(self) -> None:
        """Sends all threads away, now and later."""
        self._closed = True
        self.wake()
