"""Index of steps by worker, and of the sequences they form. Replay's process.

An item is a sequence that can be sampled. It is identified by its slot, the row of its
first step. Items are evicted in the order in which they were completed.

Every method is called with the index lock held; see the module `buffer`.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping

import numpy as np

from embodied.replay.chunkfiles import ChunkFiles
from embodied.replay.chunks import Chunks, Schema, SlotRing
from embodied.replay.selectors import Selector
from embodied.replay.sizing import (
    INDEX_BYTES,
    ReplayMemoryError,
    ReplaySettings,
    chunks_per_worker,
    plan_sizes,
)

COUNTERS = (
    "inserts",
    "samples",
    "train_samples",
    "updates",
    "evicted",
    "update_ignored",
    "online_dropped",
    "priorities_rejected",
)
STATE = ("items", "steps", "chunks", "streams", "bytes", "online_queue")
RELEASE_SECONDS = 600.0  # How long an insert waits for readers of evicted steps.
ONLINE_LIMIT = 1024  # Maximum number of sequences in the online queue.
_EVICT_AT_ONCE = 32
_SPARE_ITEMS = 1024  # New items are added before old ones are evicted.


class Counters:
    """Totals by name. Calls must not overlap: they are made under the index lock."""

    def __init__(self) -> None:
        self._totals: collections.Counter[str] = collections.Counter()
        self._reported: collections.Counter[str] = collections.Counter()

    def add(self, **amounts: int) -> None:
        """Adds to the totals."""
        for name, amount in amounts.items():
            self._totals[name] += amount

    def total(self, name: str) -> int:
        """Returns the count since the start."""
        return self._totals[name]

    def report(self, length: int) -> dict[str, float]:
        """Returns counts since the last report, totals, and the replay ratio.

        The ratio is steps sampled for training per step inserted.

        Args:
          length: steps in a sample.
        """
        result: dict[str, float] = {}
        for name in COUNTERS:
            result[name] = self._totals[name] - self._reported[name]
            result[f"total_{name}"] = self._totals[name]
        if result["inserts"]:
            trained = result["train_samples"] * length
            result["replay_ratio"] = trained / result["inserts"]
        self._reported = self._totals.copy()
        return result

    def save(self) -> dict[str, int]:
        """Returns the totals."""
        return {name: self._totals[name] for name in COUNTERS}

    def load(self, totals: Mapping[str, int]) -> None:
        """Continues from saved totals."""
        self._totals = collections.Counter({x: int(totals[x]) for x in COUNTERS})
        self._reported = self._totals.copy()


class Streams:
    """The state of each worker's stream of steps, as arrays over streams."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # By worker.
        self.chunk = np.zeros(0, np.int64)  # Being written to, or -1.
        self.index = np.zeros(0, np.int64)  # Index of the next step in it.
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
        """Returns the numbers [n] of the workers' streams; creates missing ones."""
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


class Index:
    """Chunks, streams and items of a buffer.

    Args:
      schema: of the steps.
      settings: of the buffer.
      selector: holds the slots of all items.
      changed: condition over the index lock; notified when a chunk is released.
      counters: count inserts, evictions, sequences dropped from the online queue, and
        rejected priorities.
    """

    def __init__(
        self,
        schema: Schema,
        settings: ReplaySettings,
        selector: Selector,
        changed: threading.Condition,
        counters: Counters,
    ):
        plan = plan_sizes(settings, schema.step_bytes)
        self.schema = schema
        self.capacity = plan.capacity
        self.length = settings.length
        self.selector = selector
        self.chunks = Chunks(
            schema, plan.chunksize, plan.chunks, selector.uses_priorities
        )
        self.items = SlotRing(plan.capacity + _SPARE_ITEMS)
        self.streams = Streams()
        self.files: dict[int, ChunkFiles] = {}  # What is on disk, by chunk number.
        self.counters = counters
        self.crowded = False  # Whether items were evicted to make room for steps.
        self.updates = 0  # Number of the last; tells which latents are on disk.
        # Chunk and first step of each sequence.
        self.online_queue: collections.deque[tuple[bytes, int]] = collections.deque()
        self._online = settings.online
        self._chunks_each = chunks_per_worker(self.length, plan.chunksize)
        self._changed = changed

    def state(self) -> dict[str, int]:
        """Returns the current sizes, by the names in `STATE`."""
        numbers = self.chunks.numbers()
        step_bytes = self.schema.step_bytes + INDEX_BYTES
        values = (
            len(self.items),
            int(self.chunks.filled[numbers].sum()),
            len(numbers),
            len(self.streams),
            len(numbers) * self.chunks.size * step_bytes,
            len(self.online_queue),
        )
        return dict(zip(STATE, values))

    def reserve(self, streams: np.ndarray, firsts: np.ndarray | None) -> np.ndarray:
        """Returns the rows [n] for one more step of each of n different streams.

        If a new chunk is needed and none is free, evicts items, and waits for readers
        of evicted ones.

        Args:
          streams: [n].
          firsts: [n] bool, whether an episode begins; None if steps lack `is_first`.
        """
        state, size = self.streams, self.chunks.size
        if firsts is not None and firsts.any():
            # Now, since beginning a chunk may release the one with the last step.
            self.mark_abandoned(state.last[streams[firsts]])
        full = (state.chunk[streams] < 0) | (state.index[streams] == size)
        if full.any():
            for stream in streams[full].tolist():
                self._begin_chunk(stream)
        return state.chunk[streams] * size + state.index[streams]

    def publish(self, streams: np.ndarray, rows: np.ndarray) -> None:
        """Makes steps that have been written at reserved rows part of their streams."""
        state, chunks = self.streams, self.chunks
        self.counters.add(inserts=len(rows))
        chunk = state.chunk[streams]
        chunks.filled[chunk] += 1
        chunks.last_insert[chunk] = self.counters.total("inserts")
        state.index[streams] += 1
        state.count[streams] += 1
        state.last[streams] = rows
        state.cut[streams] = 0
        ready = streams[state.count[streams] >= self.length]
        if len(ready):
            self._complete(ready)
        if (surplus := len(self.items) - self.capacity) > 0:
            self.evict(surplus)

    def abandon(self, worker: int) -> None:
        """Ends the worker's episode; its next step begins another."""
        stream = self.streams.get(worker)
        if stream >= 0:
            self.mark_abandoned(self.streams.last[[stream]])
            self.streams.cut[stream] = 1

    def mark_abandoned(self, rows: np.ndarray) -> None:
        """Marks episodes that end at rows [n] without `is_last`; skips rows of -1."""
        rows = rows[rows >= 0]
        ends = self.chunks.arrays.get("is_last")
        self.chunks.abandoned[rows] = True if ends is None else ~ends[rows].astype(bool)

    def evict(self, amount: int) -> None:
        """Drops the oldest items, and chunks that no item needs any more."""
        slots = self.items.oldest(amount)
        self.items.drop(amount)
        self.selector.remove(slots)
        self.counters.add(evicted=amount)
        chunk = slots // self.chunks.size
        np.add.at(self.chunks.dead, chunk, 1)
        done = chunk[self.chunks.dead[chunk] == self.chunks.born[chunk]]
        for number in np.unique(done).tolist():
            self.release(number)

    def release(self, number: int) -> None:
        """Releases a chunk and its followers, up to the first that is needed."""
        while number >= 0 and self.chunks.releasable(number):
            self.files.pop(number, None)
            number = self.chunks.release(number)
            self._changed.notify_all()

    def draw(self, amount: int, mode: str) -> np.ndarray:
        """Chooses the slots [amount] of a batch."""
        peek = mode != "train"
        fresh: list[int] = []
        while not peek and self.online_queue and len(fresh) < amount:
            identity, offset = self.online_queue.popleft()
            number = self.chunks.find(identity)
            if number >= 0 and offset >= self.chunks.dead[number]:
                fresh.append(number * self.chunks.size + offset)
        drawn = self.selector.sample(amount - len(fresh), peek)
        return np.concatenate([np.array(fresh, np.int64), drawn]) if fresh else drawn

    def pin(self, chunks: np.ndarray) -> None:
        """Keeps chunks [n] and their followers from being released."""
        np.add.at(self.chunks.pins, chunks, 1)

    def unpin(self, chunks: np.ndarray) -> None:
        """Undoes `pin`, and releases what has been evicted in the meantime."""
        np.subtract.at(self.chunks.pins, chunks, 1)
        for number in chunks[self.chunks.dead[chunks] == self.chunks.born[chunks]]:
            self.release(int(number))

    def prioritize(self, rows: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities [n] of steps, and so of all items that contain one of them.

        Priorities that are NaN, infinite or negative are rejected and counted; these
        steps keep their previous ones.
        """
        steps = self.chunks.priorities
        if steps is None:
            return
        valid = np.isfinite(priorities) & (priorities >= 0)
        self.counters.add(priorities_rejected=int((~valid).sum()))
        rows = rows[valid]
        if not len(rows):
            return
        steps[rows] = priorities[valid]
        slots = self._items_around(np.unique(rows))
        self.selector.prioritize(slots, steps[self.chunks.expand(slots, self.length)])

    def _items_around(self, rows: np.ndarray) -> np.ndarray:
        """Returns the slots [n] of items that contain any step at the sorted rows."""
        chunks, size = self.chunks, self.chunks.size
        breaks = np.flatnonzero((np.diff(rows) > 1) | (np.diff(rows // size) > 0))
        firsts = rows[np.concatenate([[0], breaks + 1])]
        lasts = rows[np.concatenate([breaks, [len(rows) - 1]])]
        parts = []
        for first, last in zip(firsts.tolist(), lasts.tolist()):
            number, end = last // size, last % size + 1
            start = first % size - self.length + 1
            while number >= 0 and end > start:
                low = max(start, int(chunks.dead[number]))
                high = min(end, int(chunks.born[number]))
                parts.append(number * size + np.arange(low, max(low, high)))
                number, end, start = int(chunks.preceding[number]), size, start + size
        return np.unique(np.concatenate(parts))

    def check_workers(self, workers: list[int]) -> None:
        """Raises ReplayMemoryError if streams of all workers do not fit."""
        total = len(self.streams) + self.streams.missing(workers)
        each = self._chunks_each
        if total * each >= self.chunks.amount:
            raise ReplayMemoryError(
                f"Replay has memory for {self.chunks.amount} chunks of "
                f"{self.chunks.size} steps, and each of {total} workers needs {each} "
                "of them for itself. Raise bytes, or lower chunksize, the length of "
                "sequences or the number of environments."
            )

    def _begin_chunk(self, stream: int) -> None:
        state, chunks = self.streams, self.chunks
        while not chunks.free:
            # Chunks that wait for their readers come free soon, so evict no more.
            if len(self.items) and not chunks.any_blocked():
                self.crowded = True
                self.evict(min(_EVICT_AT_ONCE, 1 + len(self.items) // 16))
            elif not self._changed.wait(RELEASE_SECONDS):
                raise RuntimeError(
                    "Replay found no room for a new chunk: evicted steps have been "
                    f"read or saved for more than {RELEASE_SECONDS:.0f} seconds."
                )
        previous = int(state.chunk[stream])
        number = chunks.allocate(previous)
        chunks.open[number] = True
        inserts = self.counters.total("inserts")
        chunks.first_insert[number] = chunks.last_insert[number] = inserts
        if previous < 0 or state.start_index[stream] == chunks.size:
            state.start_chunk[stream], state.start_index[stream] = number, 0
        state.chunk[stream], state.index[stream] = number, 0
        if previous >= 0:
            chunks.open[previous] = False
            self.release(previous)

    def _complete(self, streams: np.ndarray) -> None:
        """Adds the item that the last step of each stream has completed."""
        state, chunks = self.streams, self.chunks
        chunk, index = state.start_chunk[streams], state.start_index[streams]
        slots = chunk * chunks.size + index
        chunks.born[chunk] += 1
        index += 1
        # A chunk without a follower is the stream's last; `_begin_chunk` moves later.
        moves = (index == chunks.size) & (chunks.following[chunk] >= 0)
        state.start_chunk[streams] = np.where(moves, chunks.following[chunk], chunk)
        state.start_index[streams] = np.where(moves, 0, index)
        self.items.append(slots)
        self.selector.insert(slots)
        if self._online:
            begins = (state.count[streams] - self.length) % self.length == 0
            self._enqueue(slots[begins])

    def _enqueue(self, slots: np.ndarray) -> None:
        for number, offset in zip(*np.divmod(slots, self.chunks.size)):
            self.online_queue.append((self.chunks.ids[number].tobytes(), int(offset)))
        while len(self.online_queue) > ONLINE_LIMIT:
            self.online_queue.popleft()
            self.counters.add(online_dropped=1)
