"""Lists saved chunks, from a save or from the files in a folder. Replay's process."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard

from embodied.base import Tree
from embodied.checkpoint import CheckpointError
from embodied.replay.chunkfiles import (
    FORMAT,
    STEPS,
    ChunkFile,
    ChunkFolder,
    unpack_files,
    unpack_order,
)
from embodied.replay.chunks import Schema
from embodied.replay.index import COUNTERS
from embodied.replay.sizing import ReplaySettings

logger = logging.getLogger("embodied.replay")


@dataclasses.dataclass
class SavedChunk:
    """A chunk on disk.

    Args:
      identity: its id.
      previous: the id of the chunk that it follows, or empty.
      evicted: how many of its first items had been evicted.
      first, last: steps inserted into the buffer before its first and up to its last.
      ages: [steps] float64. They order the steps of all chunks by their insertion.
      files: its files.
      priorities: [steps] float32 of its steps; None if only files may have them.
    """

    identity: bytes
    previous: bytes
    evicted: int
    first: int
    last: int
    ages: np.ndarray
    files: list[ChunkFile]
    priorities: np.ndarray | None = None


@dataclasses.dataclass
class SavedChunks:
    """Saved chunks, the oldest first, and the state that was saved with them."""

    chunks: list[SavedChunk]
    schema: Schema | None
    chunksize: int
    save: int
    counters: dict[str, int]
    context: int | None = None  # Of the buffer that saved; None if not known.


def find_chunks(
    data: Tree, folder: ChunkFolder | None, settings: ReplaySettings
) -> SavedChunks:
    """Returns the chunks that a save lists or, without `data`, all in the folder.

    Raises:
      CheckpointError: this version cannot read the save, or its steps lack the latents
        that a buffer with these settings samples.
    """
    context = settings.context
    found = None if data is None else read_list(data, context)
    if found is None or (folder is None and found.chunks):
        if folder is None:
            raise ValueError(
                "Expected a directory to load from, as this buffer has none of its own."
            )
        found = scan_folder(folder, context)
    if found.schema is not None and found.context == 0 and context:
        raise CheckpointError(
            f"Replay '{settings.name}' has replay_context={context} and so expected "
            "steps with latents, but these were saved with replay_context=0, without "
            "them. Use replay_context 0 as before, or another logdir."
        )
    return found


def read_list(data: Tree, context: int) -> SavedChunks:
    """Returns the chunks that a save lists.

    Raises:
      CheckpointError: this version cannot read the save.
    """
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {data['format']!r:.50}")
        # The version that saved may not have had all of these counters.
        counters = {name: int(data["counters"].get(name, 0)) for name in COUNTERS}
        if "chunks" not in data:
            return SavedChunks([], None, 0, int(data["save"]), counters)
        steps = data["chunks"]["steps"]
        if not np.all((steps >= 0) & (steps <= int(data["chunksize"]))):
            raise ValueError(f"expected chunks of at most {data['chunksize']} steps")
        return SavedChunks(
            sorted(_saved_chunks(data), key=lambda chunk: chunk.first),
            Schema.from_json(data["fields"], context),
            int(data["chunksize"]),
            int(data["save"]),
            counters,
            data.get("context"),
        )
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        zstandard.ZstdError,
    ) as error:
        raise CheckpointError(
            f"This version cannot read the saved replay: {error!r}. Load it "
            "with the version that wrote it."
        ) from error


def scan_folder(folder: ChunkFolder, context: int) -> SavedChunks:
    """Returns all chunks in a directory, without the list that a save returned.

    The newest chunk determines keys and chunk size; chunks that differ are left out.
    """
    chunks: list[tuple[SavedChunk, Any, int]] = []
    save = 0
    for identity, files in _by_chunk(folder.scan()).items():
        save = max(save, *(file.save for file in files))
        headers = [
            header
            for file in files
            if file.kind == STEPS and (header := _header(folder, file))
        ]
        if headers:
            chunk = _scanned_chunk(identity, files, headers)
            chunks.append((chunk, headers[0]["fields"], headers[0]["chunksize"]))
    counters = dict.fromkeys(COUNTERS, 0)
    if not chunks:
        return SavedChunks([], None, 0, save, counters)
    chunks.sort(key=lambda entry: entry[0].first)
    newest, fields, chunksize = max(chunks, key=lambda entry: entry[0].last)
    counters["inserts"] = newest.last
    same = []
    for chunk, *others in chunks:
        if others == [fields, chunksize]:
            same.append(chunk)
        else:
            logger.warning(
                "Leaving out chunk %s, whose steps differ from those saved last.",
                chunk.identity.hex(),
            )
    schema = Schema.from_json(fields, context)
    return SavedChunks(same, schema, chunksize, save, counters)


def _by_chunk(files: list[ChunkFile]) -> dict[bytes, list[ChunkFile]]:
    groups: dict[bytes, list[ChunkFile]] = collections.defaultdict(list)
    for file in files:
        groups[file.chunk].append(file)
    return groups


def _saved_chunks(data: Tree) -> list[SavedChunk]:
    table, files = data["chunks"], _by_chunk(unpack_files(data))
    identities = [identity.tobytes() for identity in table["id"]]
    steps = table["steps"].tolist()
    order = unpack_order(data["order"], sum(steps))
    # The ranks by age of each chunk's items, which begin at consecutive steps.
    ranks = np.split(
        np.argsort(order, kind="stable"),
        np.cumsum(np.bincount(order, minlength=len(steps)))[:-1],
    )
    # Files may lack the newest ones: they are written with latents, up to a limit.
    priorities: Sequence[np.ndarray | None] = [None] * len(steps)
    if (saved := data.get("priorities")) is not None:
        priorities = np.split(saved, np.cumsum(steps)[:-1])
    chunks = []
    for i, identity in enumerate(identities):
        names = ("previous", "evicted", "first", "last")
        previous, evicted, first, last = (int(table[name][i]) for name in names)
        # Steps without an item come last.
        ages = len(order) + first + np.arange(steps[i], dtype=np.float64)
        ages[evicted : evicted + len(ranks[i])] = ranks[i]
        chunks.append(
            SavedChunk(
                identity,
                identities[previous] if previous >= 0 else b"",
                evicted,
                first,
                last,
                ages,
                files.get(identity, []),
                priorities[i],
            )
        )
    return chunks


def _scanned_chunk(
    identity: bytes, files: list[ChunkFile], headers: list[dict[str, Any]]
) -> SavedChunk:
    steps = max(file.stop for file in files)
    first, last = headers[0]["first"], max(header["last"] for header in headers)
    # When each step was inserted between the two is not known, so spread them evenly.
    ages = np.linspace(first, last, steps)
    previous = bytes.fromhex(headers[0]["previous"])
    return SavedChunk(identity, previous, 0, first, last, ages, files)


def _header(folder: ChunkFolder, file: ChunkFile) -> dict[str, Any] | None:
    try:
        header = folder.metadata(file)
        kinds = {"previous": str, "first": int, "last": int, "chunksize": int}
        wrong = [
            key for key, kind in kinds.items() if type(header.get(key)) is not kind
        ]
        if wrong or header.get("format") != FORMAT or "fields" not in header:
            raise CheckpointError(
                f"{file.name} was written by an incompatible version."
            )
        return header
    except CheckpointError as error:
        logger.warning("Skipping a damaged file of the replay: %s", error)
        return None
