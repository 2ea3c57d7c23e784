"""Manifests, which list the files of a checkpoint, and their tags. Any process."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Iterable
from typing import Any

from embodied.checkpoint.files import (
    CheckpointError,
    FileRecord,
    Root,
    list_files,
    locate,
    read_file,
    seal,
    unseal,
    write_file,
)

_FORMAT = 1
_TAG = re.compile(r"([0-9]{8}T[0-9]{12})-([0-9]{8})")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A committed checkpoint.

    Args:
      tag: names the cut; later ones sort behind it.
      files: all files of the checkpoint, sorted by path.
      meta: facts that are needed before a part is read, such as the step.
    """

    tag: str
    files: tuple[FileRecord, ...]
    meta: dict[str, Any]

    @classmethod
    def of(
        cls, tag: str, records: Iterable[FileRecord], meta: dict[str, Any] | None
    ) -> Manifest:
        """Returns the manifest of records from all processes, checked and sorted."""
        check_tag(tag)
        files: dict[str, FileRecord] = {}
        for record in records:
            record.check()
            if files.setdefault(record.path, record) != record:
                raise CheckpointError(
                    f"Two different records of {record.path} in checkpoint {tag}: "
                    f"{files[record.path]} and {record}."
                )
        meta = {} if meta is None else meta
        try:
            same = json.loads(json.dumps(meta, allow_nan=False)) == meta
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"Expected meta that JSON can hold, got {meta!r:.200}: {error}."
            ) from error
        if not same or type(meta) is not dict:
            raise CheckpointError(
                "Expected meta as a dict that JSON gives back unchanged, without "
                f"tuples and with str keys, got {meta!r:.200}."
            )
        return cls(tag, tuple(files[path] for path in sorted(files)), meta)

    def to_bytes(self) -> bytes:
        """Returns the contents of the manifest's file."""
        files = [record.to_json() for record in self.files]
        return seal(
            {"format": _FORMAT, "tag": self.tag, "meta": self.meta, "files": files}
        )

    @classmethod
    def from_bytes(cls, path: str, data: bytes | bytearray) -> Manifest:
        """Returns the manifest of `to_bytes`; `path` is for the error."""
        content = unseal(path, data)
        try:
            if content["format"] != _FORMAT:
                raise CheckpointError(
                    f"expected format {_FORMAT}, got {content['format']!r:.100}"
                )
            records = [FileRecord.from_json(record) for record in content["files"]]
            return cls.of(content["tag"], records, content["meta"])
        except (AttributeError, KeyError, TypeError, CheckpointError) as error:
            raise CheckpointError(
                f"{path} is no manifest that this version can read: {error}"
            ) from error


class ManifestFiles:
    """The manifests on disk: the current one, and one archived per kept commit.

    The current one is written first, and its rename is the commit. The archived copy
    follows; if a kill comes in between, the next commit writes it before it replaces
    the current one.
    """

    def __init__(self, root: Root, folder: str):
        self._root = root
        self._archive = f"{folder}/manifests"
        self.current = f"{folder}/manifest.json"
        # By path, with their contents: each save looks at all that are kept.
        self._parsed: dict[str, tuple[bytes, Manifest]] = {}

    def archived(self, tag: str) -> str:
        """Returns the path of an archived manifest."""
        return f"{self._archive}/{tag}.json"

    def paths(self) -> list[str]:
        """Returns the paths of all manifests that there are, the current one first."""
        paths = [
            path
            for path in list_files(self._root, self._archive)
            if (tag := find_tag(path)) and path == self.archived(tag)
        ]
        if os.path.lexists(os.path.join(self._root, self.current)):
            paths.insert(0, self.current)
        return paths

    def read(self) -> tuple[list[Manifest], dict[str, str]]:
        """Returns whole manifests, newest first, and errors by path."""
        readable: dict[str, Manifest] = {}
        damaged: dict[str, str] = {}
        paths = self.paths()
        self._parsed = {x: self._parsed[x] for x in paths if x in self._parsed}
        for path in paths:
            try:
                manifest = self._parse(path)
                if path not in (self.current, self.archived(manifest.tag)):
                    raise CheckpointError(f"{path} holds the tag {manifest.tag}.")
                readable.setdefault(manifest.tag, manifest)
            except CheckpointError as error:
                # Another process may have pruned it since it was listed.
                if os.path.lexists(os.path.join(self._root, path)):
                    damaged[path] = str(error)
        return [readable[tag] for tag in sorted(readable, reverse=True)], damaged

    def _parse(self, path: str) -> Manifest:
        data = bytes(read_file(self._root, path))
        before = self._parsed.get(path)
        if before is None or before[0] != data:
            before = self._parsed[path] = (data, Manifest.from_bytes(path, data))
        return before[1]

    def write_current(self, manifest: Manifest) -> None:
        """Commits."""
        write_file(self._root, self.current, manifest.to_bytes())

    def write_archived(self, manifest: Manifest) -> None:
        """Makes sure that the archive has a whole copy."""
        path, data = self.archived(manifest.tag), manifest.to_bytes()
        if not locate(self._root, path).exists() or read_file(self._root, path) != data:
            write_file(self._root, path, data)


def find_tag(path: str) -> str | None:
    """Returns the tag that the name of a file begins with, if it does."""
    stem = path.rpartition("/")[2].partition(".")[0]
    return stem if _TAG.fullmatch(stem) else None


def check_tag(tag: str) -> None:
    """Raises unless `tag` is one that `next_tag` may have returned."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise CheckpointError(f"Expected a tag from new_tag(), got {tag!r:.100}.")


def next_tag(previous: str | None, now: datetime.datetime) -> str:
    """Returns a tag behind `previous`, even where the clock has been set back."""
    time = now.astimezone(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
    count = 1
    if previous is not None:
        last_time, last_count = previous.split("-")
        time = max(time, last_time)
        count = int(last_count) + 1
    return f"{time}-{count:08d}"
