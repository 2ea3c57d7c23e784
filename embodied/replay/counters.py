"""Counts what happens in a buffer, since the start and since last asked. Replay."""

from __future__ import annotations

import collections
from collections.abc import Mapping

NAMES = (
    "inserts",
    "samples",
    "train_samples",
    "updates",
    "evicted",
    "update_ignored",
    "online_dropped",
    "priorities_rejected",
)


class Counters:
    """Totals by name. Calls must not overlap: they are made under the index lock."""

    def __init__(self) -> None:
        self._totals: collections.Counter[str] = collections.Counter()
        self._reported: collections.Counter[str] = collections.Counter()

    def add(self, **amounts: int) -> None:
        """Adds to the totals."""
        for name, amount in amounts.items():
            self._totals[name] += amount

    def total(self, name: str) -> int:
        """Returns the count since the start."""
        return self._totals[name]

    def report(self, length: int) -> dict[str, float]:
        """Returns counts since the last report, totals, and the replay ratio.

        The ratio is steps sampled for training per step inserted.

        Args:
          length: steps in a sample.
        """
        result: dict[str, float] = {}
        for name in NAMES:
            result[name] = self._totals[name] - self._reported[name]
            result[f"total_{name}"] = self._totals[name]
        if result["inserts"]:
            trained = result["train_samples"] * length
            result["replay_ratio"] = trained / result["inserts"]
        self._reported = self._totals.copy()
        return result

    def save(self) -> dict[str, int]:
        """Returns the totals."""
        return {name: self._totals[name] for name in NAMES}

    def load(self, totals: Mapping[str, int]) -> None:
        """Goes on from saved totals."""
        self._totals = collections.Counter({x: int(totals[x]) for x in NAMES})
        self._reported = self._totals.copy()
