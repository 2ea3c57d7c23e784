"""Reads saved chunks, and leaves out what is damaged. Replay's process.

    for chunk, runs in read_chunks(folder, chunks, schema): ...

A run is a stretch of steps of a chunk without gaps. Damaged files leave gaps.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from embodied.checkpoint import CheckpointError
from embodied.replay.durable import LATENTS, STEPS, ChunkFolder, Piece
from embodied.replay.fields import Schema
from embodied.replay.finding import SavedChunk
from embodied.replay.listing import PRIORITIES

logger = logging.getLogger("embodied.replay")

_THREADS = 4
_AHEAD = 8  # Chunks that are read before they are asked for.


class Run(NamedTuple):
    """Steps of a chunk without gaps."""

    start: int
    stop: int
    arrays: dict[str, np.ndarray]
    pieces: list[Piece]


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
    # Of pieces that overlap, the longest counts.
    for piece in sorted(chunk.pieces, key=lambda x: (x.start, -x.stop)):
        end = groups[-1][-1].stop if groups else -1
        if piece.kind == STEPS and piece.start >= end:
            run = _read_piece(folder, chunk.identity, piece, schema)
            if run is not None:
                if piece.start != end:
                    groups.append([])
                groups[-1].append(run)
    runs = [_joined(group) for group in groups]
    for piece in sorted(chunk.pieces, key=lambda x: -x.save):
        if runs and piece.kind == LATENTS:
            latents = _read_piece(folder, chunk.identity, piece, schema)
            if latents is not None:
                return [_refreshed(run, latents) for run in runs]
    return runs


def _read_piece(
    folder: ChunkFolder, identity: bytes, piece: Piece, schema: Schema
) -> Run | None:
    """Returns the contents of a file, or None with a warning."""
    keys = list(schema.fields) if piece.kind == STEPS else schema.latents
    try:
        found, piece = folder.read(identity, piece)
        for key in keys:
            codec, count = schema.codecs[key], piece.stop - piece.start
            if key not in found or found[key].shape != (count, *codec.shape):
                raise CheckpointError(f"{piece.path(identity)} lacks {key}.")
            if found[key].dtype != codec.dtype:
                raise CheckpointError(
                    f"{piece.path(identity)} has {key} as {found[key].dtype}."
                )
    except CheckpointError as error:
        logger.warning("Leaving out a file of replay: %s", error)
        return None
    if PRIORITIES in found and PRIORITIES not in keys:
        keys = [*keys, PRIORITIES]
    arrays = {key: found[key] for key in keys}
    return Run(piece.start, piece.stop, arrays, [piece])


def _joined(runs: list[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]
    shared = set.intersection(*(set(run.arrays) for run in runs))
    arrays = {key: np.concatenate([run.arrays[key] for run in runs]) for key in shared}
    pieces = [piece for run in runs for piece in run.pieces]
    return Run(runs[0].start, runs[-1].stop, arrays, pieces)


def _refreshed(run: Run, latents: Run) -> Run:
    start, stop = max(run.start, latents.start), min(run.stop, latents.stop)
    if start >= stop:
        return run
    arrays = dict(run.arrays)
    for key in latents.arrays.keys() & arrays.keys():
        arrays[key] = arrays[key].copy()  # What was read may not be writable.
        fresh = latents.arrays[key][start - latents.start : stop - latents.start]
        arrays[key][start - run.start : stop - run.start] = fresh
    return run._replace(arrays=arrays, pieces=run.pieces + latents.pieces)
