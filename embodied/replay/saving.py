"""Saves a buffer: writes what is new, lists everything. Replay's process.

Which steps belong to a save is decided at once, under the index lock; then they are
written, from pinned memory, while inserts and samples go on. Latents are copied under
their lock, chunk by chunk, and may be newer than the steps.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from embodied.base import Tree
from embodied.checkpoint import CheckpointError, FileRecord
from embodied.replay.counters import Counters
from embodied.replay.durable import LATENTS, STEPS, ChunkFiles, ChunkFolder, Piece
from embodied.replay.index import Index
from embodied.replay.listing import (
    FORMAT,
    PRIORITIES,
    files_of,
    pack_files,
    pack_order,
    record_of,
)

_THREADS = 4  # They compress, hash and wait for the disk.


class Snapshot(NamedTuple):
    """What belongs to a save; all over n chunks, apart from the last entries."""

    columns: dict[str, np.ndarray]
    files: list[ChunkFiles]
    generations: np.ndarray  # [n]
    pinned: np.ndarray  # Numbers of the chunks that have grown.
    items: np.ndarray  # Slots, from the oldest.
    selector: Tree
    counters: dict[str, int]


class Job(NamedTuple):
    """A file to write."""

    number: int  # Of the chunk.
    generation: int
    identity: bytes
    files: ChunkFiles
    piece: Piece
    metadata: dict[str, Any]


class Written(NamedTuple):
    """A file that was written, and the last update that it contains."""

    piece: Piece
    stamp: int


class Saver:
    """Writes a buffer's chunks. Its own state is guarded by the buffer's saving lock.

    Args:
      folder: where to write; None if steps are not saved.
      changed: the index lock.
      latents: the latents' lock.
      latent_save_bytes: of refreshed latents that one save writes at most.
    """

    def __init__(
        self,
        folder: ChunkFolder | None,
        changed: threading.Condition,
        latents: threading.Lock,
        latent_save_bytes: float,
    ):
        self.number = 0  # Of the last save.
        self._folder = folder
        self._changed = changed
        self._latents = latents
        self._latent_save_bytes = latent_save_bytes
        # Files that no save has listed, because it failed.
        self._unlisted: set[tuple[bytes, Piece]] = set()

    def save(
        self,
        index: Index | None,
        counters: Counters,
        on_cut: Callable[[], None] | None = None,
    ) -> Tree:
        """Writes what is new and returns the tree that lists everything."""
        self.number += 1
        on_cut = on_cut or (lambda: None)
        if index is None or self._folder is None:
            with self._changed:
                counts = counters.save()
            on_cut()
            return {"format": FORMAT, "save": self.number, "counters": counts}
        with self._changed:
            snapshot = self._snapshot(index)
        pinned = set(snapshot.pinned.tolist())
        try:
            on_cut()
            tree = self._tree(index, snapshot)
            jobs = self._jobs(tree, snapshot)
            self._write_steps(index, [x for x in jobs if x.number in pinned], pinned)
        finally:
            with self._changed:
                index.unpin(np.array(sorted(pinned), np.int64))
        self._write_latents(index, jobs)
        listed = [(x.identity, piece) for x in jobs for piece in x.files.pieces]
        tree["files"] = pack_files([x.identity for x in jobs], listed)
        for identity, piece in self._unlisted.difference(listed):
            self._folder.remove(identity, piece)
        self._unlisted.clear()
        return tree

    def records(self, data: Tree, root: str | os.PathLike[str]) -> list[FileRecord]:
        """Returns the files of a save relative to `root`."""
        if self._folder is None:
            return []
        folder = self._folder.below(root)
        return [record_of(identity, x, folder) for identity, x in files_of(data)]

    def discard(self, index: Index | None, data: Tree) -> None:
        """Removes the files that the save of `data` wrote."""
        number = int(data["save"])
        for identity, piece in files_of(data):
            if piece.save == number and self._folder is not None:
                self._folder.remove(identity, piece)
        if index is None:
            return
        with self._changed:
            every = list(index.files.values())
        for files in every:
            kept = [x for x in files.steps if x.save != number]
            fresh = [x for x in files.latents if x.save != number]
            if (kept, fresh) != (files.steps, files.latents):
                files.steps, files.latents, files.stamp = kept, fresh, 0

    def clean(self, listed: Collection[str], root: str | os.PathLike[str]) -> None:
        """Removes the files that are not among `listed`, relative to `root`."""
        if self._folder is None:
            return
        folder = self._folder.below(root)
        for identity, pieces in self._folder.scan().items():
            for piece in pieces:
                if record_of(identity, piece, folder).path not in listed:
                    self._folder.remove(identity, piece)

    def resume(self, number: int) -> None:
        """Goes on counting behind a save, and behind all that have left files.

        Those of a later one may belong to a checkpoint that cannot be read for now;
        to use its number again would be to write over them.
        """
        assert self._folder is not None
        pieces = [x for found in self._folder.scan().values() for x in found]
        self.number = max([self.number, number, *(x.save for x in pieces)])

    def _snapshot(self, index: Index) -> Snapshot:
        """Decides what belongs to a save, and pins what has to be written."""
        chunks = index.chunks
        numbers = chunks.numbers()
        numbers = numbers[chunks.filled[numbers] > 0]
        files = [index.files.setdefault(x, ChunkFiles()) for x in numbers.tolist()]
        steps = chunks.filled[numbers]
        fresh = numbers[steps > [x.stop for x in files]]
        index.pin(fresh)
        columns: dict[str, np.ndarray] = {
            "id": chunks.ids[numbers],
            "number": numbers,
            "previous": chunks.preceding[numbers],
            "steps": steps,
            "evicted": chunks.dead[numbers],
            "first": chunks.first_insert[numbers],
            "last": chunks.last_insert[numbers],
        }
        items = index.items.oldest(len(index.items))
        generations = chunks.generation[numbers]
        selector = index.selector.save()
        counters = index.counters.save()
        return Snapshot(columns, files, generations, fresh, items, selector, counters)

    def _tree(self, index: Index, snapshot: Snapshot) -> dict[str, Any]:
        columns = snapshot.columns
        numbers = columns["number"]
        # One more, so that -1 stays -1.
        ordinals = np.full(numbers.max(initial=0) + 2, -1, np.int32)
        ordinals[numbers] = np.arange(len(numbers))
        order = ordinals[snapshot.items // index.chunks.size]
        return {
            "format": FORMAT,
            "save": self.number,
            "counters": snapshot.counters,
            "chunksize": index.chunks.size,
            "fields": index.schema.to_json(),
            "selector": snapshot.selector,
            "order": pack_order(order),
            "chunks": columns | {"previous": ordinals[columns["previous"]]},
        }

    def _jobs(self, tree: dict[str, Any], snapshot: Snapshot) -> list[Job]:
        """Returns one job per chunk; those of chunks that did not grow are empty."""
        table = tree["chunks"]
        identities = [identity.tobytes() for identity in table["id"]]
        shared = {key: tree[key] for key in ("format", "chunksize", "fields")}
        jobs = []
        for i, identity in enumerate(identities):
            before, files = int(table["previous"][i]), snapshot.files[i]
            metadata = shared | {
                "previous": "" if before < 0 else identities[before].hex(),
                "first": int(table["first"][i]),
                "last": int(table["last"][i]),
            }
            piece = Piece(STEPS, files.stop, int(table["steps"][i]), self.number)
            number, generation = table["number"][i], snapshot.generations[i]
            jobs.append(
                Job(int(number), int(generation), identity, files, piece, metadata)
            )
        return jobs

    def _write_steps(self, index: Index, jobs: list[Job], pinned: set[int]) -> None:
        """Writes what is new, and unpins and takes out of `pinned` what is done."""
        for job, written in self._write_all(index, jobs):
            if job.piece.start == 0:
                job.files.stamp = written.stamp
            job.files.steps.append(written.piece)
            pinned.discard(job.number)
            with self._changed:
                index.unpin(np.array([job.number]))

    def _write_latents(self, index: Index, every: list[Job]) -> None:
        """Writes the most recently refreshed ones, as many as are allowed."""
        step_bytes = index.schema.latent_bytes
        if index.chunks.priorities is not None:
            step_bytes += index.chunks.priorities.itemsize
        if not step_bytes:
            return
        with self._changed:
            stamped = [(int(index.chunks.refreshed[job.number]), job) for job in every]
        dirty = [(stamp, job) for stamp, job in stamped if stamp > job.files.stamp]
        dirty.sort(key=lambda entry: -entry[0])
        jobs, left = [], self._latent_save_bytes
        for _, job in dirty:
            left -= step_bytes * job.piece.stop
            if left < 0:
                break
            piece = Piece(LATENTS, 0, job.piece.stop, self.number)
            jobs.append(job._replace(piece=piece))
        for job, written in self._write_all(index, jobs):
            # The one before is kept for `discard`, unless it goes with this save.
            before = [
                piece
                for piece in job.files.latents
                if (job.identity, piece) not in self._unlisted
            ]
            job.files.latents = [*before[-1:], written.piece]
            job.files.stamp = written.stamp

    def _write_all(
        self, index: Index, jobs: list[Job]
    ) -> Iterator[tuple[Job, Written]]:
        """Writes files in several threads; yields those that are done.

        Raises:
          CheckpointError: one could not be written. All that were, were yielded.
        """
        problem: CheckpointError | None = None
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            futures = {pool.submit(self._write, index, job): job for job in jobs}
            for future in concurrent.futures.as_completed(futures):
                try:
                    written = None if future.cancelled() else future.result()
                except CheckpointError as error:
                    problem = problem or error
                    for other in futures:
                        other.cancel()
                    continue
                if written is not None:
                    job = futures[future]
                    self._unlisted.add((job.identity, written.piece))
                    yield job, written
        if problem is not None:
            raise problem

    def _write(self, index: Index, job: Job) -> Written | None:
        """Writes one file; None if the chunk has been evicted in the meantime."""
        chunks, piece = index.chunks, job.piece
        rows = chunks.rows(job.number, piece.start, piece.stop)
        arrays = {}
        with self._changed:
            same = chunks.generation[job.number] == job.generation
            if not same or not chunks.used[job.number]:
                return None
            pin = np.array([job.number])
            index.pin(pin)
            stamp = int(chunks.refreshed[job.number])
            if chunks.priorities is not None:
                arrays[PRIORITIES] = chunks.priorities[rows].copy()
        try:
            with self._latents:
                for key in index.schema.latents:
                    arrays[key] = chunks.arrays[key][rows].copy()
            if piece.kind == STEPS:
                for key in chunks.arrays.keys() - arrays.keys():
                    arrays[key] = chunks.arrays[key][rows]
            assert self._folder is not None
            written = self._folder.write(job.identity, piece, arrays, job.metadata)
        finally:
            with self._changed:
                index.unpin(pin)
        return Written(written, stamp)
