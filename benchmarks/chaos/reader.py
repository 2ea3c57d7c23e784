"""Reads the files of a logdir without the product's code: an independent witness.

It follows the documented format: `ckpt/manifest.json` and `ckpt/manifests/TAG.json` are
JSON with a digest of its content, and list files with size and digest; a part is
`ckpt/NAME/TAG.json` beside `ckpt/NAME/TAG.safetensors`; a chunk file is safetensors,
perhaps in a zstd frame, named CHUNK-START-STOP-SAVE.steps.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import pathlib
import re
from typing import Any

import numpy as np
import safetensors.numpy
import zstandard

from benchmarks.chaos.numbered_env import unpack

_SEALED = re.compile(rb'\{"digest":"sha256:([0-9a-f]{64})","content":(.*)\}', re.DOTALL)
_CHUNK = re.compile(r"(.+)/([0-9a-f]{32})-(\d{8})-(\d{8})-(\d{8})\.(steps|latents)")
_ZSTD = b"\x28\xb5\x2f\xfd"
_MAX_BYTES = 1 << 28  # Of a chunk file, unpacked.


class Unreadable(Exception):
    """A file is missing, torn or altered; the message names it."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A committed checkpoint."""

    tag: str
    meta: dict[str, Any]
    files: dict[str, dict[str, Any]]  # Size, digest and required, by path.

    @property
    def time(self) -> float:
        """When the save began, in seconds since the epoch."""
        moment = datetime.datetime.strptime(self.tag.split("-")[0], "%Y%m%dT%H%M%S%f")
        return moment.replace(tzinfo=datetime.UTC).timestamp()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A chunk file: steps `start` to `stop` of a chunk."""

    path: str
    chunk: str
    start: int
    stop: int
    arrays: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Stream:
    """Steps that are stored as one sequence.

    Args:
      where: [n, 5] env, life, episode, step and counter.
      arrays: [n] each, the rest of the transitions.
      pieces: first row, and row after the last, of each file, by path.
    """

    where: np.ndarray
    arrays: dict[str, np.ndarray]
    pieces: dict[str, tuple[int, int]]


def read_sealed(path: pathlib.Path) -> Any:
    """Returns the content of a JSON file that carries its own digest."""
    try:
        sealed = _SEALED.fullmatch(path.read_bytes())
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    if not sealed or hashlib.sha256(sealed[2]).hexdigest() != sealed[1].decode():
        raise Unreadable(f"{path}: its digest does not fit")
    return json.loads(sealed[2])


def read_manifest(path: pathlib.Path) -> Manifest:
    """Returns a manifest."""
    content = read_sealed(path)
    files = {entry["path"]: entry for entry in content["files"]}
    return Manifest(content["tag"], content["meta"], files)


def manifests(logdir: pathlib.Path) -> tuple[list[Manifest], list[str]]:
    """Returns all readable manifests, oldest first, and what is wrong with others."""
    found: dict[str, Manifest] = {}
    problems = []
    folder = logdir / "ckpt"
    for path in [
        *sorted((folder / "manifests").glob("*.json")),
        folder / "manifest.json",
    ]:
        try:
            if path.exists():
                manifest = read_manifest(path)
                found[manifest.tag] = manifest
        except Unreadable as error:
            problems.append(str(error))
    return [found[tag] for tag in sorted(found)], problems


def damage(logdir: pathlib.Path, manifest: Manifest) -> dict[str, str]:
    """Returns what is wrong with the files of a manifest, by path."""
    found = {}
    for path, entry in manifest.files.items():
        try:
            data = (logdir / path).read_bytes()
        except OSError as error:
            found[path] = str(error.strerror)
            continue
        if len(data) != entry["size"]:
            found[path] = f"has {len(data)} bytes instead of {entry['size']}"
        elif f"sha256:{hashlib.sha256(data).hexdigest()}" != entry["digest"]:
            found[path] = "its digest does not fit"
    return found


def read_part(logdir: pathlib.Path, manifest: Manifest, name: str) -> Any:
    """Returns a part of a checkpoint as nested dicts; arrays are left out."""
    return _plain(read_sealed(logdir / f"ckpt/{name}/{manifest.tag}.json")["tree"])


def read_streams(
    logdir: pathlib.Path, manifest: Manifest, folder: str
) -> tuple[list[Stream], list[str]]:
    """Returns the streams of a replay, and what is wrong with its files."""
    pieces: dict[str, list[Piece]] = {}
    problems: list[str] = []
    for path in manifest.files:
        match = _CHUNK.fullmatch(path)
        if match and match[1] == folder and match[6] == "steps":
            try:
                piece = read_piece(logdir, path)
                pieces.setdefault(piece.chunk, []).append(piece)
            except Unreadable as error:
                problems.append(str(error))
    table = read_table(logdir, manifest, folder)
    for chunk, found in pieces.items():
        found.sort(key=lambda piece: piece.start)
        stops = [0, *(piece.stop for piece in found)]
        if [piece.start for piece in found] != stops[:-1]:
            problems.append(f"chunk {chunk} of {folder} has a hole or an overlap")
        if chunk not in table or table[chunk][1] != stops[-1]:
            problems.append(f"chunk {chunk} of {folder} is not as the checkpoint says")
    problems += [
        f"chunk {chunk} has no files" for chunk in table if chunk not in pieces
    ]
    chains = _chains({chunk: table[chunk][0] for chunk in pieces if chunk in table})
    if sum(map(len, chains)) != len(pieces):
        problems.append(f"not all chunks of {folder} follow one another in lines")
    return [_join(chain, pieces) for chain in chains], problems


def read_table(
    logdir: pathlib.Path, manifest: Manifest, replay: str
) -> dict[str, tuple[str, int]]:
    """Returns the predecessor of every chunk, or '', and its number of steps.

    The predecessor that a chunk file names does not count: files are never changed, and
    that chunk may have lost its end since.
    """
    path = logdir / f"ckpt/{replay}/{manifest.tag}.safetensors"
    try:
        arrays = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise Unreadable(f"{path}: {error}") from error
    if "chunks/id" not in arrays:
        return {}
    chunks = [identity.tobytes().hex() for identity in arrays["chunks/id"]]
    previous = [chunks[x] if x >= 0 else "" for x in arrays["chunks/previous"].tolist()]
    return dict(zip(chunks, zip(previous, arrays["chunks/steps"].tolist())))


def read_piece(logdir: pathlib.Path, path: str) -> Piece:
    """Returns the contents of a chunk file."""
    match = _CHUNK.fullmatch(path)
    assert match, path
    try:
        data = (logdir / path).read_bytes()
        if data[:4] == _ZSTD:
            data = zstandard.ZstdDecompressor().decompress(data, _MAX_BYTES)
        arrays = safetensors.numpy.load(data)
    except (OSError, ValueError, LookupError, zstandard.ZstdError) as error:
        raise Unreadable(f"{path}: {error}") from error
    except safetensors.SafetensorError as error:
        raise Unreadable(f"{path}: {error}") from error
    start, stop = int(match[3]), int(match[4])
    if len(arrays["where"]) != stop - start:
        raise Unreadable(f"{path}: it holds {len(arrays['where'])} steps")
    return Piece(path, match[2], start, stop, arrays)


def _chains(previous: dict[str, str]) -> list[list[str]]:
    """Returns the chunks of each stream, in their order."""
    following = {before: chunk for chunk, before in previous.items() if before}
    chains = []
    for chunk, before in previous.items():
        if not before:
            chain = [chunk]
            while chain[-1] in following:
                chain.append(following[chain[-1]])
            chains.append(chain)
    return chains


def _join(chain: list[str], pieces: dict[str, list[Piece]]) -> Stream:
    found = [piece for chunk in chain for piece in pieces[chunk]]
    keys = ("where", "reward", "is_first", "is_last", "is_terminal")
    arrays = {key: np.concatenate([x.arrays[key] for x in found]) for key in keys}
    rows, places = 0, {}
    for piece in found:
        places[piece.path] = (rows, rows + piece.stop - piece.start)
        rows += piece.stop - piece.start
    return Stream(unpack(arrays.pop("where")), arrays, places)


def _plain(node: Any) -> Any:
    """Returns a saved tree as Python values, with None for all but plain values."""
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        return {key: _plain(child) for key, child in value}
    if kind in ("list", "tuple"):
        return [_plain(child) for child in value]
    return None


def read_lines(path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the lines of a JSONL file, and how many of them are not whole."""
    lines, torn = [], 0
    if not path.exists():
        return [], 0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except ValueError:
            torn += 1
    return lines, torn
