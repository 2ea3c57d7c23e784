"""The parts of a checkpoint that replay and logger write. Their processes.

The learner asks them for it, see `conductor.py`. Each restores its own when it starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embodied.base import Tree
from embodied.checkpoint import Checkpoint, FileRecord
from embodied.run.saving import FOLDER

_COUNT_BYTES = 8


def pack_reply(records: Iterable[FileRecord], meta: Mapping[str, Any]) -> str:
    """Returns what a role answers to `save`, as JSON, which any transport keeps."""
    return json.dumps([[record.to_json() for record in records], dict(meta)])


def unpack_reply(text: Any) -> tuple[list[FileRecord], dict[str, Any]]:
    """Returns what `pack_reply` was given."""
    records, meta = json.loads(str(text))
    return [FileRecord.from_json(record) for record in records], meta


class Starts:
    """Counts how often roles were started, in a file. Any role.

    A role that is restarted goes on from the newest checkpoint. If a save that it took
    part in before were committed after that, what is in it would be lost to the role.
    So a role counts its start before it looks for the newest checkpoint, and a save is
    committed, with the file locked, only if nobody has started since it began. The
    kernel unlocks the file of a process that dies, and nobody waits for another role
    while it holds the lock.

    Args:
      folder: of the checkpoints.
    """

    def __init__(self, folder: Path):
        self._path = folder / "starts"

    def add(self) -> None:
        """Counts one more."""
        with self._open() as (fd, count):
            # In place, which a full disk allows.
            os.pwrite(fd, (count + 1).to_bytes(_COUNT_BYTES, "little"), 0)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Returns the number, which does not change in the block."""
        with self._open() as (_, count):
            yield count

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[int, int]]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd, int.from_bytes(os.pread(fd, _COUNT_BYTES, 0), "little")
        finally:
            os.close(fd)


class RoleCheckpoint:
    """The parts of one role that is not the conductor.

    With several replicas each has parts of its own, with the replica's number behind
    the name.

    Args:
      args: `logdir`, `keep`, `replica` and `replicas`.
    """

    def __init__(self, args: Any):
        self.root = Path(args.logdir)
        self._suffix = f"/{args.replica:05}" if args.replicas > 1 else ""
        self._checkpoint = Checkpoint(self.root, FOLDER, keep=args.keep)
        self._starts = Starts(self.root / FOLDER)

    def load(self, names: Iterable[str]) -> dict[str, Tree]:
        """Returns the parts of the newest checkpoint; those it lacks are left out.

        What this role has saved before its start is not committed from here on.
        """
        self._starts.add()
        manifest = self._checkpoint.newest()
        if manifest is None:
            return {}
        found = set(self._checkpoint.parts(manifest))
        return {
            name: self._checkpoint.read_part(manifest, name + self._suffix)
            for name in names
            if name + self._suffix in found
        }

    def listed(self) -> set[str] | None:
        """Returns the paths of all files that a checkpoint lists, if that is known.

        Call it between `load` and the first save: until then nobody commits, since a
        save that began before `load` is refused, and a later one needs this role.
        """
        return self._checkpoint.listed()

    def write(self, tag: str, parts: Mapping[str, Tree]) -> list[FileRecord]:
        """Writes parts under the conductor's tag."""
        return [
            record
            for name, tree in parts.items()
            for record in self._checkpoint.write_part(tag, name + self._suffix, tree)
        ]
