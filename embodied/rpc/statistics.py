"""Counts, rates and latencies of a server or client. Any thread.

Counts are taken without a lock: an increment that another thread overtakes may be
lost, which costs nothing but a little precision.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

log = logging.getLogger("embodied.rpc")


@dataclass(slots=True)
class Counts:
    """What a server or client has done since its start."""

    calls: int = 0
    replies: int = 0
    errors: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    reconnects: int = 0  # Of clients.
    repeated: int = 0  # Calls that a server got twice.
    post_errors: int = 0


class Statistics:
    """What one server or client has done since it was last asked."""

    def __init__(self, name: str):
        self._name = name
        self._since = time.monotonic()
        self._told: Counter = Counter()  # The counts that were returned so far.
        self.counts = Counts()
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
        totals = {name: getattr(self.counts, name) for name in {*names, "calls"}}
        counts = {name: total - self._told[name] for name, total in totals.items()}
        self._told.update(counts)
        duration, self._since = max(1e-9, now - self._since), now
        latencies = np.array(self.latencies or [0.0])
        return {
            **{name: counts[name] for name in names},
            "call_rate": counts["calls"] / duration,
            "latency_p50": float(np.percentile(latencies, 50)),
            "latency_p99": float(np.percentile(latencies, 99)),
        }
