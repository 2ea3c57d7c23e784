"""The files of chunks: written once, verified when read. Replay's process.

A file holds safetensors data, inside a zstd frame if compressed. Its name describes its
contents:

    CHUNK-START-STOP-SAVE.steps      the steps from START to STOP of a chunk
    CHUNK-START-STOP-SAVE.latents    their latents, as training has refreshed them since

SAVE is the number of the save that wrote the file. A chunk that grows is written in
pieces: each save adds a file with the steps since the previous one. Of several files of
latents, the one of the latest save is used. A save lists its files in arrays, which are
stored in its checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import zstandard

from embodied.base import Tree
from embodied.checkpoint import CheckpointError, FileRecord, write_file
from embodied.checkpoint.files import DIGEST_PREFIX, HashedReader

FORMAT = 1
STEPS, LATENTS = "steps", "latents"
# Key of priorities in files. Steps cannot have it, as `log/` keys are not stored.
PRIORITIES = "log/priority"
COMPRESSIONS = ("zstd", "none")

_NAME = re.compile(r"([0-9a-f]{32})-([0-9]{8})-([0-9]{8})-([0-9]{8})\.(steps|latents)")
_FRAME = b"\x28\xb5\x2f\xfd"  # How a zstd frame begins; safetensors never do.
_LEVEL = 1  # Twice as fast as 3 on images, for files a few percent larger.
_METADATA = "replay"
_MAX_HEADER = 1 << 20


@dataclasses.dataclass(frozen=True)
class ChunkFile:
    """A file of a chunk.

    Args:
      chunk: id of the chunk.
      kind: 'steps' or 'latents'.
      start, stop: range of the chunk's steps that it holds.
      save: number of the save that wrote it.
      size, digest: of the file; the digest is empty if they are not known.
    """

    chunk: bytes
    kind: str
    start: int
    stop: int
    save: int
    size: int = 0
    digest: str = ""

    @property
    def name(self) -> str:
        """The file's name in its folder."""
        numbers = f"{self.start:08d}-{self.stop:08d}-{self.save:08d}"
        return f"{self.chunk.hex()}-{numbers}.{self.kind}"

    @classmethod
    def parse(cls, name: str) -> ChunkFile | None:
        """Returns the file with a name, or None for other names."""
        if not (match := _NAME.fullmatch(name)):
            return None
        chunk, start, stop, save, kind = match.groups()
        return cls(bytes.fromhex(chunk), kind, int(start), int(stop), int(save))


@dataclasses.dataclass
class ChunkFiles:
    """The files of a chunk. Owned by the thread that saves or loads.

    Args:
      steps: the files of its steps, from step 0 on and without gaps.
      latents: files of refreshed latents, the newest last. An older one is kept until
        it is clear that the newer one was committed.
      stamp: number of the last update whose latents are on disk.
    """

    steps: list[ChunkFile] = dataclasses.field(default_factory=list)
    latents: list[ChunkFile] = dataclasses.field(default_factory=list)
    stamp: int = 0

    @property
    def stop(self) -> int:
        """Number of steps on disk."""
        return self.steps[-1].stop if self.steps else 0

    @property
    def needed(self) -> list[ChunkFile]:
        """The files that a reader needs."""
        return self.steps + self.latents[-1:]


class ChunkFolder:
    """A directory with files of chunks. Thread-safe.

    Args:
      path: the directory; the first write creates it.
      compress: 'zstd' or 'none', for writing. Both can be read.
    """

    def __init__(self, path: str | os.PathLike[str], compress: str = "zstd"):
        if compress not in COMPRESSIONS:
            raise ValueError(
                f"Expected compress to be one of {COMPRESSIONS}, got {compress!r}."
            )
        self.path = Path(path).absolute()
        self._compress = compress

    def write(
        self, file: ChunkFile, arrays: dict[str, np.ndarray], metadata: dict[str, Any]
    ) -> ChunkFile:
        """Writes a file, and returns it with size and digest.

        Raises:
          CheckpointError: it could not be written; nothing is left behind.
        """
        data = encode(arrays, metadata, self._compress)
        record = write_file(self.path, file.name, data, required=False)
        return dataclasses.replace(file, size=record.size, digest=record.digest)

    def read(
        self, file: ChunkFile, step_bytes: int
    ) -> tuple[dict[str, np.ndarray], ChunkFile]:
        """Returns the arrays of a file, and the file with size and digest.

        Args:
          file: of this folder.
          step_bytes: maximum size of a step. A file that is larger than its steps can
            be is refused before memory is allocated for it.

        Raises:
          CheckpointError: the file, which is named, is missing, torn, altered or too
            large.
        """
        limit = (file.stop - file.start) * step_bytes + _MAX_HEADER
        target = self._target(file)
        with HashedReader(target.parent, target.name) as stored:
            if stored.size > limit:
                raise CheckpointError(
                    f"{stored.path} is damaged: expected at most {limit} bytes, got "
                    f"{stored.size}."
                )
            data = stored.read()
            if file.digest:
                stored.check(FileRecord(file.name, file.size, file.digest))
            file = dataclasses.replace(file, size=len(data), digest=stored.digest)
        try:
            return decode(data, limit), file
        except CheckpointError as error:
            raise CheckpointError(f"{stored.path} is damaged: {error}") from error

    def metadata(self, file: ChunkFile) -> dict[str, Any]:
        """Returns the metadata of a file without reading all of it.

        Raises:
          CheckpointError: the file, which is named, is missing, torn or altered.
        """
        target = self._target(file)
        try:
            with target.open("rb") as stored:
                compressed = stored.read(len(_FRAME)) == _FRAME
                stored.seek(0)
                reader = (
                    zstandard.ZstdDecompressor().stream_reader(stored)
                    if compressed
                    else stored
                )
                length = int.from_bytes(reader.read(8), "little")
                if length > _MAX_HEADER:
                    raise ValueError(f"its header has {length} bytes")
                return _parse_header(reader.read(length))
        except (OSError, ValueError, LookupError, zstandard.ZstdError) as error:
            raise CheckpointError(f"Cannot read {target}: {error}.") from error

    def _target(self, file: ChunkFile) -> Path:
        """Returns the path to read a file at, which may be a link to it.

        Whoever shares a replay by links means the files behind them.
        """
        try:
            return (self.path / file.name).resolve()
        except (OSError, RuntimeError) as error:  # E.g. a loop of links.
            raise CheckpointError(
                f"Cannot read {self.path / file.name}: {error}."
            ) from error

    def records(
        self, files: Iterable[ChunkFile], root: str | os.PathLike[str]
    ) -> list[FileRecord]:
        """Returns the records of files, relative to the root of checkpoints."""
        folder = PurePosixPath(os.path.relpath(self.path, os.path.abspath(root)))
        if os.pardir in folder.parts:
            raise ValueError(
                f"Expected the root of checkpoints to contain {self.path}, got {root}."
            )
        return [
            FileRecord(str(folder / x.name), x.size, x.digest, required=False)
            for x in files
        ]

    def scan(self) -> list[ChunkFile]:
        """Returns the chunk files in the directory, without reading their contents."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [file for name in names if (file := ChunkFile.parse(name))]

    def remove(self, file: ChunkFile) -> None:
        """Removes a file if it exists and can be removed."""
        with contextlib.suppress(OSError):
            (self.path / file.name).unlink(missing_ok=True)


def pack_files(files: list[ChunkFile], chunks: list[bytes]) -> Tree:
    """Returns files as arrays, each with the index of its chunk in `chunks`."""
    places = {chunk: place for place, chunk in enumerate(chunks)}
    digests = b"".join(bytes.fromhex(x.digest[len(DIGEST_PREFIX) :]) for x in files)
    return {
        "chunk": np.array([places[x.chunk] for x in files], np.int32),
        "latents": np.array([x.kind == LATENTS for x in files], bool),
        "start": np.array([x.start for x in files], np.int32),
        "stop": np.array([x.stop for x in files], np.int32),
        "save": np.array([x.save for x in files], np.int64),
        "size": np.array([x.size for x in files], np.int64),
        "digest": np.frombuffer(digests, np.uint8).reshape(-1, 32).copy(),
    }


def unpack_files(data: Tree) -> list[ChunkFile]:
    """Returns the files that a save lists."""
    table, chunks = data["files"], data["chunks"]["id"]
    names = ("chunk", "latents", "start", "stop", "save", "size")
    rows = zip(*(table[name].tolist() for name in names), table["digest"])
    return [
        ChunkFile(
            chunks[chunk].tobytes(),
            LATENTS if latents else STEPS,
            start,
            stop,
            save,
            size,
            DIGEST_PREFIX + digest.tobytes().hex(),
        )
        for chunk, latents, start, stop, save, size, digest in rows
    ]


def pack_order(order: np.ndarray) -> np.ndarray:
    """Returns the chunk of each item, the oldest first, as compressed bytes.

    Workers take turns, so the numbers repeat and compress to almost nothing.
    """
    data = zstandard.ZstdCompressor(1).compress(order.astype("<i4").tobytes())
    return np.frombuffer(data, np.uint8).copy()


def unpack_order(packed: np.ndarray, steps: int) -> np.ndarray:
    """Returns what `pack_order` was given.

    Args:
      packed: the compressed bytes.
      steps: number of steps in all chunks, which bounds the number of items.

    Raises:
      ZstdError, ValueError: the data is damaged.
    """
    return np.frombuffer(decompress(packed.tobytes(), 4 * steps), "<i4")


def decompress(data: bytes, limit: int) -> bytes:
    """Returns the contents of a zstd frame.

    Raises:
      ZstdError, ValueError: the frame is damaged, or has more than `limit` bytes.
    """
    # zstd allocates the size that the frame claims to have, whatever the limit.
    size = zstandard.frame_content_size(data)
    if size > limit:
        raise ValueError(f"expected at most {limit} bytes, got {size} unpacked")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=max(1, limit))


def encode(
    arrays: dict[str, np.ndarray], metadata: dict[str, Any], compress: str
) -> bytes:
    """Returns the contents of a file."""
    arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    metadata = {**metadata, "checksum": _checksum(arrays)}
    text = json.dumps(metadata, separators=(",", ":"))
    data = safetensors.numpy.save(arrays, {_METADATA: text})
    if compress == "zstd":
        return zstandard.ZstdCompressor(_LEVEL).compress(data)
    return data


def decode(data: bytes, limit: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a file's contents.

    Args:
      data: the contents.
      limit: maximum size of the uncompressed contents, in bytes.

    Raises:
      CheckpointError: the contents are torn, altered or too large.
    """
    try:
        if data[: len(_FRAME)] == _FRAME:
            data = decompress(data, limit)
        length = int.from_bytes(data[:8], "little")
        metadata = _parse_header(data[8 : 8 + length])
        arrays = safetensors.numpy.load(data)
    except (
        ValueError,
        LookupError,
        MemoryError,
        zstandard.ZstdError,
        safetensors.SafetensorError,
    ) as error:
        raise CheckpointError(f"its contents cannot be decoded: {error}") from error
    if _checksum(arrays) != metadata.get("checksum"):
        raise CheckpointError("its checksum does not match its contents")
    return arrays


def _parse_header(header: bytes) -> dict[str, Any]:
    metadata = json.loads(json.loads(header)["__metadata__"][_METADATA])
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is no object")
    return metadata


def _checksum(arrays: dict[str, np.ndarray]) -> int:
    checksum = 0
    for _, array in sorted(arrays.items()):
        checksum = zlib.crc32(array.reshape(-1).view(np.uint8).data, checksum)
    return checksum
