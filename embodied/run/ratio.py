"""How much to train for each environment step. The process that trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from fractions import Fraction

from embodied.base import Tree
from embodied.replay.limiters import as_fraction

logger = logging.getLogger("embodied.run")


class TrainRatio:
    """Says how many batches to train after environment steps.

        ratio.collected(collect())
        while ratio.due(len(replay)):
          train()
          ratio.trained(1)

    The first batch is due as soon as `start` sequences are stored. From there on
    trained time steps are counted against environment steps; those before count for
    nothing:

        0 < trained − ratio · steps ≤ batch        whenever nothing is due

    so that they keep to the ratio exactly, to within one batch, however long the run
    is. Batches that are due and not trained yet, as at the end by a signal, stay due.
    With a ratio of 0 or less there is no limit to keep to: one batch is due after
    environment steps, however many.

    Args:
      ratio: trained time steps per environment step.
      batch_size: sequences in a batch.
      batch_length: trained time steps of each.
      start: stored sequences from which on there is training.
    """

    def __init__(self, ratio: float, batch_size: int, batch_length: int, start: int):
        if not math.isfinite(ratio):
            raise ValueError(f"TrainRatio expected a finite ratio, got {ratio}.")
        if batch_size < 1 or batch_length < 1:
            raise ValueError(
                "TrainRatio expected a batch of at least 1 sequence of 1 step, got "
                f"batch_size={batch_size} and batch_length={batch_length}."
            )
        if start < 1:
            raise ValueError(f"TrainRatio expected start >= 1, got {start}.")
        self._ratio = as_fraction(ratio)
        self._start = start
        self._batch = batch_size * batch_length
        self._steps = 0  # Of environments.
        self._trained = 0  # Time steps.
        self._begun = False  # Whether `start` was reached, and counts are real.
        self._fresh = False  # Whether there were steps since the last batch.

    def collected(self, steps: int) -> None:
        """Counts environment steps."""
        self._steps += steps
        self._fresh = True

    def trained(self, batches: int) -> None:
        """Counts batches that were trained on."""
        self._fresh = False
        if self._ratio > 0:
            self._trained += batches * self._batch

    def due(self, stored: int, capacity: float = math.inf) -> int:
        """Returns how many batches to train now.

        Args:
          stored: sequences that can be sampled.
          capacity: sequences that can be stored; where they are fewer than `start`,
            they are enough.
        """
        if not self._begun:
            # Counts that begin anew wait for a first step, too.
            if stored < min(self._start, capacity) or not self._steps:
                return 0
            self._begun, self._steps = True, 0
        if self._ratio <= 0:
            return int(self._fresh)
        # One batch is due while trained ≤ ratio · steps, so the first one at once.
        behind = self._ratio * self._steps - self._trained
        return max(0, math.floor(behind / self._batch) + 1)

    def save(self) -> Tree:
        """Returns the counts."""
        return {
            "ratio": list(self._ratio.as_integer_ratio()),
            "steps": self._steps,
            "trained": self._trained,
        }

    def load(self, data: Tree) -> None:
        """Goes on with saved counts; if the ratio is another, counts anew."""
        keys = ("ratio", "steps", "trained")
        if not isinstance(data, Mapping) or not all(key in data for key in keys):
            raise ValueError(
                f"TrainRatio expected saved state with {list(keys)}, got {data!r:.200}."
            )
        before = Fraction(*data["ratio"])
        same = before == self._ratio
        if not same:
            logger.info(
                "The train ratio was %g and is %g from here on.", before, self._ratio
            )
        self._steps = int(data["steps"]) if same else 0
        self._trained = int(data["trained"]) if same else 0
        self._begun = self._trained > 0
