"""The selector that draws by priority. The buffer's process."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from embodied.base import Tree
from embodied.replay.selector import SeededSelector
from embodied.replay.slots import SlotSet, SumTree, as_slots

_LARGEST = 1e290  # Sums of weights of this size are still finite.


class Prioritized(SeededSelector):
    """Draws slots in proportion to priority ** exponent.

    - A slot's priority is `maxfrac` · max + (1 − `maxfrac`) · mean over the priorities
      of its steps. Steps without one (not trained yet: NaN or infinite) do not count.
    - While slots have an infinite priority, only these are drawn, all equally.
    - With `zero_on_sample` a slot has priority zero from when it is drawn until
      `prioritize` gives it another, within one call of `sample` too: there, no slot
      comes twice as long as another has a priority. Without it, and when peeking, a
      call draws with replacement.
    - While all priorities are zero, all slots are drawn equally, with replacement.
    - A priority that is NaN, infinite or negative must not end a training run: the
      slot keeps the one it had, and `rejected` counts it. Those of single steps do
      not come this far: the buffer keeps what it had, and counts them itself.

    About 25 bytes per slot.

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
        self._branching = branching
        self._present = SlotSet()
        self._unseen = SlotSet()  # Those present whose priority is infinite.
        self._weights = SumTree(branching)  # By slot; zero for unseen and absent ones.
        self._rejected = 0

    @property
    def rejected(self) -> int:
        """How many priorities were NaN, infinite or negative, in all."""
        return self._rejected

    def __len__(self) -> int:
        return len(self._present)

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n] with the initial priority."""
        slots = as_slots(slots)
        self._present.insert(slots)
        self._weights.reserve(int(slots.max(initial=-1)) + 1)
        if math.isinf(self._initial):
            self._unseen.insert(slots)
        else:
            self._weights.update(slots, self._weigh(np.array([self._initial])))

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n]."""
        slots = as_slots(slots)
        self._present.remove(slots)
        self._unseen.remove(slots[self._unseen.contains(slots)])
        self._weights.update(slots, 0.0)

    def prioritize(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of slots that are present.

        Args:
          slots: [n]. If one is repeated, its last valid priority counts.
          priorities: [n], or [n, T] for the T steps of each slot's sequence.
        """
        slots = as_slots(slots)
        priorities = np.asarray(priorities, np.float64)
        if priorities.ndim not in (1, 2) or len(priorities) != len(slots):
            raise ValueError(
                f"Expected priorities of shape [{len(slots)}] or [{len(slots)}, T], "
                f"one row per slot, got {priorities.shape}."
            )
        self._present.require(slots)
        if priorities.ndim == 2:
            priorities = self._aggregate(priorities)
        valid = np.isfinite(priorities) & (priorities >= 0)
        self._rejected += int((~valid).sum())
        self._set(slots[valid], self._weigh(priorities[valid]))

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount]."""
        self._check_amount(amount)
        rng = self._rng(peek)
        if peek or not self._zero_on_sample:
            return self._draw(amount, rng)
        # To draw with replacement and to leave out repetitions has the same
        # distribution as to draw one by one and to set each to zero.
        parts = []
        while amount and (len(self._unseen) or self._weights.total > 0):
            drawn = self._draw(amount, rng)
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
            self._set(drawn, 0.0)
            parts.append(drawn)
            amount -= len(drawn)
        return np.concatenate([*parts, self._draw(amount, rng)])

    def save(self) -> Tree:
        """Returns the slots with their weights, and the random state."""
        present = self._present.slots()
        return self._saved(
            slots=present,
            unseen=self._unseen.slots(),
            weights=self._weights[present],
            rejected=self._rejected,
            random=self._save_random(),
        )

    def load(self, data: Tree) -> None:
        """Restores the slots, their weights and the random state."""
        self._check_saved(data, "slots", "unseen", "weights", "rejected", "random")
        slots = as_slots(data["slots"])
        present, unseen, weights = SlotSet(), SlotSet(), SumTree(self._branching)
        present.insert(slots)
        unseen.insert(as_slots(data["unseen"]))
        weights.reserve(int(slots.max(initial=-1)) + 1)
        weights.update(slots, data["weights"])
        self._load_random(data["random"])
        self._present, self._unseen, self._weights = present, unseen, weights
        self._rejected = int(data["rejected"])

    def _draw(self, amount: int, rng: np.random.Generator) -> np.ndarray:
        if len(self._unseen):
            return self._unseen.at(rng.integers(len(self._unseen), size=amount))
        if self._weights.total > 0:
            return self._weights.find(rng.random(amount) * self._weights.total)
        return self._present.at(rng.integers(max(1, len(self)), size=amount))

    def _set(self, slots: np.ndarray, weights: Any) -> None:
        self._unseen.remove(np.unique(slots[self._unseen.contains(slots)]))
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
