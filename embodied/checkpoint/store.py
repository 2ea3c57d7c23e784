"""The checkpoints of a run: commits, fallbacks and pruning. Any process.

One process, the conductor, commits; others may write parts for it. Within a process
a lock lets one thread at a time commit, prune, clean, or save. Writing a part takes no
lock: it touches only files that carry its own name and tag.
"""

from __future__ import annotations

import datetime
import functools
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from embodied.base import Tree
from embodied.checkpoint.files import (
    CheckpointError,
    FileRecord,
    Root,
    SharedVerification,
    check_path,
    delete,
    disk_usage,
    find_damage,
    is_temporary,
    list_files,
    locate,
)
from embodied.checkpoint.manifest import (
    Manifest,
    ManifestFiles,
    check_tag,
    find_tag,
    next_tag,
)
from embodied.checkpoint.treefiles import load_tree, save_tree

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")

# How often to look for a checkpoint while a run commits and prunes what was found.
_LOOKS = 10
_Found = TypeVar("_Found")

logger = logging.getLogger("embodied.checkpoint")


class Checkpoint:
    """Reads and writes the checkpoints below one root.

    A commit is the rename of `manifest.json`: whoever is killed before it leaves the
    previous checkpoint the newest, whoever is killed after it the new one.

    Args:
      root: the logdir; manifests list files relative to it.
      folder: where manifests and parts lie, relative to the root.
      keep: number of checkpoints to keep.
      min_free_bytes: room that each part of a save has to leave on the disk; None for
        a share of what it needs.
    """

    def __init__(
        self,
        root: Root,
        folder: str = "ckpt",
        keep: int = 3,
        min_free_bytes: int | None = None,
    ):
        check_path(folder)
        if keep < 1:
            raise ValueError(f"Expected to keep at least 1 checkpoint, got {keep}.")
        if min_free_bytes is not None and min_free_bytes < 0:
            raise ValueError(f"Expected min_free_bytes >= 0, got {min_free_bytes}.")
        self._root = Path(root).absolute()
        self._folder = folder
        self._keep = keep
        self._min_free_bytes = min_free_bytes
        self._manifests = ManifestFiles(self._root, folder)
        self._lock = threading.RLock()  # Guards _last_tag, and one writer at a time.
        self._last_tag: str | None = None

    def exists(self) -> bool:
        """Whether there has been a commit, be it damaged by now or not."""
        return bool(self._manifests.paths())

    def new_tag(self) -> str:
        """Returns a tag that sorts behind all that exist, committed or not."""
        with self._lock:
            used = [find_tag(path) for path in list_files(self._root, self._folder)]
            used += [self._last_tag, *(x.tag for x in self._manifests.read()[0])]
            previous = max((tag for tag in used if tag), default=None)
            self._last_tag = next_tag(previous, datetime.datetime.now(datetime.UTC))
            return self._last_tag

    def write_part(self, tag: str, name: str, tree: Tree) -> list[FileRecord]:
        """Writes one role's state under a tag, from any process.

        Args:
          tag: from the conductor's `new_tag`.
          name: of the role, such as 'agent' or 'replay/00001'.
          tree: see `save_tree`.

        Returns:
          The records to hand to `commit`.
        """
        stem = self._stem(tag, name)
        if locate(self._root, self._manifests.archived(tag)).exists():
            raise CheckpointError(
                f"Checkpoint {tag} is committed and must not change. Write the part "
                f"{name!r} under a new tag."
            )
        return save_tree(self._root, stem, tree, min_free_bytes=self._min_free_bytes)

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
            manifest = Manifest.of(tag, records, meta)
            readable, _ = self._manifests.read()
            if readable and tag <= readable[0].tag:
                raise CheckpointError(
                    f"Expected a tag newer than the last commit {readable[0].tag}, "
                    f"got {tag}. Use new_tag()."
                )
            self._check_files(manifest)
            if readable:
                # A kill may have come between the two writes of the last commit.
                self._manifests.write_archived(readable[0])
            self._manifests.write_current(manifest)
            try:
                self._manifests.write_archived(manifest)
                self.prune()
            except CheckpointError as error:
                # It is committed; the next commit makes up for what is missing.
                logger.warning("After the commit of %s: %s", tag, error)
            return manifest

    def newest(self, shared: bool = False) -> Manifest | None:
        """Returns the newest manifest whose required files are all whole.

        Every byte of them is read and compared with its digest. Damaged checkpoints
        are skipped with a warning.

        Args:
          shared: whether other processes ask at the same time, as roles do that start
            together. One of them reads the files then, and all get the same answer.

        Returns:
          The manifest, or None where there has never been a commit.

        Raises:
          CheckpointError: there are commits, but all are damaged. Starting from zero
            would lose what can perhaps still be rescued, so a person has to decide.
        """
        if not shared or not self.exists():
            return self._look(self._find_newest)

        def find() -> Manifest | None:
            with SharedVerification(self._root, f"{self._folder}/verified") as files:
                return self._find_newest(files.find_damage)

        return self._look(find)

    def listed(self) -> set[str] | None:
        """Returns what to keep of files that lie elsewhere below the root.

        Returns:
          All paths that a manifest lists, relative to the root; None where a manifest
          is damaged, since what that one lists is not known.
        """
        readable, damaged = self._manifests.read()
        if damaged:
            return None
        return {record.path for manifest in readable for record in manifest.files}

    def last(self) -> Manifest | None:
        """Returns the manifest of the last commit, whatever has become of its files."""
        readable, _ = self._manifests.read()
        return readable[0] if readable else None

    def what_stands(self) -> str:
        """Returns a sentence on what there is after a save that failed."""
        try:
            last = self.last()
        except CheckpointError:
            last = None
        if last is None:
            return "There is no checkpoint yet: nothing of the run is saved."
        return f"The last checkpoint, {last.tag}, is untouched."

    def find_room_problem(self, nbytes: int) -> str:
        """Returns why the disk has no room to keep checkpoints; empty if it has.

        Args:
          nbytes: that one of them takes. While it is written, those that are kept are
            still there.
        """
        usage = disk_usage(self._root)
        held = sum(
            locate(self._root, path).stat().st_size
            for path in list_files(self._root, self._folder)
        )
        room = (usage.free + held) // max(1, nbytes)
        if room > self._keep:
            return ""
        return (
            f"The disk that holds {self._root} has room for {room} checkpoints of "
            f"{nbytes / 1e6:.1f} MB, but run.keep {self._keep} needs "
            f"{self._keep + 1} of them at times: later saves will fail. Set a smaller "
            "--run.keep, or choose another --logdir."
        )

    def parts(self, manifest: Manifest) -> list[str]:
        """Returns the names of the parts that a checkpoint has."""
        start, end = f"{self._folder}/", f"/{manifest.tag}.json"
        return [
            record.path[len(start) : -len(end)]
            for record in manifest.files
            if record.path.startswith(start) and record.path.endswith(end)
        ]

    def read_part(self, manifest: Manifest, name: str) -> Tree:
        """Returns the tree that `write_part` was given; verifies it once more.

        Whoever reads a run that goes on takes `read_newest`: by now, the run may have
        committed others and pruned this one.
        """
        names = self.parts(manifest)
        if name not in names:
            raise CheckpointError(
                f"Checkpoint {manifest.tag} has no part {name!r}, only {names}."
            )
        return load_tree(self._root, self._stem(manifest.tag, name), manifest.files)

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

    def load(self) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """Returns all parts and the meta of the newest whole checkpoint, if any."""
        found = self.read_newest()
        return None if found is None else (found[1], found[0].meta)

    def read_newest(
        self, names: Iterable[str] | None = None
    ) -> tuple[Manifest, dict[str, Tree]] | None:
        """Returns the newest whole checkpoint, if any, with parts of it.

        A run may commit meanwhile.

        Args:
          names: of the parts; by default all.
        """

        def read() -> tuple[Manifest, dict[str, Tree]] | None:
            manifest = self._find_newest()
            if manifest is None:
                return None
            chosen = self.parts(manifest) if names is None else names
            return manifest, {name: self.read_part(manifest, name) for name in chosen}

        return self._look(read)

    def may_be_committed(self, tag: str) -> bool:
        """Tells whether a tag is, or may be, that of a checkpoint that is kept."""
        readable, damaged = self._manifests.read()
        unclear = {self._manifests.current, self._manifests.archived(tag)}
        return bool(unclear & damaged.keys()) or any(x.tag == tag for x in readable)

    def discard(self, tag: str) -> bool:
        """Removes the parts of a save that failed; a committed tag is left alone.

        Returns:
          Whether it is sure that the tag was not committed.
        """
        check_tag(tag)
        with self._lock:
            if self.may_be_committed(tag):
                return False
            for path in list_files(self._root, self._folder):
                if find_tag(path) == tag:
                    delete(self._root, path)
            return True

    def prune(self) -> None:
        """Removes all but the newest checkpoints, and the files only those list.

        Checkpoints that lack a file do not count as kept; their files stay until
        there are enough newer ones. What a damaged manifest listed is not known, so
        it causes no deletion.
        """
        with self._lock:
            readable, damaged = self._manifests.read()
            kept, whole = 0, 0
            while kept < len(readable) and whole < self._keep:
                whole += self._sizes_fit(readable[kept])
                kept += 1
            needed = {self._manifests.current}
            for manifest in readable[:kept]:
                needed.add(self._manifests.archived(manifest.tag))
                needed |= {record.path for record in manifest.files}
            # Files go first: a kill in between then leaves a manifest to go on with.
            for manifest in reversed(readable[kept:]):
                unneeded = {record.path for record in manifest.files} - needed
                gone = [delete(self._root, path) for path in sorted(unneeded)]
                if all(gone):
                    delete(self._root, self._manifests.archived(manifest.tag))
            if whole == self._keep:
                oldest = self._manifests.archived(readable[kept - 1].tag)
                for path in damaged.keys() - {self._manifests.current}:
                    if path < oldest:
                        delete(self._root, path)

    def clean(self) -> None:
        """Removes what a killed save or prune has left. Call it at start-up.

        These are temporary files anywhere below the root, and files in the folder
        whose name begins with a tag but that no kept manifest lists. No save may be
        under way, in this process or another. If all manifests are damaged, only
        temporary files are removed.
        """
        with self._lock:
            self.remove_temporary("")
            self.prune()
            readable, damaged = self._manifests.read()
            if damaged and not readable:
                return
            needed = set(self._manifests.paths())
            for manifest in readable:
                needed |= {record.path for record in manifest.files}
            for path in list_files(self._root, self._folder):
                if find_tag(path) and path not in needed:
                    delete(self._root, path)

    def remove_temporary(self, folder: str) -> None:
        """Removes files below a folder whose writer was killed. None may be at work."""
        for path in list_files(self._root, folder):
            if is_temporary(path):
                delete(self._root, path)

    def _look(self, read: Callable[[], _Found]) -> _Found:
        """Reads again if that failed while another process committed.

        A commit prunes checkpoints, so that files of those that were listed before may
        be gone, although none is damaged.
        """
        for _ in range(_LOOKS - 1):
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
        find = find or functools.partial(find_damage, self._root)
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
                f"No checkpoint in {self._root / self._folder} is whole: {problems} "
                "Restore these files from a copy, or move the folder away to start "
                "from the beginning."
            )
        return None

    def _stem(self, tag: str, name: str) -> str:
        check_tag(tag)
        if not _NAME.fullmatch(name) or name.split("/")[0] == "manifests":
            raise CheckpointError(
                "Expected a part name of letters, digits, '_', '-', '.' and '/', other "
                f"than 'manifests', got {name!r:.100}."
            )
        return f"{self._folder}/{name}/{tag}"

    def _check_files(self, manifest: Manifest) -> None:
        for record in manifest.files:
            damage = find_damage(self._root, record, digest=False)
            if damage and record.required:
                raise CheckpointError(f"Cannot commit {manifest.tag}: {damage}")
            if damage:
                logger.warning("Committing %s although %s", manifest.tag, damage)

    def _sizes_fit(self, manifest: Manifest) -> bool:
        return not any(
            record.required and find_damage(self._root, record, digest=False)
            for record in manifest.files
        )
