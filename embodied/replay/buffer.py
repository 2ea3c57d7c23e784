"""Replay: stores the streams of all workers and samples sequences. Replay's process.

Threads. Any thread may call any method. Four locks, taken in this order:

- `_saving`: one save, load or clean at a time.
- `_writing`: inserts one after the other; owns the rows between what is published and
  what is reserved. `load` and `clear` hold it while they replace the index.
- `_latents`: the contents of published latents, which are read and refreshed row by
  row, so that nobody sees half of one.
- `_changed`, the index lock: chunks, streams, items, selector and counters. It is held
  briefly; steps are copied without it.

A published step never changes, apart from latents. A reader pins the chunk that a
sequence begins in while it holds the index lock, copies without it, and unpins it
then; rows of a pinned chunk and of those behind it are not used again. An insert
reserves rows, writes them, and publishes them: between the two nobody else knows them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from embodied.base import Tree
from embodied.replay.catalog import find_chunks, require_latents
from embodied.replay.chunkfiles import ChunkFolder
from embodied.replay.chunks import (
    STEPID,
    STEPID_BYTES,
    Schema,
    StepUpdate,
    parse_stepids,
)
from embodied.replay.index import STATE, Counters, Index
from embodied.replay.reader import fill_selector, restore
from embodied.replay.selectors import Selector, Uniform
from embodied.replay.sizing import ReplaySettings
from embodied.replay.writer import ReplayCut, ReplayWriter

Batch = dict[str, np.ndarray]
Output = Callable[[dict[str, tuple[np.dtype, tuple[int, ...]]]], Batch]
Workers = Sequence[int] | np.ndarray

MODES = ("train", "report", "eval")

logger = logging.getLogger("embodied.replay")


class Replay:
    """Keeps the most recent steps of every worker and samples sequences of them.

        replay.add(step, worker)                   # Or many: add_batch(steps, workers)
        batch = replay.sample(16)                  # {key: [16, length, ...]}
        replay.update({'stepid': ..., 'dyn/deter': ..., 'priority': ...})

    A sequence consists of `length` consecutive steps of one worker and may span
    episodes. In a sample `is_first` is set at the start, and `is_last` where an
    episode was abandoned: the next step begins another, or never came.

    Keys that start with `log/` are not stored. Those that start with `dyn/` are
    latents: samples have them for the first `context` steps only.

    Args:
      length: steps in a sequence.
      capacity: items, which are starts of sequences; None for as many as fit.
      directory: where `save` writes; None if steps are not saved.
      chunksize: steps in a chunk at most, the unit of memory and of files.
      online: whether streams are also cut into sequences that do not overlap, each of
        which is sampled once in 'train' mode, before any other.
      selector: decides what is sampled; uniform by default.
      save_wait: whether inserts wait while `save` writes.
      name: for messages.
      seed: of the default selector.
      context: steps at the start of a sequence whose latents are sampled. With 0,
        latents are not stored. Loops fill in `args.replay_context` for None; see
        `use_context`.
      bytes: memory to use, or 'auto' for a share of what is available, to which the
        capacity shrinks. A number that does not hold the capacity is an error.
      compress: 'zstd' or 'none', for files.
      latent_save_bytes: of refreshed latents that one save writes at most.
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
            # Few chunks for many workers are full before the capacity is reached.
            return index is not None and (
                len(index.items) >= index.capacity
                or self._counters.total("evicted") > 0
            )

    def __bool__(self) -> bool:
        return True  # An empty buffer is still the one that was given.

    def add(self, step: Mapping[str, Any], worker: int = 0) -> None:
        """Appends a step to a worker's stream; see `add_batch`."""
        batch = {key: np.asarray(value)[None] for key, value in step.items()}
        self.add_batch(batch, [worker])

    def add_batch(self, steps: Mapping[str, Any], workers: Workers) -> None:
        """Appends steps [B, ...] to the streams of workers [B].

        Raises:
          ValueError: they differ from the first step in keys, dtypes or shapes, or,
            a ReplayMemoryError, there is too little memory. Nothing has changed then.
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
        """Ends the worker's sequence: its last step was the last of its episode.

        Its next step, after a crash for example, is taken for the first of another.
        """
        with self._writing, self._changed:
            if self._index is not None:
                self._index.abandon(worker)

    def sample(
        self, batch: int, mode: str = "train", *, out: Output | None = None
    ) -> Batch:
        """Returns sequences [B, length, ...] by key, with `stepid`: [B, length, 20].

        Args:
          batch: number of sequences.
          mode: 'train' takes from the online queue and lets the selector note what it
            has drawn; 'report' and 'eval' change nothing.
          out: returns the arrays to write into for {key: (dtype, shape)}.

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
            return self._copy_sequences(index, slots, out)
        finally:
            with self._changed:
                index.unpin(starts)

    def update(self, data: Mapping[str, Any]) -> None:
        """Refreshes latents and priorities of steps.

        Args:
          data: `stepid` [..., 20] uint8 and, with the same leading shape, latents and
            `priority`. Steps that have been evicted are left out and counted, and
            so are priorities that are NaN, infinite or negative.
        """
        with self._changed:
            index = self._index
        if index is None:
            ignored = parse_stepids(data).size // STEPID_BYTES
        else:
            ignored = self._refresh(index, index.schema.parse_update(data))
        with self._changed:
            self._counters.add(updates=1, update_ignored=ignored)

    def stats(self) -> dict[str, float]:
        """Returns what there is now, and what has happened since the last call."""
        with self._changed:
            index = self._index
            now = dict.fromkeys(STATE, 0) if index is None else index.state()
            return now | self._counters.report(self._settings.length)

    def clear(self) -> None:
        """Forgets all steps, and what a step holds; files stay."""
        with self._saving, self._writing, self._changed:
            self._empty_selector()
            self._index = None

    def save(self) -> Tree:
        """Writes what is new into the directory, and returns what `load` needs.

        All files that the result lists are on the disk then, and are never changed.
        Inserts (unless `save_wait`), samples and updates go on meanwhile.

        Raises:
          CheckpointError: the disk is full, for example. The next save makes up for it.
        """
        with self.cut() as cut:
            return cut.write().data

    def cut(self) -> ReplayCut:
        """Decides which steps belong to a save; later ones do not.

        What it returns has to be closed. Until then other saves wait, and inserts if
        `save_wait`.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._saving)
            if self._save_wait:
                stack.enter_context(self._writing)
            # No insert replaces the index meanwhile, since only the first one does.
            return self._writer.cut(
                self._index, self._counters, self._settings.context, stack
            )

    def clean(
        self, listed: Collection[str] | None, root: str | os.PathLike[str]
    ) -> None:
        """Removes what saves have left that were neither committed nor discarded.

        Call it at start-up, before the first save, while nobody commits.

        Args:
          listed: the paths of all files that any checkpoint lists, be it whole or not;
            None if that is not known, and nothing is removed.
          root: what the paths are relative to.
        """
        if listed is not None:
            with self._saving:
                self._writer.clean(listed, root)

    def load(
        self,
        data: Tree = None,
        directory: str | os.PathLike[str] | None = None,
        amount: int | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Replaces all steps by saved ones; workers' streams begin anew.

        Damaged files are left out with a warning.

        Args:
          data: what `save` returned, for exactly the steps of then. Without it, all
            steps in the directory that are whole.
          directory: where to read from, if not the buffer's own. What is read from
            elsewhere is written to the own directory by the next save.
          amount: reads the newest steps only.
          progress: called with the chunks that are done and their number.

        Raises:
          CheckpointError: `data` is no save that this version can read, or its steps
            were saved without the latents that this buffer samples.
        """
        folder = self._folder if directory is None else ChunkFolder(directory)
        own = folder is not None and folder == self._folder
        with self._saving, self._writing:
            found = find_chunks(data, folder, self._settings.context)
            require_latents(found, self._settings.context, self._settings.name)
            index, slots, same = None, np.zeros(0, np.int64), False
            if folder is not None and found.schema is not None:
                index = self._make_index(found.schema)
                slots, same = restore(index, folder, found, own, amount, progress)
            if own:
                self._writer.resume(found.save)
            with self._changed:
                self._install(index, slots, found.selector if same else None)
                self._counters.load(found.counters)
                if index is not None:
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

    def _copy_sequences(
        self, index: Index, slots: np.ndarray, out: Output | None
    ) -> Batch:
        """Returns the sequences that begin at pinned slots [n]."""
        chunks, schema = index.chunks, index.schema
        fields = schema.outputs(len(slots), index.length)
        batch = _empty_arrays(fields) if out is None else out(fields)
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

    def _refresh(self, index: Index, update: StepUpdate) -> int:
        """Applies an update; returns how many of its steps were gone."""
        with self._changed:
            rows, present = index.chunks.locate(update.stepids)
            chunks = np.unique(rows // index.chunks.size)
            index.pin(chunks)
        try:
            with self._latents:
                for key, values in update.latents.items():
                    index.chunks.arrays[key][rows] = values[present]
        finally:
            with self._changed:
                index.updates += 1
                index.chunks.refreshed[chunks] = index.updates
                # The selector belongs to another index after `load` or `clear`.
                if update.priorities is not None and index is self._index:
                    index.prioritize(rows, update.priorities[present])
                index.unpin(chunks)
        return int((~present).sum())

    def _make_index(self, schema: Schema) -> Index:
        return Index(
            schema, self._settings, self._selector, self._changed, self._counters
        )

    def _install(self, index: Index | None, slots: np.ndarray, selector: Tree) -> None:
        """Makes loaded items the buffer's own. The index lock is held."""
        self._empty_selector()
        self._index = index
        if index is None:
            return
        fill_selector(index, slots)
        if selector is not None:
            try:
                self._selector.load(selector)
            except ValueError as error:
                logger.warning("Sampling starts anew: %s", error)

    def _empty_selector(self) -> None:
        if self._index is not None:
            self._selector.remove(self._index.items.oldest(len(self._index.items)))


def _as_workers(workers: Workers) -> list[int]:
    """Returns the ids of workers, or raises ValueError."""
    array = np.asarray(workers)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            "Expected workers as a vector of integers, one per step, got "
            f"{array.dtype} of shape {array.shape}."
        )
    return array.tolist()


def _empty_arrays(fields: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> Batch:
    return {key: np.empty(shape, dtype) for key, (dtype, shape) in fields.items()}
