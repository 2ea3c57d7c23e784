"""Rates, shares of time and means that loops log. The process that runs the loop."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


class Means:
    """Averages metrics over updates: means of numbers, the last value of all else.

    Values may be arrays on a device. They are read one update later, so that `add` does
    not wait for the device.
    """

    def __init__(self) -> None:
        self._pending: Mapping[str, Any] = {}
        self._totals: dict[str, tuple[float, int]] = {}
        self._last: dict[str, Any] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of one update."""
        pending, self._pending = self._pending, dict(metrics)
        for name, value in pending.items():
            if isinstance(value, str) or np.ndim(value):
                self._last[name] = value
            else:
                total, count = self._totals.get(name, (0.0, 0))
                self._totals[name] = (total + float(np.asarray(value)), count + 1)

    def result(self) -> dict[str, Any]:
        """Returns the averages since the last call."""
        self.add({})
        means = {name: total / count for name, (total, count) in self._totals.items()}
        result = {**means, **self._last}
        self._totals, self._last = {}, {}
        return result


class Meter:
    """Measures events per second, and shares of the time.

        with meter.section('train'):
          ...
        meter.count('train', batch_size * batch_length)
        logger.add(meter.result())     # {'fps/train': …, 'timer/train': …}

    `fps/NAME` are counts per second; `timer/NAME` are shares of the time, between 0
    and 1. The remainder to a sum of 1 is time outside of sections.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._start = clock()
        self._counts = collections.Counter[str]()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Measures how long the body takes. Sections must not be nested."""
        start = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def count(self, name: str, amount: int) -> None:
        """Counts events, which are reported per second."""
        self._counts[name] += amount

    @property
    def idle(self) -> bool:
        """Whether nothing has been counted since the last result."""
        return not any(self._counts.values())

    def result(self) -> dict[str, float]:
        """Returns rates and shares since the last call."""
        now = self._clock()
        elapsed = now - self._start
        if elapsed <= 0:
            return {}
        result = {f"fps/{k}": count / elapsed for k, count in self._counts.items()}
        for name, seconds in self._seconds.items():
            result[f"timer/{name}"] = seconds / elapsed
        self._start = now
        # Names stay: an event that has not happened is zero, not missing.
        self._counts = collections.Counter(dict.fromkeys(self._counts, 0))
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return result
