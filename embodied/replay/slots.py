"""Orders and sums over slots, which selectors are built from. Any process.

A slot is a small integer that stands for an item of the replay buffer and is reused
after the item is gone. All state is in arrays, without a Python object per slot. Arrays
grow by doubling and never shrink. Nothing here locks; the owner of a structure does.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from embodied.replay.chunks import lazy_array

_SMALLEST = 64  # Initial length of arrays.


class SlotRing:
    """Slots from the oldest to the newest, found by rank; 4 bytes per slot.

    Args:
      expected: number of slots to make room for; the ring grows if there are more.
    """

    def __init__(self, expected: int = _SMALLEST):
        self._ring = lazy_array((expected,), np.int32)
        self._head = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, slots: np.ndarray) -> None:
        """Adds slots [n], the oldest first."""
        if self._length + len(slots) > len(self._ring):
            grown = lazy_array((2 * (self._length + len(slots)),), np.int32)
            grown[: self._length] = self.oldest(self._length)
            self._ring, self._head = grown, 0
        end = self._head + self._length
        self._ring[np.arange(end, end + len(slots)) % len(self._ring)] = slots
        self._length += len(slots)

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the slots [n] int64 at ranks below the length; 0 is the oldest."""
        return self._ring[(self._head + ranks) % len(self._ring)].astype(np.int64)

    def oldest(self, amount: int) -> np.ndarray:
        """Returns the oldest slots [amount] int64."""
        return self.at(np.arange(amount))

    def drop(self, amount: int) -> None:
        """Removes the oldest slots."""
        self._head = (self._head + amount) % len(self._ring)
        self._length -= amount


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

    def reserve(self, length: int) -> None:
        """Makes room for indices below `length`; new numbers are zero."""
        old = self._levels[0]
        if length > len(old):
            doubled = max(length, 2 * len(old))
            leaves = np.zeros(self._padded(doubled), old.dtype)
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
