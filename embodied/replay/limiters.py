"""Limiters: hold back inserts or samples, whichever is ahead. The replay's process.

    limiter = limiters.make(train_ratio / batch_length, 4 * batch_size, 1024)

    if limiter.insert(len(steps)):            # Threads that store steps.
      replay.add_batch(steps, workers)        # If it raises: limiter.withdraw.
      limiter.available(len(replay))

    if limiter.sample(batch_size):            # Threads that draw training batches.
      batch = replay.sample(batch_size)

Both calls wait for their turn and return False once the limiter is closed or a
timeout is over; then nothing is counted. Evaluation steps and report batches do not
pass through a limiter.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Self

from embodied.base import Tree
from embodied.replay.turns import Turns


class Limiter:
    """Counts inserts and samples; subclasses say when each side may go on.

    Samples wait until `min_size` sequences are stored. Inserts never wait before
    that, and both counts begin there: nothing is made up for the steps before.

    Each side is served in the order of arrival, so a large group of inserts does not
    starve among small ones. Threads wait on conditions and use no time meanwhile.
    `_lock` guards all state; any thread may call any method.

    Args:
      min_size: stored sequences from which on samples may be drawn.
    """

    def __init__(self, min_size: int):
        name = type(self).__name__
        if operator.index(min_size) < 1:
            raise ValueError(f"{name} expected min_size >= 1, got {min_size}.")
        self._min_size = min_size
        self._lock = threading.Lock()
        self._inserters = Turns(self._lock)
        self._samplers = Turns(self._lock)
        self._filled = False  # Whether there is enough to sample from.
        self._inserts = 0
        self._samples = 0
        self._begun = False  # Whether `min_size` was reached, and counts are real.
        self._open = 0  # Threads that have inserts let through.

    def insert(self, amount: int, timeout: float | None = None) -> bool:
        """Waits until `amount` steps may be stored, and counts them all at once.

        Args:
          amount: steps that will be stored together.
          timeout: seconds to wait at most; None waits until `close`.

        Returns:
          Whether the steps may be stored.
        """
        _check_amount(amount)
        with self._lock:
            if not self._inserters.wait(
                lambda: bool(self._open) or self._may_insert(amount), timeout
            ):
                return False
            self._inserts += amount
            self._samplers.wake()
            return True

    def sample(self, amount: int, timeout: float | None = None) -> bool:
        """Waits until `amount` sequences may be drawn, and counts them all at once.

        Arguments and result are those of `insert`.
        """
        _check_amount(amount)
        with self._lock:
            if not self._samplers.wait(self._may_sample, timeout):
                return False
            self._samples += amount
            self._inserters.wake()
            return True

    def want_insert(self, amount: int = 1) -> bool:
        """Returns whether `insert` would go on without waiting, right now."""
        _check_amount(amount)
        with self._lock:
            return self._inserters.free() and self._may_insert(amount)

    def want_sample(self, amount: int = 1) -> bool:
        """Returns whether `sample` would go on without waiting, right now."""
        _check_amount(amount)
        with self._lock:
            return self._samplers.free() and self._may_sample()

    def available(self, size: int, capacity: float = math.inf) -> None:
        """Tells how many sequences are stored. Call it after every change.

        Where threads race, a number that comes late is put right by the next one;
        inserts do not wait meanwhile.

        Args:
          size: sequences that are stored.
          capacity: sequences that can be stored; where they are fewer than
            `min_size`, they are enough.
        """
        with self._lock:
            self._filled = operator.index(size) >= min(self._min_size, capacity)
            if not self._begun and self._filled:
                self._begun = True
                self._inserts = 0
            self._samplers.wake()
            self._inserters.wake()

    def refund(self, amount: int) -> None:
        """Takes back samples that were drawn ahead and will never be trained on."""
        _check_amount(amount)
        with self._lock:
            self._samples = self._without(amount)
            self._samplers.wake()

    def withdraw(self, amount: int) -> None:
        """Takes back inserts that were counted, but could not be stored."""
        _check_amount(amount)
        with self._lock:
            if amount > self._inserts:
                raise ValueError(
                    f"Expected at most the {self._inserts} inserts that were counted, "
                    f"got {amount}."
                )
            self._inserts -= amount
            self._inserters.wake()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Lets inserts that wait, and those that come meanwhile, through.

        They are counted, so that later ones wait for longer. For a moment at which
        none may be halfway, such as a save.
        """
        with self._lock:
            self._open += 1
            self._inserters.wake()
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1

    def stats(self) -> dict[str, float]:
        """Returns the counts, how far sampling is ahead, and how many threads wait."""
        with self._lock:
            return {
                "inserts": self._inserts,
                "samples": self._samples,
                "ahead": float(self._ahead()),
                "inserts_waiting": len(self._inserters),
                "samples_waiting": len(self._samplers),
            }

    def save(self, pending: int = 0) -> Tree:
        """Returns the counts.

        Args:
          pending: samples that are drawn, but not yet trained on. A run that is
            resumed from here has lost them and draws as many again.
        """
        with self._lock:
            return {
                "ratio": list(self._ratio().as_integer_ratio()),
                "inserts": self._inserts,
                "samples": self._without(pending),
            }

    def load(self, data: Tree) -> None:
        """Restores what `save` returned; if the ratio is another, counts anew.

        The number of stored sequences is not part of it: call `available` after the
        replay buffer was loaded.
        """
        keys = ("ratio", "inserts", "samples")
        if not isinstance(data, Mapping) or not all(key in data for key in keys):
            raise ValueError(
                f"{type(self).__name__} expected saved state with {list(keys)}, got "
                f"{data!r:.200}."
            )
        same = Fraction(*data["ratio"]) == self._ratio()
        with self._lock:
            self._inserts = int(data["inserts"]) if same else 0
            self._samples = int(data["samples"]) if same else 0
            self._begun = self._samples > 0
            self._samplers.wake()
            self._inserters.wake()

    def close(self) -> None:
        """Releases all waiting threads; from now on nothing is let through."""
        with self._lock:
            self._samplers.close()
            self._inserters.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ratio(self) -> Fraction:
        raise NotImplementedError(f"{type(self).__name__}._ratio")

    def _may_insert(self, amount: int) -> bool:
        raise NotImplementedError(f"{type(self).__name__}._may_insert")

    def _may_sample(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__}._may_sample")

    def _ahead(self) -> Fraction:
        return self._samples - self._ratio() * self._inserts

    def _without(self, amount: int) -> int:
        if not 0 <= amount <= self._samples:
            raise ValueError(
                f"Expected to take back at most the {self._samples} samples that were "
                f"counted, got {amount}."
            )
        return self._samples - amount


class SamplesPerInsert(Limiter):
    """Keeps samples in a fixed proportion to inserts.

    With `ahead` = samples − ratio · inserts, once `min_size` sequences are stored:

    - A batch may be drawn while ahead ≤ 0; so the first one at once.
    - A group of n steps may be stored if ahead − ratio · n ≥ −tolerance, or if
      ahead ≥ 0, for groups that the tolerance has no room for.

    From that follows, for batches of at most B samples and groups of at most n steps:

    - −max(tolerance, ratio · n) ≤ ahead ≤ B; a refund, by its amount, may lead
      below.
    - Nothing deadlocks: samples wait only while ahead > 0 or too little is stored,
      inserts only while ahead < 0 and enough is stored.
    - Whenever the sampling side waits, 0 < ahead ≤ B: the number of samples is the
      exact one, to within one batch. Whenever the inserting side waits, ahead is less
      than ratio · n above the lower bound. So between any two moments at which the
      same side waits, however far apart, samples differ from ratio · inserts by less
      than one batch, or one group.

    The ratio is kept as a fraction and the counts as integers, so that nothing drifts.
    Batches that are prefetched count when they are drawn; see `refund`, and `save`
    for how a resumed run makes up for those that are lost.

    Args:
      samples_per_insert: sequences drawn per step stored.
      tolerance: samples by which inserts may run ahead, usually four batches.
      min_size: stored sequences from which on samples may be drawn.
    """

    def __init__(
        self,
        samples_per_insert: float,
        tolerance: float,
        min_size: int,
    ):
        super().__init__(min_size)
        if not (samples_per_insert > 0 and math.isfinite(samples_per_insert)):
            raise ValueError(
                "SamplesPerInsert expected a ratio above 0 and finite, got "
                f"{samples_per_insert}. For no limit, use Unlimited."
            )
        if not (tolerance >= 1 and math.isfinite(tolerance)):
            raise ValueError(
                "SamplesPerInsert expected a tolerance of at least 1 sample and "
                f"finite, got {tolerance}. Usual are four batches of samples."
            )
        self._samples_per_insert = as_fraction(samples_per_insert)
        self._tolerance = as_fraction(tolerance)

    def _ratio(self) -> Fraction:
        return self._samples_per_insert

    def _may_insert(self, amount: int) -> bool:
        ahead = self._ahead()
        return (
            not self._filled
            or ahead >= 0
            or ahead - self._ratio() * amount >= -self._tolerance
        )

    def _may_sample(self) -> bool:
        return self._filled and self._ahead() <= 0


class Unlimited(Limiter):
    """Holds back nothing but samples while fewer than `min_size` sequences are stored.

    Args:
      min_size: stored sequences from which on samples may be drawn.
    """

    def _ratio(self) -> Fraction:
        return Fraction(0)

    def _may_insert(self, amount: int) -> bool:
        return True

    def _may_sample(self) -> bool:
        return self._filled


def make(samples_per_insert: float, tolerance: float, min_size: int) -> Limiter:
    """Returns a SamplesPerInsert limiter, or an Unlimited one if the ratio is ≤ 0."""
    if samples_per_insert <= 0:
        return Unlimited(min_size)
    return SamplesPerInsert(samples_per_insert, tolerance, min_size)


def as_fraction(value: float) -> Fraction:
    """Returns the simple fraction that the float was computed from, if there is one.

    Such as 1/10, and not the float next to it: counts against it do not drift. Where
    there is none, also for a value too small for one, it is the float's own.
    """
    value = float(value)
    simple = Fraction(value).limit_denominator(1_000_000)
    return simple if float(simple) == value else Fraction(value)


def _check_amount(amount: int) -> None:
    if operator.index(amount) < 1:
        raise ValueError(f"Expected an amount of 1 or more, got {amount}.")
