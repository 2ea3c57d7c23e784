"""Clocks that say when an interval has passed. Any process."""

from __future__ import annotations

import time
from collections.abc import Callable


class LocalClock:
    """Says whether an interval has passed since it last said so.

        should_log = LocalClock(120)
        while True:
          ...
          if should_log():
            logger.write()

    A late call counts as one interval, and the next one begins there. A clock
    belongs to the thread that calls it.

    Args:
      every: seconds; 0 means never, a negative number at every call.
      first: what the first call answers, which starts the clock, if `every` is a
        number of seconds.
      time: returns seconds that never go backwards.
    """

    def __init__(
        self,
        every: float,
        first: bool = False,
        time: Callable[[], float] = time.monotonic,
    ):
        if every != every:
            raise ValueError(f"LocalClock expected a number of seconds, got {every}.")
        self._every = every
        self._first = first
        self._time = time
        self._start: float | None = None

    def __call__(self) -> bool:
        """Returns whether the interval has passed, and if so starts the next one."""
        if self._every <= 0:
            return self._every < 0
        now = self._time()
        if self._start is None:
            self._start = now
            return self._first
        if now - self._start < self._every:
            return False
        self._start = now
        return True
