"""What a save returns: the tables of chunks and files, as arrays. Replay's process."""

from __future__ import annotations

from pathlib import PurePosixPath

import numpy as np
import zstandard

from embodied.base import Tree
from embodied.checkpoint import FileRecord
from embodied.replay.durable import DIGEST_PREFIX, LATENTS, STEPS, Piece

FORMAT = 1
# Beside the latents in files. No step has such a key, since those are not stored.
PRIORITIES = "log/priority"


def pack_files(identities: list[bytes], files: list[tuple[bytes, Piece]]) -> Tree:
    """Returns files as arrays, each with the place of its chunk in `identities`."""
    places = {identity: place for place, identity in enumerate(identities)}
    digests = b"".join(bytes.fromhex(x.digest[len(DIGEST_PREFIX) :]) for _, x in files)
    return {
        "chunk": np.array([places[identity] for identity, _ in files], np.int32),
        "latents": np.array([x.kind == LATENTS for _, x in files], bool),
        "start": np.array([x.start for _, x in files], np.int32),
        "stop": np.array([x.stop for _, x in files], np.int32),
        "save": np.array([x.save for _, x in files], np.int64),
        "size": np.array([x.size for _, x in files], np.int64),
        "digest": np.frombuffer(digests, np.uint8).reshape(-1, 32).copy(),
    }


def files_of(data: Tree) -> list[tuple[bytes, Piece]]:
    """Returns the files that a save lists, with the ids of their chunks."""
    if "files" not in data:
        return []
    table, identities = data["files"], data["chunks"]["id"]
    names = ("chunk", "latents", "start", "stop", "save", "size")
    rows = zip(*(table[name].tolist() for name in names), table["digest"])
    return [
        (
            identities[chunk].tobytes(),
            Piece(
                LATENTS if latents else STEPS,
                start,
                stop,
                save,
                size,
                DIGEST_PREFIX + digest.tobytes().hex(),
            ),
        )
        for chunk, latents, start, stop, save, size, digest in rows
    ]


def record_of(identity: bytes, piece: Piece, folder: str) -> FileRecord:
    """Returns the record of a file, in a folder relative to the checkpoints' root."""
    path = str(PurePosixPath(folder) / piece.path(identity))
    return FileRecord(path, piece.size, piece.digest, required=False)


def pack_order(order: np.ndarray) -> np.ndarray:
    """Returns the chunk of each item, from the oldest, as compressed bytes.

    Workers take turns, so the numbers repeat and nearly vanish.
    """
    data = zstandard.ZstdCompressor(1).compress(order.astype("<i4").tobytes())
    return np.frombuffer(data, np.uint8).copy()


def unpack_order(packed: np.ndarray) -> np.ndarray:
    """Returns what `pack_order` was given; ZstdError if it is damaged."""
    data = zstandard.ZstdDecompressor().decompress(packed.tobytes())
    return np.frombuffer(data, "<i4")
