"""The order of items, and where each worker's stream stands. Replay's process.

Nothing here locks: both belong to the index, and so to its lock.
"""

from __future__ import annotations

import numpy as np

from embodied.replay.chunk import lazy_array


class Items:
    """The slots of all items, from the oldest to the newest, in a ring.

    Args:
      expected: number of items for which there is room at once.
    """

    def __init__(self, expected: int):
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

    def oldest(self, amount: int) -> np.ndarray:
        """Returns the oldest slots [amount] int64."""
        where = np.arange(self._head, self._head + amount) % len(self._ring)
        return self._ring[where].astype(np.int64)

    def drop(self, amount: int) -> None:
        """Removes the oldest slots."""
        self._head = (self._head + amount) % len(self._ring)
        self._length -= amount


class Streams:
    """Where each worker's stream of steps stands, as arrays over workers."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # By worker.
        self.chunk = np.zeros(0, np.int64)  # That is written to, or -1.
        self.index = np.zeros(0, np.int64)  # Of the next step in it.
        self.count = np.zeros(0, np.int64)  # Steps so far.
        self.last = np.zeros(0, np.int64)  # Row of the last step, or -1.
        self.start_chunk = np.zeros(0, np.int64)  # Where the next item begins.
        self.start_index = np.zeros(0, np.int64)
        self.cut = np.zeros(0, np.int64)  # 1 if the next step begins an episode.

    def __len__(self) -> int:
        return len(self._numbers)

    def get(self, worker: int) -> int:
        """Returns the number of a worker's stream, or -1."""
        return self._numbers.get(worker, -1)

    def missing(self, workers: list[int]) -> int:
        """Returns how many workers have no stream yet."""
        return sum(worker not in self._numbers for worker in workers)

    def find(self, workers: list[int]) -> np.ndarray:
        """Returns the numbers [n] of the workers' streams; begins those missing."""
        for worker in workers:
            self._numbers.setdefault(worker, len(self._numbers))
        if len(self.chunk) < len(self._numbers):
            for name, start in [("chunk", -1), ("last", -1)] + [
                (name, 0)
                for name in ("index", "count", "start_chunk", "start_index", "cut")
            ]:
                grown = np.full(2 * len(self._numbers), start, np.int64)
                grown[: len(getattr(self, name))] = getattr(self, name)
                setattr(self, name, grown)
        return np.array([self._numbers[worker] for worker in workers], np.int64)
