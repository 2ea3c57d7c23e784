"""Sets of slots and sums over them, for sampling by priority. Any process.

All state is in arrays, without a Python object per slot. Arrays grow by doubling and
never shrink. Nothing here locks; the owner of a structure does.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

_SMALLEST = 64  # Initial length of arrays.


class SlotSet:
    """A set whose members can be drawn by index; O(1) and 8 bytes per slot.

    Members lie side by side in an array. When one is removed, the last one takes its
    place, so the order is arbitrary, but the same after the same calls.
    """

    def __init__(self) -> None:
        self._slots = np.zeros(_SMALLEST, np.int32)
        self._length = 0
        self._places = np.full(_SMALLEST, -1, np.int32)  # By slot; -1 means absent.

    def __len__(self) -> int:
        return self._length

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Returns the members [n] int64 at indices below the length."""
        return self._slots[indices].astype(np.int64)

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots that are not members."""
        end = self._length + len(slots)
        self._slots = _grown(self._slots, end, 0)
        self._places = _grown(self._places, int(slots.max(initial=-1)) + 1, -1)
        self._slots[self._length : end] = slots
        self._places[slots] = np.arange(self._length, end)
        self._length = end

    def discard(self, slots: np.ndarray) -> None:
        """Removes those of the slots that are members."""
        slots = slots[slots < len(self._places)]
        slots = np.unique(slots[self._places[slots] >= 0])
        if not len(slots):
            return
        places, end = self._places[slots], self._length - len(slots)
        # As many holes are left before the new end as members remain behind it.
        holes = places[places < end]
        stays = np.ones(len(slots), bool)
        stays[places[places >= end] - end] = False
        movers = self._slots[end : self._length][stays]
        self._slots[holes] = movers
        self._places[movers] = holes
        self._places[slots] = -1
        self._length = end


class SumTree:
    """A vector of non-negative numbers that is searched by its running sum.

    Each level holds the sums of `branching` neighbours in the level below; level 0
    holds the numbers. Finding or writing k numbers costs k · branching · levels.

    Whenever a term changes, its sums are recomputed from all their terms, in order. So
    they do not drift, and depend on nothing but the numbers.

    Args:
      branching: fan-out of the tree.
    """

    def __init__(self, branching: int = 16):
        self._branching = branching
        self._levels = self._build(np.zeros(self._padded(_SMALLEST)))
        self._total = np.float64(0)

    @property
    def total(self) -> np.float64:
        """The sum of all numbers."""
        return self._total

    def reserve(self, length: int) -> None:
        """Makes room for indices below `length`; new numbers are zero."""
        old = self._levels[0]
        if length > len(old):
            doubled = max(length, 2 * len(old))
            leaves = np.zeros(self._padded(doubled))
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
            targets = np.minimum(targets, np.nextafter(ends[:, -1], 0))
            child = (ends <= targets[:, None]).sum(1)
            before = np.where(child > 0, ends[rows, child - 1], 0)
            targets = targets - before
            nodes = nodes * self._branching + child
        return nodes

    def _running(self, level: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Returns the running sums [n, branching] inside groups of neighbours."""
        children = level.reshape(-1, self._branching)[groups]
        return np.add.accumulate(children, axis=1)

    def _build(self, leaves: np.ndarray) -> list[np.ndarray]:
        levels = [leaves]
        while len(levels[-1]) > self._branching:
            groups = np.arange(len(levels[-1]) // self._branching)
            upper = np.zeros(self._padded(len(groups)))
            upper[groups] = self._running(levels[-1], groups)[:, -1]
            levels.append(upper)
        return levels

    def _padded(self, length: int) -> int:
        return -(-length // self._branching) * self._branching


def _grown(array: np.ndarray, needed: int, value: int) -> np.ndarray:
    """Returns an array of at least `needed` elements; new ones have the value."""
    if needed <= len(array):
        return array
    extra = max(needed, 2 * len(array)) - len(array)
    return np.concatenate([array, np.full(extra, value, array.dtype)])
