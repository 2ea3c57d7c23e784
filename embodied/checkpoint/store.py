"""Writes checkpoints: parts, commits and pruning. Any process.

One process, the conductor, commits; others may write parts for it. Within a process
a lock lets one thread at a time commit, prune, clean, or save. Writing a part takes no
lock: it touches only files that carry its own name and tag.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from embodied.base import Tree
from embodied.checkpoint.files import (
    CheckpointError,
    FileRecord,
    Root,
    check_path,
    check_tag,
    delete,
    find_damage,
    find_room_problem,
    find_tag,
    list_files,
    locate,
    next_tag,
    read_file,
    seal,
    unseal,
    write_file,
)
from embodied.checkpoint.treefiles import save_tree

_FORMAT = 1  # Of manifests.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")

logger = logging.getLogger("embodied.checkpoint")


@runtime_checkable
class Cut(Protocol):
    """State of one moment that writes files of its own, such as that of a replay."""

    def write(self) -> Tree:
        """Writes the files, and returns the rest of the state."""

    def records(self, root: Root) -> list[FileRecord]:
        """Returns the records of the files, relative to the root."""

    def close(self) -> None:
        """Frees what the cut holds. May be called more than once."""

    def discard(self) -> None:
        """Removes the files that were written, because they were not committed."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A committed checkpoint.

    Args:
      tag: name of the cut; tags of later cuts sort after it.
      files: all files of the checkpoint, sorted by path.
      meta: facts that are needed before a part is read, such as the step; JSON.
    """

    tag: str
    files: tuple[FileRecord, ...]
    meta: dict[str, Any]

    @classmethod
    def of(
        cls, tag: str, records: Iterable[FileRecord], meta: dict[str, Any]
    ) -> Manifest:
        """Makes a manifest from the records of all processes; checks and sorts them."""
        check_tag(tag)
        files: dict[str, FileRecord] = {}
        for record in records:
            if files.setdefault(record.path, record) != record:
                raise CheckpointError(
                    f"Two different records of {record.path} in checkpoint {tag}: "
                    f"{files[record.path]} and {record}."
                )
        if not isinstance(meta, dict):
            raise CheckpointError(f"Expected meta as a dict, got {meta!r:.200}.")
        return cls(tag, tuple(files[path] for path in sorted(files)), meta)

    def to_bytes(self) -> bytes:
        """Returns the contents of the manifest's file."""
        files = [record.to_json() for record in self.files]
        return seal(
            {"format": _FORMAT, "tag": self.tag, "meta": self.meta, "files": files}
        )

    @classmethod
    def from_bytes(cls, path: str, data: bytes) -> Manifest:
        """Returns the manifest that `to_bytes` encoded; `path` is named in errors."""
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
                f"{path} is not a manifest that this version can read: {error}"
            ) from error


class ManifestFiles:
    """The manifests on disk: the current one, and an archived copy per kept commit.

    The current manifest is written first, and its rename is the commit. The archived
    copy follows; if the process is killed in between, the next commit writes that copy
    before it replaces the current manifest.
    """

    def __init__(self, root: Root, folder: str):
        self._root = root
        self._archive = f"{folder}/manifests"
        self.current = f"{folder}/manifest.json"
        # Contents and manifest by path, since each save reads all kept manifests.
        self._parsed: dict[str, tuple[bytes, Manifest]] = {}

    def archived(self, tag: str) -> str:
        """Returns the path of an archived manifest."""
        return f"{self._archive}/{tag}.json"

    def paths(self) -> list[str]:
        """Returns the paths of all existing manifests, the current one first."""
        paths = [
            path
            for path in list_files(self._root, self._archive)
            if (tag := find_tag(path)) and path == self.archived(tag)
        ]
        if os.path.lexists(os.path.join(self._root, self.current)):
            paths.insert(0, self.current)
        return paths

    def read(self) -> tuple[list[Manifest], dict[str, str]]:
        """Returns the whole manifests, newest first, and errors of others by path."""
        readable: dict[str, Manifest] = {}
        damaged: dict[str, str] = {}
        paths = self.paths()
        self._parsed = {x: self._parsed[x] for x in paths if x in self._parsed}
        for path in paths:
            try:
                manifest = self._parse(path)
                if path not in (self.current, self.archived(manifest.tag)):
                    raise CheckpointError(
                        f"{path} holds the manifest of another tag, {manifest.tag}."
                    )
                readable.setdefault(manifest.tag, manifest)
            except CheckpointError as error:
                # Another process may have pruned it since it was listed.
                if os.path.lexists(os.path.join(self._root, path)):
                    damaged[path] = str(error)
        return [readable[tag] for tag in sorted(readable, reverse=True)], damaged

    def _parse(self, path: str) -> Manifest:
        data = read_file(self._root, path)
        before = self._parsed.get(path)
        if before is None or before[0] != data:
            before = self._parsed[path] = (data, Manifest.from_bytes(path, data))
        return before[1]

    def write_current(self, manifest: Manifest) -> None:
        """Commits a checkpoint: its manifest replaces the current one."""
        write_file(self._root, self.current, manifest.to_bytes())

    def write_archived(self, manifest: Manifest) -> None:
        """Writes a manifest to the archive unless a whole copy is there."""
        path, data = self.archived(manifest.tag), manifest.to_bytes()
        if not locate(self._root, path).exists() or read_file(self._root, path) != data:
            write_file(self._root, path, data)


class CheckpointStore:
    """Writes the checkpoints below one root; `Checkpoint` reads them, too.

    A commit is the rename of `manifest.json`: if the process is killed before it, the
    previous checkpoint stays the newest; if it is killed after it, the new one is.

    Args:
      root: the logdir; manifests list files relative to it.
      folder: where manifests and parts lie, relative to the root.
      keep: number of checkpoints to keep.
    """

    def __init__(self, root: Root, folder: str = "ckpt", keep: int = 3):
        check_path(folder)
        if keep < 1:
            raise ValueError(f"Expected to keep at least 1 checkpoint, got {keep}.")
        self.root = Path(root).absolute()
        self.folder = folder
        self.keep = keep
        self._manifests = ManifestFiles(self.root, folder)
        self._lock = threading.RLock()  # Guards _last_tag, and admits one writer.
        self._last_tag: str | None = None

    def exists(self) -> bool:
        """Whether there has been a commit, even if it is damaged by now."""
        return bool(self._manifests.paths())

    def new_tag(self) -> str:
        """Returns a tag that sorts after all existing tags, committed or not."""
        with self._lock:
            used = [find_tag(path) for path in list_files(self.root, self.folder)]
            used += [self._last_tag, *(x.tag for x in self._manifests.read()[0])]
            previous = max((tag for tag in used if tag), default=None)
            self._last_tag = next_tag(previous, datetime.datetime.now(datetime.UTC))
            return self._last_tag

    def write_part(self, tag: str, name: str, tree: Tree) -> list[FileRecord]:
        """Writes one role's state under a tag, from any process.

        Args:
          tag: from the conductor's `new_tag`.
          name: name of the part, such as 'agent' or 'replay/00001'.
          tree: state of the role; see `save_tree`.

        Returns:
          The records to hand to `commit`.
        """
        stem = self._stem(tag, name)
        if locate(self.root, self._manifests.archived(tag)).exists():
            raise CheckpointError(
                f"Checkpoint {tag} is committed and must not change. Write the part "
                f"{name!r} under a new tag."
            )
        return save_tree(self.root, stem, tree)

    def commit(
        self,
        tag: str,
        records: Iterable[FileRecord],
        meta: dict[str, Any] | None = None,
    ) -> Manifest:
        """Makes the files of `records` the newest checkpoint, then prunes.

        Raises:
          CheckpointError: a required file is missing or of the wrong size, the tag is
            not newer than the last commit, or the manifest could not be written.
        """
        with self._lock:
            manifest = Manifest.of(tag, records, meta or {})
            readable, _ = self._manifests.read()
            if readable and tag <= readable[0].tag:
                raise CheckpointError(
                    f"Expected a tag newer than the last commit {readable[0].tag}, "
                    f"got {tag}. Use new_tag()."
                )
            self._check_files(manifest)
            if readable:
                # The last commit may have been killed between its two writes.
                self._manifests.write_archived(readable[0])
            self._manifests.write_current(manifest)
            try:
                self._manifests.write_archived(manifest)
                self.prune()
            except CheckpointError as error:
                # The checkpoint is committed; the next commit makes up for the rest.
                logger.warning("After the commit of %s: %s", tag, error)
            return manifest

    def last(self) -> Manifest | None:
        """Returns the newest readable manifest, even if its files are damaged."""
        readable, _ = self._manifests.read()
        return readable[0] if readable else None

    def describe_last(self) -> str:
        """Returns a sentence on the last checkpoint, for a message on a failed save."""
        try:
            last = self.last()
        except CheckpointError:
            last = None
        if last is None:
            return "There is no checkpoint yet: nothing of the run is saved."
        return f"The last checkpoint, {last.tag}, is untouched."

    def save(
        self, parts: Mapping[str, Tree], meta: dict[str, Any] | None = None
    ) -> str:
        """Writes and commits all parts of a run in one process; returns the tag."""
        with self._lock:
            tag = self.new_tag()
            try:
                records = []
                for name, tree in parts.items():
                    records += self.write_part(tag, name, tree)
                self.commit(tag, records, meta)
            except BaseException:
                self.discard(tag)
                raise
            return tag

    def may_be_committed(self, tag: str) -> bool:
        """Whether a tag is committed and kept, or may be if a manifest is damaged."""
        readable, damaged = self._manifests.read()
        unclear = {self._manifests.current, self._manifests.archived(tag)}
        return bool(unclear & damaged.keys()) or any(x.tag == tag for x in readable)

    def discard(self, tag: str) -> bool:
        """Removes the parts of a failed save; leaves a committed tag alone.

        Returns:
          Whether the tag is certainly not committed.
        """
        check_tag(tag)
        with self._lock:
            if self.may_be_committed(tag):
                return False
            for path in list_files(self.root, self.folder):
                if find_tag(path) == tag:
                    delete(self.root, path)
            return True

    def prune(self) -> None:
        """Removes checkpoints beyond the `keep` newest, and files that only they list.

        Checkpoints that lack a required file do not count; their files stay until
        there are `keep` newer whole ones. The files that a damaged manifest lists are
        unknown, so none is removed because of it.
        """
        with self._lock:
            readable, damaged = self._manifests.read()
            kept, whole = 0, 0
            while kept < len(readable) and whole < self.keep:
                whole += self._sizes_fit(readable[kept])
                kept += 1
            needed = {self._manifests.current}
            for manifest in readable[:kept]:
                needed.add(self._manifests.archived(manifest.tag))
                needed |= {record.path for record in manifest.files}
            # Files go first: after a kill in between, the manifest lists the others.
            for manifest in reversed(readable[kept:]):
                unneeded = {record.path for record in manifest.files} - needed
                gone = [delete(self.root, path) for path in sorted(unneeded)]
                if all(gone):
                    delete(self.root, self._manifests.archived(manifest.tag))
            if whole == self.keep:
                oldest = self._manifests.archived(readable[kept - 1].tag)
                for path in damaged.keys() - {self._manifests.current}:
                    if path < oldest:
                        delete(self.root, path)

    def _stem(self, tag: str, name: str) -> str:
        check_tag(tag)
        if not _NAME.fullmatch(name) or name.split("/")[0] == "manifests":
            raise CheckpointError(
                "Expected a part name of letters, digits, '_', '-', '.' and '/', other "
                f"than 'manifests', got {name!r:.100}."
            )
        return f"{self.folder}/{name}/{tag}"

    def _check_files(self, manifest: Manifest) -> None:
        for record in manifest.files:
            damage = find_damage(self.root, record, digest=False)
            if damage and record.required:
                raise CheckpointError(f"Cannot commit {manifest.tag}: {damage}")
            if damage:
                logger.warning("Committing %s although %s", manifest.tag, damage)

    def _sizes_fit(self, manifest: Manifest) -> bool:
        return not any(
            record.required and find_damage(self.root, record, digest=False)
            for record in manifest.files
        )


class PartWriter:
    """Writes parts of checkpoints, and discards replay files of failed saves.

    Args:
      checkpoint: checkpoints that the parts belong to.
      suffix: appended to the names of parts.
    """

    def __init__(self, checkpoint: CheckpointStore, suffix: str = ""):
        self._checkpoint = checkpoint
        self._suffix = suffix
        self._tag = ""
        self._saved: list[Cut] = []  # Written under that tag.
        self._warned = False  # Whether the disk's room for `keep` has been checked.

    def write(self, tag: str, states: Mapping[str, Tree | Cut]) -> list[FileRecord]:
        """Writes parts under a tag; returns the records to commit.

        Args:
          tag: from `Checkpoint.new_tag`.
          states: state of each part, or a cut, by name. Cuts are closed.

        Raises:
          CheckpointError: a part could not be written; the files of replays have been
            removed.
        """
        self._tag, self._saved = tag, []
        records: list[FileRecord] = []
        parts: list[FileRecord] = []
        try:
            with contextlib.ExitStack() as stack:
                for state in states.values():
                    if isinstance(state, Cut):
                        stack.callback(state.close)
                for name, state in states.items():
                    if isinstance(state, Cut):
                        # Closed early, so that waiting inserts go on.
                        cut = state
                        with contextlib.closing(cut):
                            state = cut.write()
                        self._saved.append(cut)
                        records += cut.records(self._checkpoint.root)
                    name += self._suffix
                    parts += self._checkpoint.write_part(tag, name, state)
        except BaseException:
            self.discard(tag)
            raise
        self._warn_of_room(parts)
        return records + parts

    def _warn_of_room(self, parts: list[FileRecord]) -> None:
        """Warns at the first save if the disk cannot hold `keep` checkpoints."""
        if self._warned:
            return
        self._warned = True
        with contextlib.suppress(CheckpointError, OSError):  # Must not fail the save.
            nbytes = sum(record.size for record in parts)
            store = self._checkpoint
            if text := find_room_problem(store.root, store.folder, nbytes, store.keep):
                logger.warning(text)

    def discard_uncommitted(self) -> None:
        """Removes the replay files of the last save unless it was committed.

        Call it before the state of the next save is taken: the conductor of the last
        save may have died before it could report that the save failed.
        """
        if self._saved and not self._checkpoint.may_be_committed(self._tag):
            self.discard(self._tag)

    def discard(self, tag: str) -> None:
        """Removes the replay files of the last `write`, if that was under this tag.

        The files of parts are removed by `Checkpoint.discard`.
        """
        if tag == self._tag:
            for saved in self._saved:
                saved.discard()
            self._saved = []
