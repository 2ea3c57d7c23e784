"""Selectors: which items of a replay buffer are drawn next. The buffer's process.

A selector works on arrays of slots, small integers that the buffer reuses after
eviction:

    selector.insert(slots)                    # New items.
    slots = selector.sample(16)               # With `peek`: nothing changes.
    selector.prioritize(slots, priorities)    # Results of training on them.
    selector.remove(slots)                    # Evicted items, always the oldest.

Calls must not overlap: the buffer makes them under its lock. All state is in NumPy
arrays. An operation on k slots of n takes O(k log n) on average, or less. Selectors are
not saved: a buffer that is loaded inserts its items, the oldest first, and sets the
priorities that it has saved.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied.replay.chunks import SlotRing
from embodied.replay.slots import SlotSet, SumTree

__all__ = ["Fifo", "Mixture", "Prioritized", "Recency", "Selector", "Uniform"]

_LARGEST = 1e290  # Sums of weights of this size are still finite.


class Selector:
    """Draws slots. Always truthy, so that an empty one is not taken for a missing one.

    `uses_priorities` says whether the buffer has to keep priorities of steps and to
    call `prioritize`.
    """

    uses_priorities: bool = False

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n], the oldest first. They must not be present."""
        raise NotImplementedError(f"{type(self).__name__}.insert")

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n], which are the oldest ones in their order."""
        raise NotImplementedError(f"{type(self).__name__}.remove")

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount] int64, or raises LookupError if there are none.

        With `peek`, for reports, a call does not affect later calls without it: their
        priorities, cursors and random state stay the same.
        """
        raise NotImplementedError(f"{type(self).__name__}.sample")

    def prioritize(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities [n], or [n, T] for the T steps of each slot's sequence."""

    def reseed(self, position: int) -> None:
        """Begins other random numbers for each position, such as the samples so far."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def __bool__(self) -> bool:
        return True

    def _check_amount(self, amount: int) -> None:
        if operator.index(amount) < 0:
            raise ValueError(f"Expected to sample 0 slots or more, got {amount}.")
        if amount and not len(self):
            raise LookupError(
                f"Cannot sample {amount} slots: this {type(self).__name__} selector "
                "is empty. Wait until the replay buffer holds a full sequence."
            )


class SeededSelector(Selector):
    """A selector with random states: one for samples, one for peeks."""

    def __init__(self, seed: int):
        self._seed = operator.index(seed)
        SeededSelector.reseed(self, 0)  # A Mixture has no members yet.

    def reseed(self, position: int) -> None:
        """Begins other random numbers for each position."""
        # The name is part of the seed because a Mixture and its members may have the
        # same seed. With the same random numbers, the choice of a member would
        # determine which of its slots is drawn.
        words = (*type(self).__name__.encode(), *([position] if position else []))
        self._rngs = [
            np.random.default_rng([self._seed, purpose, *words]) for purpose in (0, 1)
        ]

    def _rng(self, peek: bool) -> np.random.Generator:
        return self._rngs[1 if peek else 0]


class _RingSelector(SeededSelector):
    """A selector that holds its slots from the oldest to the newest."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self._slots = SlotRing()

    def __len__(self) -> int:
        return len(self._slots)

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n], the oldest first."""
        self._slots.append(slots)

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n], which are the oldest ones."""
        self._slots.drop(len(slots))

    def _draw_equally(self, amount: int, rng: np.random.Generator) -> np.ndarray:
        return self._slots.at(rng.integers(max(1, len(self)), size=amount))


class Fifo(_RingSelector):
    """Draws each slot once, from the oldest to the newest, then starts over.

    Drawing does not remove slots. A cursor continues after the slot drawn last; a slot
    that is inserted after the cursor has passed all others comes next.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cursor = 0  # Rank of the next slot.

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n]; the cursor stays in front of the same slot."""
        super().remove(slots)
        self._cursor = max(0, self._cursor - len(slots))

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Returns the next slots [amount]."""
        self._check_amount(amount)
        if not amount:
            return np.zeros(0, np.int64)
        ranks = (self._cursor + np.arange(amount)) % len(self)
        if not peek:
            self._cursor = int(ranks[-1]) + 1
        return self._slots.at(ranks)


class Uniform(_RingSelector):
    """Draws all slots with equal probability, with replacement.

    Args:
      seed: of the random state.
    """

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount]."""
        self._check_amount(amount)
        return self._draw_equally(amount, self._rng(peek))


class Recency(_RingSelector):
    """Draws slots by their age, the number of slots inserted since, with replacement.

    The probabilities are truncated to the number of slots present. Slots older than
    the last given age are not drawn. While all ages that are present have probability
    zero, all slots are drawn equally.

    Args:
      uprobs: probabilities by age that need not sum to one, for example
        `1 / np.arange(1, capacity + 1) ** exponent`.
      seed: of the random state.
    """

    def __init__(self, uprobs: Any, seed: int = 0):
        super().__init__(seed)
        uprobs = np.asarray(uprobs, np.float64)
        valid = uprobs.ndim == 1 and np.isfinite(uprobs).all() and (uprobs >= 0).all()
        if not valid or not uprobs.sum() > 0:
            raise ValueError(
                "Recency expected a vector of probabilities by age, finite, not "
                f"negative and not all zero, got shape {uprobs.shape}: "
                f"{np.array2string(uprobs, threshold=10)}."
            )
        # Divided by the largest one, so that the sum is finite.
        self._cumulative = np.cumsum(uprobs / uprobs.max())

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount]."""
        self._check_amount(amount)
        if not amount:
            return np.zeros(0, np.int64)
        rng = self._rng(peek)
        total = self._cumulative[min(len(self), len(self._cumulative)) - 1]
        if not total > 0:
            return self._draw_equally(amount, rng)
        targets = np.minimum(rng.random(amount) * total, np.nextafter(total, 0))
        ages = np.searchsorted(self._cumulative, targets, side="right")
        return self._slots.at(len(self) - 1 - ages)


class Prioritized(_RingSelector):
    """Draws slots in proportion to priority ** exponent.

    - A slot's priority is `maxfrac` · max + (1 − `maxfrac`) · mean over the priorities
      of its steps. Steps without one (not trained yet: NaN or infinite) do not count.
    - While slots have an infinite priority, only these are drawn, all equally.
    - With `zero_on_sample` a slot has priority zero from when it is drawn until
      `prioritize` sets another one. This holds within one call of `sample`, too: no
      slot is drawn twice while another one has a positive priority. Without it, and
      when peeking, a call draws with replacement.
    - While all priorities are zero, all slots are drawn equally, with replacement.
    - A priority that is NaN, infinite or negative must not end a training run: it is
      rejected, and the slot keeps its previous one. The buffer counts rejected
      priorities of single steps.

    Takes about 20 bytes per slot.

    Args:
      exponent: 0 draws all slots of positive priority equally.
      initial: priority of new slots; may be infinite.
      zero_on_sample: see above.
      maxfrac: from 0, the mean over the steps, to 1, the maximum.
      branching: fan-out of the sum tree.
      seed: of the random state.
    """

    uses_priorities = True

    def __init__(
        self,
        exponent: float = 1.0,
        initial: float = 1.0,
        zero_on_sample: bool = False,
        maxfrac: float = 0.0,
        branching: int = 16,
        seed: int = 0,
    ):
        super().__init__(seed)
        if not (exponent >= 0 and math.isfinite(exponent)):
            raise ValueError(f"Prioritized expected exponent >= 0, got {exponent}.")
        if not initial >= 0:
            raise ValueError(f"Prioritized expected initial >= 0, got {initial}.")
        if not 0 <= maxfrac <= 1:
            raise ValueError(f"Prioritized expected maxfrac in [0, 1], got {maxfrac}.")
        if operator.index(branching) < 2:
            raise ValueError(f"Prioritized expected branching >= 2, got {branching}.")
        self._exponent = exponent
        self._initial = initial
        self._zero_on_sample = zero_on_sample
        self._maxfrac = maxfrac
        self._weights = SumTree(
            branching
        )  # By slot; zero for infinite and absent ones.
        self._infinite = SlotSet()  # Those whose priority is infinite.

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n] with the initial priority."""
        super().insert(slots)
        self._weights.reserve(int(slots.max(initial=-1)) + 1)
        if math.isinf(self._initial):
            self._infinite.insert(slots)
        else:
            self._weights.update(slots, self._weigh(np.array([self._initial])))

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n], which are the oldest ones."""
        super().remove(slots)
        self._set(slots, 0.0)

    def prioritize(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of slots that are present.

        Args:
          slots: [n]. If one is repeated, its last valid priority counts.
          priorities: [n], or [n, T] for the T steps of each slot's sequence.
        """
        priorities = np.asarray(priorities, np.float64)
        if priorities.ndim not in (1, 2) or len(priorities) != len(slots):
            raise ValueError(
                f"Expected priorities of shape [{len(slots)}] or [{len(slots)}, T], "
                f"one row per slot, got {priorities.shape}."
            )
        if priorities.ndim == 2:
            priorities = self._aggregate(priorities)
        valid = np.isfinite(priorities) & (priorities >= 0)
        self._set(slots[valid], self._weigh(priorities[valid]))

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount]."""
        self._check_amount(amount)
        rng = self._rng(peek)
        if peek or not self._zero_on_sample:
            return self._draw(amount, rng)
        # Drawing with replacement and dropping repetitions has the same distribution
        # as drawing one by one and setting each to zero.
        parts = []
        while amount and (len(self._infinite) or self._weights.total > 0):
            drawn = self._draw(amount, rng)
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
            self._set(drawn, 0.0)
            parts.append(drawn)
            amount -= len(drawn)
        return np.concatenate([*parts, self._draw(amount, rng)])

    def _draw(self, amount: int, rng: np.random.Generator) -> np.ndarray:
        if count := len(self._infinite):
            return self._infinite.at(rng.integers(count, size=amount))
        if self._weights.total > 0:
            return self._weights.find(rng.random(amount) * self._weights.total)
        return self._draw_equally(amount, rng)

    def _set(self, slots: np.ndarray, weights: Any) -> None:
        self._infinite.discard(slots)
        self._weights.update(slots, weights)

    def _weigh(self, priorities: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            weights = np.minimum(priorities**self._exponent, _LARGEST)
        return np.where(priorities > 0, weights, 0.0)

    def _aggregate(self, priorities: np.ndarray) -> np.ndarray:
        """Returns [n] from [n, T]; NaN where no step has a valid priority."""
        valid = np.isfinite(priorities) & (priorities >= 0)
        priorities = np.where(valid, priorities, 0.0)
        counts = valid.sum(1)
        mean = (priorities / np.maximum(1, counts)[:, None]).sum(1)
        largest = priorities.max(1, initial=0.0)
        mixed = self._maxfrac * largest + (1 - self._maxfrac) * mean
        return np.where(counts > 0, mixed, np.nan)


class Mixture(SeededSelector):
    """Draws each sample from one of several selectors, chosen at random.

    Every member holds all slots and gets all priorities.

    Args:
      selectors: by name. They must hold the same slots, usually none yet.
      fractions: by the same names, how often each is chosen. They need not sum to
        one. A member of fraction 0 is left out, and costs nothing.
      seed: of the random state that chooses; the members have their own.
    """

    def __init__(
        self,
        selectors: Mapping[str, Selector],
        fractions: Mapping[str, float],
        seed: int = 0,
    ):
        super().__init__(seed)
        if set(selectors) != set(fractions):
            raise ValueError(
                "Mixture expected selectors and fractions of the same names, got "
                f"{sorted(selectors)} and {sorted(fractions)}."
            )
        values = np.array([float(x) for x in fractions.values()])
        if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
            raise ValueError(
                "Mixture expected fractions that are finite, not negative and not all "
                f"zero, got {dict(fractions)}."
            )
        self._members = {k: selectors[k] for k in sorted(selectors) if fractions[k] > 0}
        if len({len(member) for member in self._members.values()}) > 1:
            raise ValueError("Mixture expected members that hold the same slots.")
        self._names = list(self._members)
        chances = np.array([float(fractions[name]) for name in self._names])
        self._chances = (chances / chances.max()) / (chances / chances.max()).sum()
        self.uses_priorities = any(x.uses_priorities for x in self._members.values())

    def __len__(self) -> int:
        return len(self._members[self._names[0]])

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n] to all members."""
        for member in self._members.values():
            member.insert(slots)

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n] from all members."""
        for member in self._members.values():
            member.remove(slots)

    def reseed(self, position: int) -> None:
        """Begins other random numbers, for the choice and in all members."""
        super().reseed(position)
        for member in self._members.values():
            member.reseed(position)

    def prioritize(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Passes priorities on to all members."""
        for member in self._members.values():
            member.prioritize(slots, priorities)

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount]."""
        self._check_amount(amount)
        choice = self._rng(peek).choice(len(self._names), amount, p=self._chances)
        slots = np.empty(amount, np.int64)
        for index, name in enumerate(self._names):
            chosen = choice == index
            slots[chosen] = self._members[name].sample(int(chosen.sum()), peek)
        return slots
