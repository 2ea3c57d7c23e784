"""Limiters: keep training in proportion to environment steps. Replay's process.

Two threads, each held back while it is ahead of the other:

    limiter = limiters.SamplesPerInsert(train_ratio / batch_length, 64, 1024)

    if limiter.wait_insert(len(steps)):       # The thread that stores steps.
      replay.add_batch(steps, workers)
      limiter.insert(len(steps))
      limiter.available(len(replay), replay.full)

    if limiter.wait_sample():                 # The thread that draws batches.
      batch = replay.sample(batch_size)
      limiter.sample(batch_size)

Or one thread, which asks how much to train after each collected step:

    for _ in range(limiter.due(batch_size)):
      batch = replay.sample(batch_size)
      limiter.sample(batch_size)

Evaluation steps and report batches do not pass through a limiter.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Self

from embodied.base import Tree


class SamplesPerInsert:
    """Keeps samples in a fixed proportion to inserts.

    Training begins when `min_size` sequences are stored, or as many as the buffer can
    hold. Both counts begin there: there is no catching up on earlier steps. From then
    on, with `ahead` = samples − ratio · inserts:

    - A batch may be drawn while ahead ≤ 0, so the first one at once.
    - A group of n steps may be stored if ahead − ratio · n ≥ −tolerance, or if
      ahead ≥ 0, for groups that are larger than the tolerance allows.

    It follows, for batches of at most B samples and groups of at most n steps:

    - −max(tolerance, ratio · n) ≤ ahead ≤ B.
    - Nothing deadlocks: samples wait only while ahead > 0 or too little is stored,
      inserts only while ahead < 0 and there is something to sample.
    - Whenever the sampling side waits, 0 < ahead ≤ B: the number of samples is exact
      to within one batch.

    The ratio is kept as a fraction and the counts as integers, so that nothing drifts.
    A ratio of 0 or less means no limit: samples only wait for the first sequences.

    One thread inserts and one samples, or one does both; any thread may call the other
    methods. `_changed` guards all state.

    Args:
      samples_per_insert: sequences drawn per step stored.
      tolerance: samples by which inserts may run ahead, usually four batches.
      min_size: stored sequences that are needed before samples may be drawn.
    """

    def __init__(self, samples_per_insert: float, tolerance: float, min_size: int):
        if not math.isfinite(samples_per_insert):
            raise ValueError(
                f"SamplesPerInsert expected a finite ratio, got {samples_per_insert}."
            )
        if not (tolerance >= 1 and math.isfinite(tolerance)):
            raise ValueError(
                "SamplesPerInsert expected a tolerance of at least 1 sample and "
                f"finite, got {tolerance}. Usual are four batches of samples."
            )
        if operator.index(min_size) < 1:
            raise ValueError(
                f"SamplesPerInsert expected min_size >= 1, got {min_size}."
            )
        self._ratio = as_fraction(max(0.0, samples_per_insert))
        self._tolerance = as_fraction(tolerance)
        self._min_size = min_size
        self._changed = threading.Condition()
        self._inserts = 0
        self._samples = 0
        self._stored = 0  # Sequences that can be sampled.
        self._begun = False  # Whether training has begun, and the counts apply.
        self._fresh = False  # Whether there were inserts since the last sample.
        self._waiting = {"inserts": 0, "samples": 0}  # Threads, by side.
        self._closed = False

    def wait_insert(self, amount: int, timeout: float | None = None) -> bool:
        """Waits until `amount` steps may be stored; returns whether they may.

        Args:
          amount: steps that will be stored together.
          timeout: seconds to wait at most; None waits until `close`.
        """
        _check_amount(amount)
        return self._wait("inserts", lambda: self._may_insert(amount), timeout)

    def wait_sample(self, timeout: float | None = None) -> bool:
        """Waits until a batch may be drawn; returns whether it may."""
        return self._wait("samples", self._may_sample, timeout)

    def insert(self, amount: int) -> None:
        """Counts steps that were stored."""
        _check_amount(amount)
        with self._changed:
            self._inserts += amount
            self._fresh = True
            self._changed.notify_all()

    def sample(self, amount: int) -> None:
        """Counts sequences that were drawn."""
        _check_amount(amount)
        with self._changed:
            self._samples += amount
            self._fresh = False
            self._changed.notify_all()

    def due(self, batch: int) -> int:
        """Returns how many batches to train on before the next steps are collected.

        Without a limit this is one batch after new steps, however many there are.

        Args:
          batch: sequences in a batch.
        """
        _check_amount(batch)
        with self._changed:
            if not self._may_sample():
                return 0
            if not self._ratio:
                return int(self._fresh)
            return math.floor(-self._ahead() / batch) + 1

    def available(self, stored: int, full: bool) -> None:
        """Records how many sequences are stored. Call it after every change.

        Args:
          stored: sequences that can be sampled.
          full: whether the buffer cannot hold more, so that these are enough.
        """
        with self._changed:
            self._stored = operator.index(stored)
            enough = self._stored >= self._min_size or (full and self._stored > 0)
            # Counts that were reset, as for another ratio, wait for a first step, too.
            if not self._begun and enough and self._inserts:
                self._begun = True
                self._inserts = 0
            self._changed.notify_all()

    @property
    def begun(self) -> bool:
        """Whether enough was stored for training to begin."""
        with self._changed:
            return self._begun

    def stats(self) -> dict[str, float]:
        """Returns the counts, how far sampling is ahead, and how many threads wait."""
        with self._changed:
            return {
                "inserts": self._inserts,
                "samples": self._samples,
                "ahead": float(self._ahead()),
                "inserts_waiting": self._waiting["inserts"],
                "samples_waiting": self._waiting["samples"],
            }

    def save(self, pending: int = 0) -> Tree:
        """Returns the counts.

        Args:
          pending: samples that are drawn, but not yet trained on. A run that is
            resumed from here has lost them and draws as many again.
        """
        with self._changed:
            return {
                "ratio": list(self._ratio.as_integer_ratio()),
                "inserts": self._inserts,
                "samples": self._samples - min(operator.index(pending), self._samples),
                "begun": self._begun,
            }

    def load(self, data: Tree) -> None:
        """Restores what `save` returned; resets the counts if the ratio has changed.

        The number of stored sequences is not part of it: call `available` after the
        replay buffer was loaded.
        """
        same = self._is_same_ratio(data)
        with self._changed:
            self._inserts = int(data["inserts"]) if same else 0
            self._samples = int(data["samples"]) if same else 0
            # Older versions did not save it, and counted from the first step.
            self._begun = same and bool(data.get("begun", self._samples > 0))
            self._fresh = False
            self._changed.notify_all()

    def set_samples(self, samples: int) -> None:
        """Corrects how many sequences were drawn.

        Sequences that were drawn in vain, as for a learner that was killed, are drawn
        again.
        """
        with self._changed:
            self._samples = max(0, operator.index(samples))
            self._changed.notify_all()

    def saved_samples(self, data: Tree) -> int:
        """Returns how many sequences were drawn when `save` returned `data`.

        Returns 0 if the ratio has changed, since `load` resets the counts then.
        """
        return int(data["samples"]) if self._is_same_ratio(data) else 0

    def close(self) -> None:
        """Ends all waits; these and all later ones return False."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_same_ratio(self, data: Tree) -> bool:
        keys = ("ratio", "inserts", "samples")
        if not isinstance(data, Mapping) or not all(key in data for key in keys):
            raise ValueError(
                f"SamplesPerInsert expected saved state with {list(keys)}, got "
                f"{data!r:.200}."
            )
        return Fraction(*data["ratio"]) == self._ratio

    def _wait(
        self, side: str, allowed: Callable[[], bool], timeout: float | None
    ) -> bool:
        with self._changed:
            self._waiting[side] += 1
            try:
                self._changed.wait_for(lambda: self._closed or allowed(), timeout)
                return not self._closed and allowed()
            finally:
                self._waiting[side] -= 1

    def _may_insert(self, amount: int) -> bool:
        ahead = self._ahead()
        return (
            not (self._begun and self._stored)
            or ahead >= 0
            or ahead - self._ratio * amount >= -self._tolerance
        )

    def _may_sample(self) -> bool:
        unlimited = not self._ratio
        return self._begun and self._stored > 0 and (unlimited or self._ahead() <= 0)

    def _ahead(self) -> Fraction:
        return self._samples - self._ratio * self._inserts


def as_fraction(value: float) -> Fraction:
    """Returns the simple fraction that a float was computed from, if there is one.

    For 0.1 this is 1/10, not the exact value of the float, so that counts against it do
    not drift. Without a simple fraction, as for very small values, it is that value.
    """
    value = float(value)
    simple = Fraction(value).limit_denominator(1_000_000)
    return simple if float(simple) == value else Fraction(value)


def _check_amount(amount: int) -> None:
    if operator.index(amount) < 1:
        raise ValueError(f"Expected an amount of 1 or more, got {amount}.")
