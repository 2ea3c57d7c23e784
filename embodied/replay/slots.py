"""Sets, orders and sums over slots, which selectors are built from. Any process.

A slot is a small integer that stands for an item of the replay buffer and is reused
after the item is gone. All state is in arrays, without a Python object per slot. Arrays
grow by doubling and never shrink. Nothing here locks; the owner of a structure does.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

MAX_SLOT = np.iinfo(np.int32).max - 1  # Slots and positions are stored as int32.
_SMALLEST = 64  # Initial length of arrays.


def as_slots(slots: Any) -> np.ndarray:
    """Returns slots as [n] int64, or raises ValueError if they are not slots."""
    array = np.asarray(slots)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            "Expected slots as a vector of integers, got an array of shape "
            f"{array.shape} and dtype {array.dtype}."
        )
    if array.size and (array.min() < 0 or array.max() > MAX_SLOT):
        raise ValueError(
            f"Expected slots from 0 to {MAX_SLOT}, got {array.min()} to {array.max()}."
        )
    return array.astype(np.int64, copy=False)


def _doubled(length: int, needed: int) -> int:
    length = max(length, _SMALLEST)
    while length < needed:
        length *= 2
    return length


class Positions:
    """Positions by slot; 4 bytes per slot."""

    def __init__(self) -> None:
        self._table = np.full(_SMALLEST, -1, np.int32)  # By slot; -1 means absent.

    def contains(self, slots: np.ndarray) -> np.ndarray:
        """Returns [n] bool: which of the slots are present."""
        known = slots < len(self._table)
        return known & (self._table[np.where(known, slots, 0)] >= 0)

    def find(self, slots: np.ndarray) -> np.ndarray:
        """Returns the positions [n] of slots that must be present."""
        present = self.contains(slots)
        if not present.all():
            raise ValueError(f"Slot {slots[~present][0]} is not present.")
        return self._table[slots].astype(np.int64)

    def add(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Adds slots that must be absent, or raises and changes nothing."""
        present = self.contains(slots)
        if present.any():
            raise ValueError(f"Slot {slots[present][0]} is present already.")
        if slots.size and slots.max() >= len(self._table):
            length = _doubled(len(self._table), int(slots.max()) + 1)
            table = np.full(length, -1, np.int32)
            table[: len(self._table)] = self._table
            self._table = table
        self._table[slots] = positions
        if (twice := self._table[slots] != positions).any():
            self._table[slots] = -1
            raise ValueError(f"Slot {slots[twice][0]} was given twice.")

    def pop(self, slots: np.ndarray) -> np.ndarray:
        """Removes slots that must be present, or raises and changes nothing."""
        positions = self.find(slots)
        marks = -2 - np.arange(len(slots))
        self._table[slots] = marks
        if (twice := self._table[slots] != marks).any():
            self._table[slots] = positions
            raise ValueError(f"Slot {slots[twice][0]} was given twice.")
        self._table[slots] = -1
        return positions

    def move(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Sets new positions of slots that are present."""
        self._table[slots] = positions


class SlotSet:
    """A set whose members can be drawn by index; O(1) and 8 bytes per slot.

    Members lie side by side in an array. When one is removed, the last one takes its
    place, so the order is arbitrary, but the same after the same calls.
    """

    def __init__(self) -> None:
        self._slots = np.zeros(_SMALLEST, np.int32)
        self._length = 0
        self._positions = Positions()

    def __len__(self) -> int:
        return self._length

    def contains(self, slots: np.ndarray) -> np.ndarray:
        """Returns [n] bool: which of the slots are members."""
        return self._positions.contains(slots)

    def require(self, slots: np.ndarray) -> None:
        """Raises ValueError unless all slots are members."""
        self._positions.find(slots)

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Returns the members [n] int64 at indices below the length."""
        return self._slots[indices].astype(np.int64)

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots that must not be members."""
        end = self._length + len(slots)
        self._positions.add(slots, np.arange(self._length, end))
        if end > len(self._slots):
            grown = np.zeros(_doubled(len(self._slots), end), np.int32)
            grown[: self._length] = self._slots[: self._length]
            self._slots = grown
        self._slots[self._length : end] = slots
        self._length = end

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots that must be members."""
        positions = self._positions.pop(slots)
        end = self._length - len(slots)
        # As many holes are left before the new end as members remain behind it.
        holes = positions[positions < end]
        stays = np.ones(len(slots), bool)
        stays[positions[positions >= end] - end] = False
        movers = self._slots[end : self._length][stays]
        self._slots[holes] = movers
        self._positions.move(movers, holes)
        self._length = end


class SumTree:
    """A vector of non-negative numbers that is searched by its running sum.

    Each level holds the sums of `branching` neighbours in the level below; level 0
    holds the numbers. Finding or writing k numbers costs k · branching · levels.

    Whenever a term changes, its sums are recomputed from all their terms, in order. So
    they do not drift, and depend on nothing but the numbers.

    Args:
      branching: fan-out of the tree.
      dtype: of the numbers. Sums of floats are float64, sums of integers int64.
    """

    def __init__(self, branching: int = 16, dtype: Any = np.float64):
        self._branching = branching
        self._exact = np.dtype(dtype).kind in "iu"
        self._sum_dtype = np.int64 if self._exact else np.float64
        self._levels = self._build(np.zeros(self._padded(_SMALLEST), dtype))
        self._total = self._sum_dtype(0)

    @property
    def total(self) -> Any:
        """The sum of all numbers."""
        return self._total

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self._levels[0][indices]

    def reserve(self, length: int) -> None:
        """Makes room for indices below `length`; new numbers are zero."""
        old = self._levels[0]
        if length > len(old):
            leaves = np.zeros(self._padded(_doubled(len(old), length)), old.dtype)
            leaves[: len(old)] = old
            self._levels = self._build(leaves)

    def update(self, indices: np.ndarray, values: Any) -> None:
        """Sets the numbers at `indices`; if one is repeated, the last value counts."""
        self._levels[0][indices] = values
        nodes = indices
        for lower, upper in itertools.pairwise(self._levels):
            nodes = nodes // self._branching
            if len(nodes) > self._branching:
                nodes = np.unique(nodes)
            upper[nodes] = self._running(lower, nodes)[:, -1]
        top = np.zeros(1, np.int64)
        self._total = self._running(self._levels[-1], top)[0, -1]

    def find(self, targets: np.ndarray) -> np.ndarray:
        """Returns for each target the first index whose running sum is above it.

        The number at that index is never zero. Targets lie in [0, total), and total
        must not be zero; a target that rounding has raised to the total finds the last
        number that is not zero.
        """
        nodes = np.zeros(len(targets), np.int64)
        rows = np.arange(len(targets))
        for level in reversed(self._levels):
            ends = self._running(level, nodes)
            last = ends[:, -1]
            below = last - 1 if self._exact else np.nextafter(last, 0)
            targets = np.minimum(targets, below)
            child = (ends <= targets[:, None]).sum(1)
            before = np.where(child > 0, ends[rows, child - 1], 0)
            targets = targets - before
            nodes = nodes * self._branching + child
        return nodes

    def before(self, indices: np.ndarray) -> np.ndarray:
        """Returns [n]: for each index, the sum of the numbers before it."""
        total = np.zeros(len(indices), self._sum_dtype)
        for level in self._levels:
            groups, child = np.divmod(indices, self._branching)
            ends = self._running(level, groups)
            rows = np.arange(len(indices))
            total += np.where(child > 0, ends[rows, child - 1], 0)
            indices = groups
        return total

    def _running(self, level: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Returns the running sums [n, branching] inside groups of neighbours."""
        children = level.reshape(-1, self._branching)[groups]
        return np.add.accumulate(children, axis=1, dtype=self._sum_dtype)

    def _build(self, leaves: np.ndarray) -> list[np.ndarray]:
        levels = [leaves]
        while len(levels[-1]) > self._branching:
            groups = np.arange(len(levels[-1]) // self._branching)
            upper = np.zeros(self._padded(len(groups)), self._sum_dtype)
            upper[groups] = self._running(levels[-1], groups)[:, -1]
            levels.append(upper)
        return levels

    def _padded(self, length: int) -> int:
        return -(-length // self._branching) * self._branching


class InsertionOrder:
    """Slots from the oldest to the newest, found by rank; about 10 bytes per slot.

    A new slot goes to the end of an array, a removed one leaves a gap there. A tree
    of counts skips the gaps, so any slot is removed and any rank found in O(log n).
    When the array is full its gaps are closed, and if fewer than a quarter were gaps
    it also grows, which costs O(1) per insert on average.
    """

    def __init__(self) -> None:
        self._slots = np.zeros(_SMALLEST, np.int32)
        self._end = 0
        self._counts = SumTree(dtype=np.uint8)  # 1 at a slot, 0 at a gap.
        self._positions = Positions()

    def __len__(self) -> int:
        return int(self._counts.total)

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the slots [n] int64 at ranks below the length; 0 is the oldest."""
        return self._slots[self._counts.find(ranks)].astype(np.int64)

    def ranks(self, slots: np.ndarray) -> np.ndarray:
        """Returns the ranks [n] of slots that must be present."""
        return self._counts.before(self._positions.find(slots))

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots that must be absent, the oldest first."""
        if self._end + len(slots) > len(self._slots):
            self._close_gaps(len(slots))
        positions = np.arange(self._end, self._end + len(slots))
        self._positions.add(slots, positions)
        self._slots[positions] = slots
        self._counts.update(positions, 1)
        self._end += len(slots)

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots that must be present."""
        self._counts.update(self._positions.pop(slots), 0)

    def _close_gaps(self, extra: int) -> None:
        slots = self._slots[: self._end][self._counts[: self._end] > 0]
        needed = -(-(len(slots) + extra) * 4 // 3)
        self._slots = np.zeros(_doubled(len(self._slots), needed), np.int32)
        self._slots[: len(slots)] = slots
        self._end = len(slots)
        positions = np.arange(self._end)
        self._positions.move(slots, positions)
        self._counts = SumTree(dtype=np.uint8)
        self._counts.reserve(len(self._slots))
        self._counts.update(positions, 1)
