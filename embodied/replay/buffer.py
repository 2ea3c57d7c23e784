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
import logging
import math
import operator
import os
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np

from embodied.base import Tree
from embodied.checkpoint import FileRecord
from embodied.replay.access import (
    Batch,
    Output,
    Workers,
    append,
    as_workers,
    copy_sequences,
    parse_stepids,
    parse_update,
    refresh,
)
from embodied.replay.counters import Counters
from embodied.replay.durable import ChunkFolder
from embodied.replay.fields import STEPID_BYTES, Schema
from embodied.replay.finding import find, require_latents
from embodied.replay.index import STATE, Index
from embodied.replay.restoring import fill_selector, restore
from embodied.replay.saving import Saver
from embodied.replay.selector import Selector
from embodied.replay.selectors import Uniform
from embodied.replay.settings import Settings

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
        latents are not stored.
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
        context: int = 0,
        bytes: float | Literal["auto"] = "auto",
        compress: str = "zstd",
        latent_save_bytes: float = 1e9,
    ):
        self._settings = Settings(
            name, length, capacity, bytes, chunksize, context, online
        )
        self._selector = Uniform(seed) if selector is None else selector
        self._save_wait = save_wait
        self._counters = Counters()
        self._index: Index | None = None  # Until the first step is known.
        self._saving = threading.Lock()
        self._writing = threading.Lock()
        self._latents = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._folder = None if directory is None else ChunkFolder(directory, compress)
        self._saver = Saver(
            self._folder, self._changed, self._latents, latent_save_bytes
        )

    def __len__(self) -> int:
        with self._changed:
            return 0 if self._index is None else len(self._index.items)

    @property
    def capacity(self) -> float:
        """Items that can be stored; infinite as long as that is not known."""
        with self._changed:
            if self._index is not None:
                return self._index.capacity
        return self._settings.capacity or math.inf

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
        numbers = as_workers(workers)
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
                append(index, self._changed, packed, numbers)
                return
            for i, worker in enumerate(numbers):
                row = {key: value[i : i + 1] for key, value in packed.items()}
                append(index, self._changed, row, [worker])

    def abandon(self, worker: int) -> None:
        """Says that the worker's last step was the last of its episode.

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
            return copy_sequences(index, self._latents, slots, out)
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
            update = parse_update(index.schema, data)
            ignored = refresh(
                index,
                self._changed,
                self._latents,
                update,
                lambda: index is self._index,
            )
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

    def save(self, on_cut: Callable[[], None] | None = None) -> Tree:
        """Writes what is new into the directory, and returns what `load` needs.

        All files that the result lists are on the disk then, and are never changed.
        Inserts (unless `save_wait`), samples and updates go on meanwhile.

        Args:
          on_cut: called as soon as it is decided which steps belong to the save;
            later ones do not.

        Raises:
          CheckpointError: the disk is full, for example. The next save makes up for it.
        """
        with self._saving:
            with self._writing if self._save_wait else contextlib.nullcontext():
                data = self._saver.save(self._index, self._counters, on_cut)
        return {**data, "context": self._settings.context}

    def records(self, data: Tree, root: str | os.PathLike[str]) -> list[FileRecord]:
        """Returns the files of a save, relative to `root`, to commit them."""
        return self._saver.records(data, root)

    def discard(self, data: Tree) -> None:
        """Removes the files of a save that was not committed."""
        with self._saving:
            self._saver.discard(self._index, data)

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
                self._saver.clean(listed, root)

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
            found = find(data, folder, self._settings.context)
            require_latents(found, self._settings.context, self._settings.name)
            index, slots, same = None, np.zeros(0, np.int64), False
            if folder is not None and found.schema is not None:
                index = self._make_index(found.schema)
                slots, same = restore(index, folder, found, own, amount, progress)
            if own:
                self._saver.resume(found.save)
            with self._changed:
                self._install(index, slots, found.selector if same else None)
                self._counters.load(found.counters)
                if index is not None:
                    index.evict(max(0, len(slots) - index.capacity))

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
