"""Saves a buffer: decides what a save contains, writes what is new. Replay's process.

    with writer.cut(index, counters, context, held) as cut:   # Takes the index lock.
      data = cut.write()                                      # May take minutes.

Which steps belong to a save is decided under the index lock; then they are written,
from pinned memory, while inserts and samples continue. Latents are copied under their
lock, chunk by chunk, and may be newer than the steps.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import threading
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, Self

import numpy as np

from embodied.base import Tree
from embodied.checkpoint import FileRecord
from embodied.replay.chunkfiles import (
    FORMAT,
    LATENTS,
    PRIORITIES,
    STEPS,
    ChunkFile,
    ChunkFiles,
    ChunkFolder,
    pack_files,
    pack_order,
)
from embodied.replay.index import Counters, Index

_THREADS = 4  # They compress, hash and wait for the disk.


class ReplayWriter:
    """Writes a buffer's chunks. The saving lock guards its state.

    Args:
      folder: where to write; None if steps are not saved.
      saving: the saving lock.
      changed: the index lock.
      latents: the latents' lock.
      latent_save_bytes: maximum bytes of refreshed latents that one save writes.
    """

    def __init__(
        self,
        folder: ChunkFolder | None,
        saving: threading.Lock,
        changed: threading.Condition,
        latents: threading.Lock,
        latent_save_bytes: float,
    ):
        self.folder = folder
        self.saving = saving
        self.changed = changed
        self.latents = latents
        self.latent_save_bytes = latent_save_bytes
        self.number = 0  # Of the last save.
        self.unlisted: set[ChunkFile] = set()  # Written, but listed by no save yet.

    def cut(
        self,
        index: Index | None,
        counters: Counters,
        context: int,
        held: contextlib.ExitStack,
    ) -> ReplayCut:
        """Decides what belongs to a save. The saving lock is held.

        Args:
          index: of the buffer; None if it has no steps yet.
          counters: of the buffer.
          context: of the buffer.
          held: the locks. The cut takes them over, and releases them when it is closed.
        """
        self.number += 1
        with self.changed:
            if self.folder is None or index is None:
                chunks = None
            else:
                chunks = _CutChunks.of(index)
            state = {
                "format": FORMAT,
                "save": self.number,
                "counters": counters.save(),
                "context": context,
            }
        return ReplayCut(self, index, state, chunks, held.pop_all())

    def clean(self, listed: Collection[str], root: str | os.PathLike[str]) -> None:
        """Removes the files whose paths relative to `root` are not in `listed`."""
        if self.folder is None:
            return
        files = self.folder.scan()
        for file, record in zip(files, self.folder.records(files, root)):
            if record.path not in listed:
                self.folder.remove(file)

    def remove_unlisted(self, kept: Collection[ChunkFile]) -> None:
        """Removes the files that no save lists, except those that are kept."""
        assert self.folder is not None
        for file in self.unlisted.difference(kept):
            self.folder.remove(file)
        self.unlisted.intersection_update(kept)

    def resume(self, number: int) -> None:
        """Continues numbering after a save, and after all saves that have left files.

        Files of a later save may belong to a checkpoint that cannot be read at present;
        reusing its number would overwrite them.
        """
        assert self.folder is not None
        self.number = max([self.number, number, *(x.save for x in self.folder.scan())])


class _CutChunks(NamedTuple):
    """The chunks and items that belong to a save, with n chunks."""

    numbers: np.ndarray  # [n]
    columns: dict[str, np.ndarray]  # [n, ...]
    files: list[ChunkFiles]  # [n]
    grown: np.ndarray  # Numbers of the chunks with new steps; they are pinned.
    items: np.ndarray  # Slots, the oldest first.
    priorities: np.ndarray | None  # Of all steps, chunk by chunk.

    @classmethod
    def of(cls, index: Index) -> _CutChunks:
        """Collects the chunks, and pins those to write. The index lock is held."""
        chunks = index.chunks
        numbers = chunks.numbers()
        numbers = numbers[chunks.filled[numbers] > 0]
        files = [index.files.setdefault(x, ChunkFiles()) for x in numbers.tolist()]
        steps = chunks.filled[numbers]
        grown = numbers[steps > [x.stop for x in files]]
        index.pin(grown)
        columns: dict[str, np.ndarray] = {
            "id": chunks.ids[numbers],
            "previous": chunks.preceding[numbers],
            "steps": steps,
            "evicted": chunks.dead[numbers],
            "first": chunks.first_insert[numbers],
            "last": chunks.last_insert[numbers],
        }
        items = index.items.oldest(len(index.items))
        priorities = None
        if chunks.priorities is not None:
            rows = [chunks.rows(x, 0, n) for x, n in zip(numbers.tolist(), steps)]
            parts = [chunks.priorities[x] for x in rows]
            priorities = np.concatenate([chunks.priorities[:0], *parts])
        return cls(numbers, columns, files, grown, items, priorities)

    def tables(self, index: Index) -> dict[str, Any]:
        """Returns the entries of a save that describe its steps, except the files."""
        # One entry more, so that the index -1 yields -1.
        places = np.full(self.numbers.max(initial=0) + 2, -1, np.int32)
        places[self.numbers] = np.arange(len(self.numbers))
        return {
            "priorities": self.priorities,
            "chunksize": index.chunks.size,
            "fields": index.schema.to_json(),
            "order": pack_order(places[self.items // index.chunks.size]),
            "chunks": self.columns | {"previous": places[self.columns["previous"]]},
        }


class _Job(NamedTuple):
    """A file to write."""

    number: int  # Of the chunk.
    files: ChunkFiles
    file: ChunkFile
    metadata: dict[str, Any]


class ReplayCut:
    """The steps that belong to a save. Call `write`, and in any case `close`.

    Inserts (unless `save_wait`), samples and updates continue meanwhile; other saves of
    the buffer wait until it is closed. What was written may then be committed, or
    discarded.
    """

    def __init__(
        self,
        writer: ReplayWriter,
        index: Index | None,
        state: dict[str, Any],
        chunks: _CutChunks | None,
        held: contextlib.ExitStack,
    ):
        self._writer = writer
        self._index = index
        self._state = state
        self._chunks = chunks
        self._held = held
        self._pinned = set() if chunks is None else set(chunks.grown.tolist())
        self._files: list[ChunkFile] = []  # All that the save needs, once written.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Unpins the memory and releases the locks."""
        if self._index is not None:
            with self._writer.changed:
                self._index.unpin(np.array(sorted(self._pinned), np.int64))
        self._pinned = set()
        self._chunks = None
        self._held.close()

    def write(self) -> Tree:
        """Writes new data, and returns what `Replay.load` needs.

        Raises:
          CheckpointError: writing failed, for example because the disk is full. The
            next save writes what is missing.
        """
        index, chunks, writer = self._index, self._chunks, self._writer
        if index is None or chunks is None:
            return self._state
        # First, since it may need the room of files that a failed save has left.
        writer.remove_unlisted([x for y in chunks.files for x in y.steps + y.latents])
        data = self._state | chunks.tables(index)
        jobs = self._jobs(data, chunks)
        self._write_steps(index, [x for x in jobs if x.number in self._pinned])
        self._write_latents(index, jobs)
        self._files = [file for x in jobs for file in x.files.needed]
        data["files"] = pack_files(self._files, [x.file.chunk for x in jobs])
        writer.remove_unlisted(self._files)
        writer.unlisted.clear()
        return data

    def records(self, root: str | os.PathLike[str]) -> list[FileRecord]:
        """Returns the records of all files that were written or are needed.

        Args:
          root: folder that their paths are relative to.
        """
        folder = self._writer.folder
        return [] if folder is None else folder.records(self._files, root)

    def discard(self) -> None:
        """Removes the files that this save wrote, because it was not committed."""
        writer, number = self._writer, self._state["save"]
        if writer.folder is None or self._index is None:
            return
        with writer.saving:
            for file in self._files:
                if file.save == number:
                    writer.folder.remove(file)
            with writer.changed:
                every = list(self._index.files.values())
            for files in every:
                kept = [x for x in files.steps if x.save != number]
                fresh = [x for x in files.latents if x.save != number]
                if (kept, fresh) != (files.steps, files.latents):
                    files.steps, files.latents, files.stamp = kept, fresh, 0

    def _jobs(self, data: dict[str, Any], chunks: _CutChunks) -> list[_Job]:
        """Returns one job per chunk; those of chunks that did not grow are empty."""
        table = data["chunks"]
        identities = [identity.tobytes() for identity in table["id"]]
        shared = {key: data[key] for key in ("format", "chunksize", "fields")}
        jobs = []
        for i, identity in enumerate(identities):
            before, files = int(table["previous"][i]), chunks.files[i]
            metadata = shared | {
                "previous": "" if before < 0 else identities[before].hex(),
                "first": int(table["first"][i]),
                "last": int(table["last"][i]),
            }
            steps, number = int(table["steps"][i]), int(chunks.numbers[i])
            file = ChunkFile(identity, STEPS, files.stop, steps, self._writer.number)
            jobs.append(_Job(number, files, file, metadata))
        return jobs

    def _write_steps(self, index: Index, jobs: list[_Job]) -> None:
        """Writes new steps, and unpins the chunks that are done."""
        for job, file, stamp in self._write_all(index, jobs):
            if file.start == 0:
                job.files.stamp = stamp
            job.files.steps.append(file)
            self._pinned.discard(job.number)
            with self._writer.changed:
                index.unpin(np.array([job.number]))

    def _write_latents(self, index: Index, every: list[_Job]) -> None:
        """Writes the most recently refreshed latents, up to `latent_save_bytes`."""
        step_bytes = index.schema.latent_bytes
        if index.chunks.priorities is not None:
            step_bytes += index.chunks.priorities.itemsize
        if not step_bytes:
            return
        with self._writer.changed:
            stamped = [(int(index.chunks.refreshed[job.number]), job) for job in every]
        dirty = [(stamp, job) for stamp, job in stamped if stamp > job.files.stamp]
        dirty.sort(key=lambda entry: -entry[0])
        jobs, left = [], self._writer.latent_save_bytes
        for _, job in dirty:
            left -= step_bytes * job.file.stop
            if left < 0:
                break
            file = dataclasses.replace(job.file, kind=LATENTS, start=0)
            jobs.append(job._replace(file=file))
        for job, file, stamp in self._write_all(index, jobs):
            # The previous file is kept for `discard`, unless this save removes it.
            before = [x for x in job.files.latents if x not in self._writer.unlisted]
            job.files.latents = [*before[-1:], file]
            job.files.stamp = stamp

    def _write_all(
        self, index: Index, jobs: list[_Job]
    ) -> Iterator[tuple[_Job, ChunkFile, int]]:
        """Writes files in several threads; yields those that are done.

        Yields:
          The job, the file, and the number of the last update that it contains.

        Raises:
          Exception: a file could not be written, usually CheckpointError. All that were
            written have been yielded.
        """
        problem: Exception | None = None
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            futures = {pool.submit(self._write, index, job): job for job in jobs}
            for future in concurrent.futures.as_completed(futures):
                try:
                    written = None if future.cancelled() else future.result()
                except Exception as error:
                    problem = problem or error
                    for other in futures:
                        other.cancel()
                    continue
                if written is not None:
                    self._writer.unlisted.add(written[0])
                    yield futures[future], *written
        if problem is not None:
            raise problem

    def _write(self, index: Index, job: _Job) -> tuple[ChunkFile, int] | None:
        """Writes one file; returns None if the chunk has been released meanwhile."""
        chunks, changed = index.chunks, self._writer.changed
        rows = chunks.rows(job.number, job.file.start, job.file.stop)
        arrays = {}
        with changed:
            if chunks.find(job.file.chunk) != job.number:
                return None
            pin = np.array([job.number])
            index.pin(pin)
            stamp = int(chunks.refreshed[job.number])
            if chunks.priorities is not None:
                arrays[PRIORITIES] = chunks.priorities[rows].copy()
        try:
            with self._writer.latents:
                for key in index.schema.latents:
                    arrays[key] = chunks.arrays[key][rows].copy()
            if job.file.kind == STEPS:
                for key in chunks.arrays.keys() - arrays.keys():
                    arrays[key] = chunks.arrays[key][rows]
            assert self._writer.folder is not None
            file = self._writer.folder.write(job.file, arrays, job.metadata)
        finally:
            with changed:
                index.unpin(pin)
        return file, stamp
