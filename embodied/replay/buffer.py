"""Replay: stores the streams of all workers and samples sequences. Replay's process.

Threads. Any thread may call any method. Four locks, taken in this order:

- `_saving`: allows one save, load or clean at a time.
- `_writing`: serialises inserts, and guards the rows that are reserved but not yet
  published. `load` holds it while it replaces the index.
- `_latents`: guards the contents of published latents, which are read and refreshed in
  place, so that no reader sees a half-written row.
- `_changed`, the index lock: guards chunks, streams, items, selector and counters. It
  is held briefly; steps are copied without it.

The values of a published step never change, apart from latents. A reader pins the chunk
in which a sequence begins while it holds the index lock, copies the steps without the
lock, and then unpins the chunk. The rows of a pinned chunk, and of the chunks that
follow it, are not reused. An insert reserves rows, writes them, and publishes them; in
between, no other thread accesses these rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from embodied.base import Tree
from embodied.replay.catalog import find_chunks
from embodied.replay.chunkfiles import ChunkFolder
from embodied.replay.chunks import (
    STEPID,
    STEPID_BYTES,
    Schema,
    parse_stepids,
)
from embodied.replay.index import STATE, Counters, Index
from embodied.replay.reader import fill_selector, restore
from embodied.replay.selectors import Selector, Uniform
from embodied.replay.sizing import ReplaySettings
from embodied.replay.writer import ReplayCut, ReplayWriter

Batch = dict[str, np.ndarray]
Workers = Sequence[int] | np.ndarray

MODES = ("train", "report", "eval")

logger = logging.getLogger("embodied.replay")


class Replay:
    """Keeps the most recent steps of every worker and samples sequences of them.

        replay.add(step, worker)                   # Or many: add_batch(steps, workers)
        batch = replay.sample(16)                  # {key: [16, length, ...]}
        replay.update({'stepid': ..., 'dyn/deter': ..., 'priority': ...})

    A sequence consists of `length` consecutive steps of one worker and may span
    episodes. In a sample, `is_first` is set at the first step, and `is_last` where an
    episode was abandoned, because the next step begins another one or never came.

    Keys that start with `log/` are not stored. Keys that start with `dyn/` are latents:
    samples contain them for the first `context` steps only.

    Args:
      length: steps in a sequence.
      capacity: number of items, which are starts of sequences; None for as many as fit.
      directory: where `save` writes; None if steps are not saved.
      chunksize: maximum steps in a chunk, the unit of memory and of files.
      online: whether streams are also cut into sequences that do not overlap, each of
        which is sampled once in 'train' mode, ahead of all others.
      selector: decides what is sampled; uniform by default.
      save_wait: whether inserts wait while `save` writes.
      name: for messages.
      seed: of the default selector.
      context: steps at the start of a sequence whose latents are sampled. With 0,
        latents are not stored. Loops fill in `args.replay_context` for None; see
        `use_context`.
      bytes: memory to use, or 'auto' for a share of the available memory. If it is too
        small for the capacity, 'auto' shrinks the capacity; a number is an error.
      compress: 'zstd' or 'none', for files.
      latent_save_bytes: maximum bytes of refreshed latents that one save writes.
    """

    def __init__(
        self,
        length: int,
        capacity: float | None = None,
        directory: str | os.PathLike[str] | None = None,
        chunksize: int = 1024,
        online: bool = False,
        selector: Selector | None = None,
        save_wait: bool = False,
        name: str = "unnamed",
        seed: int = 0,
        *,
        context: int | None = None,
        bytes: float | Literal["auto"] = "auto",
        compress: str = "zstd",
        latent_save_bytes: float = 1e9,
    ):
        self._settings = ReplaySettings(
            name, length, capacity, bytes, chunksize, context or 0, online
        )
        self._context_open = context is None
        self._selector = Uniform(seed) if selector is None else selector
        self._save_wait = save_wait
        self._counters = Counters()
        self._index: Index | None = None  # Until the first step is known.
        self._saving = threading.Lock()
        self._writing = threading.Lock()
        self._latents = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._folder = None if directory is None else ChunkFolder(directory, compress)
        self._writer = ReplayWriter(
            self._folder, self._saving, self._changed, self._latents, latent_save_bytes
        )

    def use_context(self, context: int) -> None:
        """Sets the context, if the buffer was made without one and is still empty.

        Args:
          context: steps at the start of a sequence whose latents are sampled.
        """
        with self._writing:
            if self._context_open and self._index is None:
                self._settings = dataclasses.replace(self._settings, context=context)

    def __len__(self) -> int:
        with self._changed:
            return 0 if self._index is None else len(self._index.items)

    @property
    def full(self) -> bool:
        """Whether there is no room for more items: new ones replace the oldest."""
        with self._changed:
            index = self._index
            # With few chunks for many workers, eviction begins below the capacity.
            return index is not None and (
                len(index.items) >= index.capacity or index.crowded
            )

    def __bool__(self) -> bool:
        return True  # Otherwise an empty buffer could be mistaken for a missing one.

    def add(self, step: Mapping[str, Any], worker: int = 0) -> None:
        """Appends a step to a worker's stream; see `add_batch`."""
        batch = {key: np.asarray(value)[None] for key, value in step.items()}
        self.add_batch(batch, [worker])

    def add_batch(self, steps: Mapping[str, Any], workers: Workers) -> None:
        """Appends steps [B, ...] to the streams of workers [B].

        Raises:
          ValueError: the steps differ from the first one in keys, dtypes or shapes, or
            there is no memory for so many workers. Nothing has changed.
          ReplayMemoryError: the buffer does not fit into memory. It is a ValueError,
            too. Nothing has changed.
        """
        numbers = _as_workers(workers)
        if not numbers:
            return
        with self._writing:
            index = self._index
            schema = (
                Schema.of(steps, self._settings.context)
                if index is None
                else index.schema
            )
            packed = schema.pack(steps, len(numbers))
            if index is None:
                index = self._make_index(schema)
            with self._changed:
                index.check_workers(numbers)
                self._index = index
            if len(set(numbers)) == len(numbers):
                self._append(index, packed, numbers)
                return
            for i, worker in enumerate(numbers):
                row = {key: value[i : i + 1] for key, value in packed.items()}
                self._append(index, row, [worker])

    def abandon(self, worker: int) -> None:
        """Ends the worker's episode at its last step.

        Its next step, for example after a crash, begins a new episode.
        """
        with self._writing, self._changed:
            if self._index is not None:
                self._index.abandon(worker)

    def sample(self, batch: int, mode: str = "train") -> Batch:
        """Returns sequences [B, length, ...] by key, with `stepid`: [B, length, 20].

        Args:
          batch: number of sequences.
          mode: 'train' takes from the online queue and lets the selector record what
            it has drawn; 'report' and 'eval' change neither.

        Raises:
          LookupError: there is no full sequence yet.
        """
        if mode not in MODES:
            raise ValueError(f"Expected a mode of {MODES}, got {mode!r}.")
        if operator.index(batch) < 1:
            raise ValueError(f"Expected a batch of at least 1, got {batch}.")
        with self._changed:
            index = self._index
            if index is None or not len(index.items):
                raise LookupError(
                    f"Replay '{self._settings.name}' has no sequence of "
                    f"{self._settings.length} steps to sample yet. Add steps first; a "
                    "limiter can wait for them."
                )
            slots = index.draw(batch, mode)
            starts = slots // index.chunks.size
            index.pin(starts)
            trained = batch if mode == "train" else 0
            self._counters.add(samples=batch, train_samples=trained)
        try:
            return self._copy_sequences(index, slots)
        finally:
            with self._changed:
                index.unpin(starts)

    def update(self, data: Mapping[str, Any]) -> None:
        """Refreshes latents and priorities of steps.

        Args:
          data: `stepid` [..., 20] uint8 and, with the same leading shape, latents and
            `priority`. Evicted steps, and priorities that are NaN, infinite or
            negative, are skipped and counted.
        """
        with self._changed:
            index = self._index
        if index is None:
            ignored = parse_stepids(data).size // STEPID_BYTES
        else:
            ignored = self._refresh(index, *index.schema.parse_update(data))
        with self._changed:
            self._counters.add(updates=1, update_ignored=ignored)

    def stats(self) -> dict[str, float]:
        """Returns current sizes, counts since the last call, and total counts."""
        with self._changed:
            index = self._index
            now = dict.fromkeys(STATE, 0) if index is None else index.state()
            return now | self._counters.report(self._settings.length)

    def save(self) -> Tree:
        """Writes new data to the directory, and returns what `load` needs.

        When it returns, all files that the result lists are on disk; they never change.
        Inserts (unless `save_wait`), samples and updates continue meanwhile.

        Raises:
          CheckpointError: writing failed, for example because the disk is full. The
            next save writes what is missing.
        """
        with self.cut() as cut:
            return cut.write()

    def cut(self) -> ReplayCut:
        """Decides which steps belong to a save; later steps do not.

        The returned cut must be closed. Until then other saves wait, and with
        `save_wait` inserts wait, too.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._saving)
            if self._save_wait:
                stack.enter_context(self._writing)
            # The index can be read without its lock: `load` waits for `_saving`, and
            # of the inserts only the first one sets it.
            return self._writer.cut(
                self._index, self._counters, self._settings.context, stack
            )

    def clean(
        self, listed: Collection[str] | None, root: str | os.PathLike[str]
    ) -> None:
        """Removes the files of saves that were neither committed nor discarded.

        Call it at start-up, before the first save, while no checkpoint is committed.

        Args:
          listed: paths of all files that any checkpoint lists, complete or not; None if
            they are not known, in which case nothing is removed.
          root: folder that the paths are relative to.
        """
        if listed is not None:
            with self._saving:
                self._writer.clean(listed, root)

    def load(
        self,
        data: Tree = None,
        directory: str | os.PathLike[str] | None = None,
        amount: int | None = None,
    ) -> None:
        """Replaces all steps with saved ones; every worker begins a new stream.

        Damaged files are skipped with a warning.

        Args:
          data: what `save` returned, to restore exactly the steps of that save. Without
            it, all intact steps in the directory are loaded.
          directory: where to read from; by default the buffer's own directory. Steps
            from another directory are written to the own one by the next save.
          amount: number of the newest steps to load; None for all that fit.

        Raises:
          CheckpointError: this version cannot read `data`, or its steps were saved
            without the latents that this buffer samples.
        """
        folder = self._folder if directory is None else ChunkFolder(directory)
        own = bool(folder and self._folder and folder.path == self._folder.path)
        with self._saving, self._writing:
            found = find_chunks(data, folder, self._settings)
            index, slots = None, np.zeros(0, np.int64)
            if folder is not None and found.schema is not None:
                index = self._make_index(found.schema)
                slots = restore(index, folder, found, own, amount)
            if own:
                self._writer.resume(found.save)
            with self._changed:
                if self._index is not None:
                    items = self._index.items
                    self._selector.remove(items.oldest(len(items)))
                self._index = index
                self._counters.load(found.counters)
                # Else every resume would draw as the first start has drawn.
                self._selector.reseed(self._counters.total("samples"))
                if index is not None:
                    fill_selector(index, slots)
                    index.evict(max(0, len(slots) - index.capacity))

    def _append(self, index: Index, packed: Batch, workers: list[int]) -> None:
        """Appends a step [n, ...] to each worker's stream. The writing lock is held."""
        firsts = packed.get("is_first")
        with self._changed:
            streams = index.streams.find(workers)
            if firsts is not None:
                firsts = firsts.astype(bool) | (index.streams.cut[streams] > 0)
                packed["is_first"] = firsts.astype(packed["is_first"].dtype)
            rows = index.reserve(streams, firsts)
        for key, values in packed.items():
            index.chunks.arrays[key][rows] = values
        with self._changed:
            index.publish(streams, rows)

    def _copy_sequences(self, index: Index, slots: np.ndarray) -> Batch:
        """Returns the sequences that begin at pinned slots [n]."""
        chunks, schema = index.chunks, index.schema
        batch = schema.empty_batch(len(slots), index.length)
        rows = chunks.expand(slots, index.length)
        for key in schema.fields:
            if key not in schema.latents:
                chunks.gather(key, rows, batch[key])
        if schema.latents:
            context = np.ascontiguousarray(rows[:, : schema.context])
            with self._latents:
                for key in schema.latents:
                    chunks.gather(key, context, batch[key])
        chunks.write_stepids(rows, batch[STEPID])
        if "is_last" in batch:
            batch["is_last"][chunks.abandoned[rows]] = True
        if "is_first" in batch:
            batch["is_first"][:, 0] = True
        return batch

    def _refresh(
        self,
        index: Index,
        stepids: np.ndarray,
        latents: Batch,
        priorities: np.ndarray | None,
    ) -> int:
        """Applies an update of n steps; returns how many of these were gone."""
        with self._changed:
            rows, present = index.chunks.locate(stepids)
            chunks = np.unique(rows // index.chunks.size)
            index.pin(chunks)
        try:
            with self._latents:
                for key, values in latents.items():
                    index.chunks.arrays[key][rows] = values[present]
        finally:
            with self._changed:
                index.updates += 1
                index.chunks.refreshed[chunks] = index.updates
                # The selector belongs to another index after `load`.
                if priorities is not None and index is self._index:
                    index.prioritize(rows, priorities[present])
                index.unpin(chunks)
        return int((~present).sum())

    def _make_index(self, schema: Schema) -> Index:
        return Index(
            schema, self._settings, self._selector, self._changed, self._counters
        )


def _as_workers(workers: Workers) -> list[int]:
    """Returns the ids of workers, or raises ValueError."""
    array = np.asarray(workers)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            "Expected workers as a vector of integers, one per step, got "
            f"{array.dtype} of shape {array.shape}."
        )
    return array.tolist()
