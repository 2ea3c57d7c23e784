"""Selectors: which items of a replay buffer are drawn next. The buffer's process.

A selector deals in slots (small integers that the buffer uses again after eviction),
many at a time:

    selector.insert(slots)                    # New items.
    slots = selector.sample(16)               # With `peek`: nothing changes.
    selector.prioritize(slots, priorities)    # What training found out about them.
    selector.remove(slots)                    # Evicted items.

Calls must not overlap: the buffer makes them under its lock. All state is in NumPy
arrays. An operation on k slots of n takes O(k log n) on average, or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied.base import Tree
from embodied.replay.prioritized import Prioritized
from embodied.replay.selector import SeededSelector, Selector
from embodied.replay.slots import InsertionOrder, SlotSet, as_slots

__all__ = ["Fifo", "Mixture", "Prioritized", "Recency", "Selector", "Uniform"]


class Fifo(Selector):
    """Draws each slot once, from the oldest to the newest, then begins anew.

    Drawing does not remove. A cursor goes on from the slot drawn last; a slot that is
    inserted after the cursor has passed all others comes next.
    """

    def __init__(self) -> None:
        self._order = InsertionOrder()
        self._cursor = 0  # Rank of the next slot.

    def __len__(self) -> int:
        return len(self._order)

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n] behind all others."""
        self._order.insert(as_slots(slots))

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n]; the cursor stays in front of the same slot."""
        slots = as_slots(slots)
        ranks = self._order.ranks(slots)
        self._order.remove(slots)
        self._cursor -= int((ranks < self._cursor).sum())

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Returns the next slots [amount]."""
        self._check_amount(amount)
        if not amount:
            return np.zeros(0, np.int64)
        ranks = (self._cursor + np.arange(amount)) % len(self)
        if not peek:
            self._cursor = int(ranks[-1]) + 1
        return self._order.at(ranks)

    def save(self) -> Tree:
        """Returns the slots in their order and the cursor."""
        return self._saved(slots=self._order.slots(), cursor=self._cursor)

    def load(self, data: Tree) -> None:
        """Restores the slots, their order and the cursor."""
        self._check_saved(data, "slots", "cursor")
        order = InsertionOrder()
        order.insert(as_slots(data["slots"]))
        self._order, self._cursor = order, int(data["cursor"])


class Uniform(SeededSelector):
    """Draws all slots with equal probability, with replacement.

    Args:
      seed: of the random state.
    """

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self._slots = SlotSet()

    def __len__(self) -> int:
        return len(self._slots)

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n]."""
        self._slots.insert(as_slots(slots))

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n]."""
        self._slots.remove(as_slots(slots))

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount]."""
        self._check_amount(amount)
        return self._slots.at(self._rng(peek).integers(max(1, len(self)), size=amount))

    def save(self) -> Tree:
        """Returns the slots and the random state."""
        return self._saved(slots=self._slots.slots(), random=self._save_random())

    def load(self, data: Tree) -> None:
        """Restores the slots and the random state."""
        self._check_saved(data, "slots", "random")
        slots = SlotSet()
        slots.insert(as_slots(data["slots"]))
        self._load_random(data["random"])
        self._slots = slots


class Recency(SeededSelector):
    """Draws slots by their age, the number of slots inserted since, with replacement.

    The probabilities are cut off at the number of slots present. Slots older than the
    last given age are not drawn. While all ages that are present have probability
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
        self._order = InsertionOrder()

    def __len__(self) -> int:
        return len(self._order)

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n], the oldest first; the last one has age 0."""
        self._order.insert(as_slots(slots))

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n]; what was older is one younger for each."""
        self._order.remove(as_slots(slots))

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount]."""
        self._check_amount(amount)
        if not amount:
            return np.zeros(0, np.int64)
        rng = self._rng(peek)
        total = self._cumulative[min(len(self), len(self._cumulative)) - 1]
        if total > 0:
            targets = np.minimum(rng.random(amount) * total, np.nextafter(total, 0))
            ages = np.searchsorted(self._cumulative, targets, side="right")
        else:
            ages = rng.integers(len(self), size=amount)
        return self._order.at(len(self) - 1 - ages)

    def save(self) -> Tree:
        """Returns the slots in their order and the random state."""
        return self._saved(slots=self._order.slots(), random=self._save_random())

    def load(self, data: Tree) -> None:
        """Restores the slots, their order and the random state."""
        self._check_saved(data, "slots", "random")
        order = InsertionOrder()
        order.insert(as_slots(data["slots"]))
        self._load_random(data["random"])
        self._order = order


class Mixture(SeededSelector):
    """Draws each sample from one of several selectors, chosen at random.

    Every member holds all slots and gets all priorities.

    Args:
      selectors: by name. They hold the same slots, usually none.
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

    def prioritize(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Hands priorities to all members."""
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

    def save(self) -> Tree:
        """Returns the members' states and the random state."""
        members = {name: member.save() for name, member in self._members.items()}
        return self._saved(members=members, random=self._save_random())

    def load(self, data: Tree) -> None:
        """Restores the members and the random state."""
        self._check_saved(data, "members", "random")
        if set(data["members"]) != set(self._names):
            raise ValueError(
                f"Expected the saved state of a Mixture of {self._names}, got one of "
                f"{sorted(data['members'])}. Use the fractions that the run was "
                "started with."
            )
        for name, member in self._members.items():
            member.load(data["members"][name])
        self._load_random(data["random"])
