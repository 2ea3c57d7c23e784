"""Counts, rates and latencies of a server or client. Any thread.

Counts are taken without a lock: an increment that another thread overtakes may be
lost, which costs nothing but a little precision.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque

import numpy as np

log = logging.getLogger("embodied.rpc")


class Statistics:
    """What one server or client has done since it was last asked."""

    def __init__(self, name: str):
        self._name = name
        self._since = time.monotonic()
        self.counts: Counter = Counter()
        self.rejected: Counter = Counter()  # By reason, since the start.
        self.latencies: deque[float] = deque(maxlen=1024)

    def reject(self, reason: str, text: str) -> None:
        """Counts a message that is not served, and mentions it now and then."""
        self.rejected[reason] += 1
        count = self.rejected[reason]
        if count & (count - 1) == 0:  # The 1st, 2nd, 4th, 8th, ...
            log.warning("%s rejected (%s, %d): %s", self._name, reason, count, text)

    def collect(self, *names: str) -> dict[str, float]:
        """Returns the named counts, the call rate and latencies, and starts anew."""
        now = time.monotonic()
        counts, self.counts = self.counts, Counter()
        duration, self._since = max(1e-9, now - self._since), now
        latencies = np.array(self.latencies or [0.0])
        return {
            **{name: counts[name] for name in names},
            "call_rate": counts["calls"] / duration,
            "latency_p50": float(np.percentile(latencies, 50)),
            "latency_p99": float(np.percentile(latencies, 99)),
        }
