"""Reads checkpoints: the newest whole one, and its parts. Any process."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from embodied.base import Tree
from embodied.checkpoint.files import (
    CheckpointError,
    FileRecord,
    Root,
    delete,
    find_damage,
    find_tag,
    is_temporary,
    list_files,
    locate,
)
from embodied.checkpoint.store import CheckpointStore, Manifest
from embodied.checkpoint.treefiles import load_tree

_VERIFIED_SECONDS = 600.0  # How long another process's verification counts.
# Attempts to read a checkpoint while another process commits and prunes.
_READ_ATTEMPTS = 10
_Found = TypeVar("_Found")

logger = logging.getLogger("embodied.checkpoint")


class Checkpoint(CheckpointStore):
    """Reads and writes the checkpoints below one root; see `CheckpointStore`."""

    def newest(self, shared: bool = False) -> Manifest | None:
        """Returns the newest manifest whose required files are all whole.

        Every byte of these files is read and compared with the digest. Damaged
        checkpoints are skipped with a warning.

        Args:
          shared: whether other processes call this at the same time, as roles that
            start together do. Then one of them reads the files, and all get the same
            answer.

        Returns:
          The manifest, or None if there has never been a commit.

        Raises:
          CheckpointError: there are commits, but all are damaged. Starting from zero
            would lose what can perhaps still be rescued, so a person has to decide.
        """
        if not shared or not self.exists():
            return self._retry_read(self._find_newest)

        def find() -> Manifest | None:
            with SharedVerification(self.root, f"{self.folder}/verified") as files:
                return self._find_newest(files.find_damage)

        return self._retry_read(find)

    def listed(self) -> set[str] | None:
        """Returns the files to keep, for roles that clean folders of their own.

        Returns:
          All paths that a manifest lists, relative to the root; None if a manifest is
          damaged, since the files that it lists are unknown.
        """
        readable, damaged = self._manifests.read()
        if damaged:
            return None
        return {record.path for manifest in readable for record in manifest.files}

    def parts(self, manifest: Manifest) -> list[str]:
        """Returns the names of the parts that a checkpoint has."""
        start, end = f"{self.folder}/", f"/{manifest.tag}.json"
        return [
            record.path[len(start) : -len(end)]
            for record in manifest.files
            if record.path.startswith(start) and record.path.endswith(end)
        ]

    def read_part(self, manifest: Manifest, name: str) -> Tree:
        """Returns the tree given to `write_part`; verifies its files once more.

        For a run that is still in progress, use `read_newest`: the run may have
        committed other checkpoints since, and pruned this one.
        """
        names = self.parts(manifest)
        if name not in names:
            raise CheckpointError(
                f"Checkpoint {manifest.tag} has no part {name!r}, only {names}."
            )
        return load_tree(self.root, self._stem(manifest.tag, name), manifest.files)

    def load(self) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """Returns all parts and the meta of the newest whole checkpoint, if any."""
        found = self.read_newest()
        return None if found is None else (found[1], found[0].meta)

    def read_newest(
        self, names: Iterable[str] | None = None
    ) -> tuple[Manifest, dict[str, Tree]] | None:
        """Returns the newest whole checkpoint with its parts; None if there is none.

        The run may be in progress, and commit meanwhile.

        Args:
          names: names of the parts to read; by default all.
        """

        def read() -> tuple[Manifest, dict[str, Tree]] | None:
            manifest = self._find_newest()
            if manifest is None:
                return None
            chosen = self.parts(manifest) if names is None else names
            return manifest, {name: self.read_part(manifest, name) for name in chosen}

        return self._retry_read(read)

    def clean(self) -> None:
        """Removes the leftovers of a killed save or prune. Call it at start-up.

        Leftovers are temporary files anywhere below the root, and files in the folder
        whose name begins with a tag but that no kept manifest lists. No save may be
        under way, in this process or another. While a manifest is damaged, only
        temporary files are removed: a person may restore it.
        """
        with self._lock:
            self.remove_temporary("")
            self.prune()
            readable, damaged = self._manifests.read()
            if damaged:
                return
            needed = set(self._manifests.paths())
            for manifest in readable:
                needed |= {record.path for record in manifest.files}
            for path in list_files(self.root, self.folder):
                if find_tag(path) and path not in needed:
                    delete(self.root, path)

    def remove_temporary(self, folder: str) -> None:
        """Removes unfinished files below a folder; no process may write there now."""
        for path in list_files(self.root, folder):
            if is_temporary(path):
                delete(self.root, path)

    def _retry_read(self, read: Callable[[], _Found]) -> _Found:
        """Retries a read that failed while another process committed.

        A commit prunes checkpoints, so files that were listed before may be gone
        although no checkpoint is damaged.
        """
        for _ in range(_READ_ATTEMPTS - 1):
            before = self.last()
            try:
                return read()
            except CheckpointError:
                if self.last() == before:
                    raise
        return read()

    def _find_newest(
        self, find: Callable[[FileRecord], str | None] | None = None
    ) -> Manifest | None:
        find = find or functools.partial(find_damage, self.root)
        readable, damaged = self._manifests.read()
        skipped = [("a damaged manifest", problem) for problem in damaged.values()]
        for manifest in readable:
            found = [
                damage
                for record in manifest.files
                if record.required and (damage := find(record))
            ]
            if not found:
                for what, problem in skipped:
                    logger.warning("Skipping %s: %s", what, problem)
                return manifest
            skipped += [(f"checkpoint {manifest.tag}", problem) for problem in found]
        if skipped:
            problems = " ".join(problem for _, problem in skipped)
            raise CheckpointError(
                f"No checkpoint in {self.root / self.folder} is whole: {problems} "
                "Restore these files from a copy, or move the folder away to start "
                "from the beginning."
            )
        return None


class SharedVerification:
    """Verifies files once for all processes that start together. Any process.

        with SharedVerification(root, path) as verification:
          problem = verification.find_damage(record)

    The first process reads the files and notes which are whole. The others wait for
    it, and trust its note on a file if digest, size, modification time and inode are
    the same. Silent corruption of the disk changes none of these, so a note counts only
    for a while, and a process that reads a file verifies it once more. If a process
    dies, the kernel releases its lock on the notes.

    Args:
      root: folder that paths are relative to.
      path: where the notes lie, relative to the root.
    """

    def __init__(self, root: Root, path: str):
        self._root = root
        self._path = Path(root, path)
        self._fd = -1
        self._notes: dict[str, list[Any]] = {}

    def __enter__(self) -> SharedVerification:
        # If the notes cannot be opened, every process reads all files itself.
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._notes = self._read()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def find_damage(self, record: FileRecord) -> str | None:
        """Returns a sentence on the damage of a listed file; None if it is whole."""
        facts = self._fingerprint(record)
        if facts is not None:
            noted, seconds = self._notes.get(record.path, (None, 0.0))
            if noted == facts and abs(time.time() - seconds) < _VERIFIED_SECONDS:
                return None
        damage = find_damage(self._root, record)
        if damage is None and facts is not None:
            self._notes[record.path] = [facts, time.time()]
            self._write()
        return damage

    def _fingerprint(self, record: FileRecord) -> list[Any] | None:
        try:
            status = locate(self._root, record.path).stat()
        except (OSError, CheckpointError):
            return None
        return [record.digest, status.st_size, status.st_mtime_ns, status.st_ino]

    def _read(self) -> dict[str, list[Any]]:
        try:
            notes = json.loads(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
            return {
                str(path): [facts, float(at)] for path, (facts, at) in notes.items()
            }
        except (AttributeError, TypeError, ValueError):  # The writer was killed.
            return {}

    def _write(self) -> None:
        if self._fd < 0:
            return
        now = time.time()
        recent = {
            path: note
            for path, note in self._notes.items()
            if abs(now - note[1]) < _VERIFIED_SECONDS
        }
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(recent).encode(), 0)
