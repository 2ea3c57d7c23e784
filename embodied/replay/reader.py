"""Reads saved chunks back into memory. Replay's process.

`restore` fills an index that no other thread can access yet.

Chunks of the buffer's own directory are adopted: they keep their id and their files.
Steps from another directory, from chunks of another size, or behind a gap are imported:
they are copied into new chunks, which the next save writes. Every stream ends where it
was saved. Damaged files are skipped with a warning, and leave gaps.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from embodied.checkpoint import CheckpointError
from embodied.replay.catalog import SavedChunk, SavedChunks
from embodied.replay.chunkfiles import (
    LATENTS,
    PRIORITIES,
    STEPS,
    ChunkFile,
    ChunkFiles,
    ChunkFolder,
)
from embodied.replay.chunks import Schema
from embodied.replay.index import Index
from embodied.replay.sizing import chunks_per_worker

logger = logging.getLogger("embodied.replay")

_THREADS = 4
_AHEAD = 8  # Chunks that are read ahead of their use.
_REPORT_SECONDS = 10.0
_PRIORITIZE_AT_ONCE = 4096


class Run(NamedTuple):
    """Consecutive steps of a chunk."""

    start: int
    stop: int
    arrays: dict[str, np.ndarray]
    files: list[ChunkFile]


def restore(
    index: Index,
    folder: ChunkFolder,
    found: SavedChunks,
    own: bool,
    amount: int | None,
) -> np.ndarray:
    """Reads saved chunks into an empty index; returns the items, the oldest first.

    Args:
      index: to fill. Its selector is not changed.
      folder: where the files are.
      found: what to read.
      own: whether the folder is the one that the buffer saves to.
      amount: number of the newest steps to keep; None for all that fit.
    """
    adopt = own and found.chunksize == index.chunks.size
    chunks = _newest(index, found, adopt, amount)
    restorer = Restorer(index, adopt, found.chunksize)
    report = time.monotonic() + _REPORT_SECONDS
    for done, (chunk, runs) in enumerate(
        read_chunks(folder, chunks, index.schema), start=1
    ):
        restorer.place(chunk, runs)
        if time.monotonic() > report:
            report = time.monotonic() + _REPORT_SECONDS
            logger.info("Loading replay: %d of %d chunks.", done, len(chunks))
    return restorer.finish(amount)


def fill_selector(index: Index, slots: np.ndarray) -> None:
    """Turns slots [n] into items, and adds them and their priorities to the selector.

    Chunks without items are released. The index lock is held.
    """
    index.items.append(slots)
    for number in index.chunks.numbers().tolist():
        index.release(number)
    index.selector.insert(slots)
    steps = index.chunks.priorities
    if steps is None:
        return
    for start in range(0, len(slots), _PRIORITIZE_AT_ONCE):
        part = slots[start : start + _PRIORITIZE_AT_ONCE]
        priorities = steps[index.chunks.expand(part, index.length)]
        known = np.isfinite(priorities).any(1)
        index.selector.prioritize(part[known], priorities[known])


class Restorer:
    """Places chunks, from the oldest to the newest, and then finds the items.

    Args:
      index: to fill.
      adopt: whether chunks may keep their identity.
      chunksize: steps in a full chunk, as it was saved.
    """

    def __init__(self, index: Index, adopt: bool, chunksize: int):
        self._index = index
        self._chunks = index.chunks
        self._adopt = adopt
        self._chunksize = chunksize
        # Rows of all steps, and their ages.
        self._slots, self._ages = [np.zeros(0, np.int64)], [np.zeros(0)]
        # By id of each saved chunk that was placed completely: where its end is now.
        self._ends: dict[bytes, int] = {}

    def place(self, chunk: SavedChunk, runs: list[Run]) -> None:
        """Copies the steps of a chunk into memory."""
        for run in runs:
            before = self._ends.get(chunk.previous, -1) if run.start == 0 else -1
            whole = run.stop == self._chunksize
            if self._adopt and run.start == 0 and self._chunks.free:
                end = self._place_as_it_was(chunk, run, before)
            else:
                end = self._place_anew(chunk, run, before)
                # Only a full chunk can have a follower that keeps its identity.
                whole &= not self._adopt
            if whole and end >= 0:
                self._ends[chunk.identity] = end

    def finish(self, amount: int | None) -> np.ndarray:
        """Returns the slots [n] of all items, the oldest first."""
        chunks = self._chunks
        order = np.argsort(np.concatenate(self._ages), kind="stable")
        slots = np.concatenate(self._slots)[order]
        number, offset = np.divmod(slots, chunks.size)
        if amount is not None:  # Only the newest steps may begin a sequence.
            alive = number[offset >= chunks.dead[number]]
            np.add.at(chunks.dead, alive[: max(0, len(alive) - amount)], 1)
        numbers = chunks.numbers()
        for first in numbers[chunks.preceding[numbers] < 0].tolist():
            self._finish_stream(first)
        return slots[(chunks.dead[number] <= offset) & (offset < chunks.born[number])]

    def _place_as_it_was(self, chunk: SavedChunk, run: Run, before: int) -> int:
        chunks = self._chunks
        number = chunks.allocate(before, chunk.identity)
        self._write(number, run, 0, run.stop, chunk)
        chunks.dead[number] = min(chunk.evicted, run.stop)
        self._index.files[number] = ChunkFiles(
            [file for file in run.files if file.kind == STEPS],
            [file for file in run.files if file.kind == LATENTS],
        )
        return number

    def _place_anew(self, chunk: SavedChunk, run: Run, before: int) -> int:
        chunks = self._chunks
        start, number = max(0, chunk.evicted - run.start), before
        while start < run.stop - run.start:
            if number < 0 or chunks.filled[number] == chunks.size:
                if not chunks.free:
                    logger.warning(
                        "The replay is full: the rest of a chunk with gaps is dropped."
                    )
                    return -1
                number = chunks.allocate(number)
            room = chunks.size - int(chunks.filled[number])
            stop = min(start + room, run.stop - run.start)
            self._write(number, run, start, stop, chunk)
            start = stop
        return number

    def _write(
        self, number: int, run: Run, start: int, stop: int, chunk: SavedChunk
    ) -> None:
        """Appends the steps from `start` to `stop` of a run to a chunk."""
        chunks = self._chunks
        filled = int(chunks.filled[number])
        rows = chunks.rows(number, filled, filled + stop - start)
        for key, array in chunks.arrays.items():
            array[rows] = run.arrays[key][start:stop]
        if chunks.priorities is not None:
            if chunk.priorities is not None:
                part = chunk.priorities[run.start + start : run.start + stop]
                chunks.priorities[rows] = part
            elif PRIORITIES in run.arrays:
                chunks.priorities[rows] = run.arrays[PRIORITIES][start:stop]
        chunks.filled[number] += stop - start
        # A lower bound is enough: later chunks of a stream must have larger numbers.
        if not filled:
            chunks.first_insert[number] = chunk.first + run.start + start
        ends = run.start + stop == len(chunk.ages)
        last = chunk.last if ends else chunk.first + run.start + stop
        chunks.last_insert[number] = last
        self._slots.append(np.arange(rows.start, rows.stop))
        self._ages.append(chunk.ages[run.start + start : run.start + stop])

    def _finish_stream(self, number: int) -> None:
        """Counts the items in a chunk and its followers, and ends the stream."""
        chunks = self._chunks
        stream = []
        while number >= 0:
            stream.append(number)
            number = int(chunks.following[number])
        left = sum(int(chunks.filled[x]) for x in stream) - self._index.length + 1
        for number in stream:
            born = min(max(0, left), int(chunks.filled[number]))
            chunks.born[number] = born
            chunks.dead[number] = min(int(chunks.dead[number]), born)
            chunks.ended[number] = True
            left -= int(chunks.filled[number])
            self._mark_abandoned(number)

    def _mark_abandoned(self, number: int) -> None:
        chunks = self._chunks
        filled = int(chunks.filled[number])
        rows = np.arange(number * chunks.size, number * chunks.size + filled)
        cut = np.zeros(filled, bool)
        following = int(chunks.following[number])
        if (firsts := chunks.arrays.get("is_first")) is not None:
            cut[:-1] = firsts[rows[1:]]
            cut[-1] = following < 0 or firsts[following * chunks.size]
        else:
            cut[-1] = following < 0
        self._index.mark_abandoned(rows[cut])


def _newest(
    index: Index, found: SavedChunks, adopt: bool, amount: int | None
) -> list[SavedChunk]:
    """Returns the newest chunks, as many as are wanted and fit, the oldest first."""
    size, length = index.chunks.size, index.length
    wanted = index.capacity + (length - 1) * len(found.chunks)
    if amount is not None:
        wanted = min(wanted, amount)
    room = index.chunks.amount - chunks_per_worker(length, size)
    kept: list[SavedChunk] = []
    for chunk in sorted(found.chunks, key=lambda chunk: -chunk.last):
        steps = len(chunk.ages)
        room -= 1 if adopt else -(-steps // size) + 1
        if room < 0:
            logger.warning(
                "Replay has memory for the newest %d of %d saved chunks.",
                len(kept),
                len(found.chunks),
            )
            break
        if wanted <= 0:
            break
        kept.append(chunk)
        wanted -= steps - chunk.evicted
    return sorted(kept, key=lambda chunk: chunk.first)


def read_chunks(
    folder: ChunkFolder, chunks: list[SavedChunk], schema: Schema
) -> Iterator[tuple[SavedChunk, list[Run]]]:
    """Yields the chunks with their contents, read ahead by several threads."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        waiting: collections.deque[tuple[SavedChunk, Any]] = collections.deque()
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_read_chunk, folder, chunk, schema)))
            if len(waiting) > _AHEAD:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def _read_chunk(folder: ChunkFolder, chunk: SavedChunk, schema: Schema) -> list[Run]:
    groups: list[list[Run]] = []
    # Of overlapping files the first is used, and of those with one start the longest.
    for file in sorted(chunk.files, key=lambda x: (x.start, -x.stop)):
        end = groups[-1][-1].stop if groups else -1
        if file.kind == STEPS and file.start >= end:
            run = _read_file(folder, file, schema)
            if run is not None:
                if file.start != end:
                    groups.append([])
                groups[-1].append(run)
    runs = [_joined(group) for group in groups]
    for file in sorted(chunk.files, key=lambda x: -x.save):
        if runs and file.kind == LATENTS:
            latents = _read_file(folder, file, schema)
            if latents is not None:
                return [_refreshed(run, latents) for run in runs]
    return runs


def _read_file(folder: ChunkFolder, file: ChunkFile, schema: Schema) -> Run | None:
    """Returns the contents of a file; warns and returns None if it is damaged."""
    keys = list(schema.fields) if file.kind == STEPS else schema.latents
    try:
        found, file = folder.read(file, schema.saved_bytes)
        for key in keys:
            field, count = schema.fields[key], file.stop - file.start
            if key not in found or found[key].shape != (count, *field.shape):
                raise CheckpointError(f"{file.name} lacks {key}.")
            if found[key].dtype != field.stored_dtype:
                raise CheckpointError(f"{file.name} has {key} as {found[key].dtype}.")
    except CheckpointError as error:
        logger.warning("Skipping a damaged file of the replay: %s", error)
        return None
    if PRIORITIES in found and PRIORITIES not in keys:
        keys = [*keys, PRIORITIES]
    arrays = {key: found[key] for key in keys}
    return Run(file.start, file.stop, arrays, [file])


def _joined(runs: list[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]
    shared = set.intersection(*(set(run.arrays) for run in runs))
    arrays = {key: np.concatenate([run.arrays[key] for run in runs]) for key in shared}
    files = [file for run in runs for file in run.files]
    return Run(runs[0].start, runs[-1].stop, arrays, files)


def _refreshed(run: Run, latents: Run) -> Run:
    start, stop = max(run.start, latents.start), min(run.stop, latents.stop)
    if start >= stop:
        return run
    arrays = dict(run.arrays)
    for key in latents.arrays.keys() & arrays.keys():
        arrays[key] = arrays[key].copy()  # Arrays from files may be read-only.
        fresh = latents.arrays[key][start - latents.start : stop - latents.start]
        arrays[key][start - run.start : stop - run.start] = fresh
    return run._replace(arrays=arrays, files=run.files + latents.files)
