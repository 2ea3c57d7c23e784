"""Saves one consistent checkpoint of all roles. Agent process and the roles' own.

    learner   Conductor.save           asks replay and logger to save under one tag,
    roles     RoleCheckpoint.write     each writes its parts and returns records,
    learner   Conductor._commit        lists all of them in one manifest.

Only a background thread of the agent process waits meanwhile. Every role restores its
own parts when it starts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embodied.base import Agent, Tree
from embodied.checkpoint import (
    Checkpoint,
    CheckpointError,
    Cut,
    DiskTooSmallError,
    FileRecord,
    Manifest,
    PartWriter,
)
from embodied.checkpoint.files import locate
from embodied.rpc import Disconnected
from embodied.run.live import SAVE
from embodied.run.parallel.replicas import Replicas
from embodied.run.saving import (
    AGENT,
    FOLDER,
    check_replicas,
    explain_mismatch,
    load_agent,
)
from embodied.run.settings import RunSettings
from embodied.run.training_run import LIMITER

SAVE_SECONDS = 900.0  # For a role to write its part.
DISCARD_SECONDS = 10.0
ANSWER_SECONDS = 60.0  # For the replay to take back updates.
NO_TAG = "-"  # In place of a tag if saving is not possible.
# Outcomes of a save, which the first replica tells to all.
SAVED, NOT_COMMITTED, UNCLEAR = "saved", "not committed", "unclear"
NOT_SAVED = "A checkpoint could not be saved, training goes on. %s %s"
FILES_LEFT = "Some files of the failed save could not be removed. %s"
_COUNT_BYTES = 8

logger = logging.getLogger("embodied.run")


class Conductor:
    """Restores the agent, and saves all roles at one moment. Agent process.

    A save decides at once what belongs to it; files are written in the background, by
    a thread of its own. All methods belong to the learner's thread, except `abandon`
    and `awaited`.

    Args:
      agent: to save.
      replay: client of the replay role.
      logger: client of the logger role.
      settings: `logdir`, `keep`, and where to start from.
      replicas: the hosts of the run. All save at the same time, under the tag of the
        first one, which commits.
    """

    def __init__(
        self,
        agent: Agent,
        replay: Any,
        logger: Any,
        settings: RunSettings,
        replicas: Replicas | None = None,
    ):
        self._agent = agent
        self._replicas = None if replicas is None or replicas.alone else replicas
        self._first = self._replicas is None or self._replicas.first
        self._saves = 0
        self._roles = {"replay": replay, "logger": logger}
        self._settings = settings
        root = Path(settings.logdir)
        self._checkpoint = Checkpoint(root, FOLDER, keep=settings.keep)
        self._writer = PartWriter(self._checkpoint)
        self._starts = StartCounter(root / FOLDER)
        # Of the last save: whether it succeeded.
        self._running: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._running.set_result(True)
        self._parts: dict[str, Any] = {}  # Futures of the roles for the last save.
        self._abandoned = threading.Event()

    def restore(self) -> int | None:
        """Continues the run in the logdir; returns its step, None if there is none.

        A new run takes the agent from `settings.from_checkpoint`, if given.
        """
        if self._first:
            self._checkpoint.clean()
        self._gather("clean", "")
        settings = self._settings
        manifest = self._checkpoint.newest(shared=True)
        found = self._gather("found", manifest.tag if manifest else "none")
        if len(set(found)) > 1:
            raise CheckpointError(
                f"The replicas found different checkpoints in {settings.logdir}: "
                f"{found}. They need one logdir, in a file system that all share."
            )
        if manifest is None:
            if settings.from_checkpoint:
                load_agent(
                    self._agent,
                    settings.from_checkpoint,
                    settings.from_checkpoint_regex,
                )
            return None
        data = self._checkpoint.read_part(manifest, AGENT)
        with explain_mismatch(settings.logdir):
            self._agent.load(data)
        self._take_back_updates(manifest)
        step = int(manifest.meta.get("step", 0))
        logger.info("Continuing at step %s, from checkpoint %s.", step, manifest.tag)
        return step

    def save(self, trained: int) -> None:
        """Starts a save of the current state, once the previous one is written.

        Args:
          trained: batches that the learner has trained on since it started.

        Raises:
          Exception: the agent cannot be saved, or `wait` raised it for the previous
            save. Failures of other roles are logged as warnings: the last checkpoint
            stands, and training goes on.
        """
        self.wait()
        self._saves += 1
        running = self._running = concurrent.futures.Future()
        try:
            # Checked after `_running` is set, so that `abandon` finds and completes it.
            tag, starts = (NO_TAG, 0) if self._abandoned.is_set() else self._agree()
            if tag == NO_TAG:
                _complete(running, False)
                return
            self._parts = {
                "replay": _call(self._roles["replay"].save, tag, trained),
                "logger": _call(self._roles["logger"].save, tag),
            }
            data = self._agent.save()
        except BaseException:
            _complete(running, False)
            raise
        name = f"save {self._saves}"
        threading.Thread(
            target=self._run,
            args=(running, name, tag, data, list(self._parts.values()), starts),
            name=name,
            daemon=True,  # A save that waits for a dead role must not block the exit.
        ).start()

    @property
    def busy(self) -> bool:
        """Whether the last save is still being written."""
        return not self._running.done()

    @property
    def awaited(self) -> str:
        """The roles yet to answer the last save; without any, the agent. Any thread."""
        missing = [name for name, future in self._parts.items() if not future.done()]
        return " and ".join(f"the {name}" for name in missing or [AGENT])

    def wait(self) -> bool:
        """Waits until the last save is written; returns whether it succeeded."""
        return self._running.result()

    def abandon(self) -> None:
        """Stops all waits for saves because the roles are gone. Any thread.

        The thread of a save in progress ends when the connections close.
        """
        self._abandoned.set()
        _complete(self._running, False)

    def close(self) -> None:
        """Waits for a save in progress."""
        concurrent.futures.wait([self._running])

    def _take_back_updates(self, manifest: Manifest) -> None:
        """Tells the replay which updates the restored weights contain."""
        name = LIMITER + part_suffix(self._settings)
        if name not in self._checkpoint.parts(manifest):
            return
        saved = json.dumps(self._checkpoint.read_part(manifest, name))
        try:
            self._roles["replay"].begin_training(saved).result(ANSWER_SECONDS)
        except Disconnected:
            pass  # It was restarted meanwhile, and has the counts of that checkpoint.
        except Exception as error:
            logger.warning("The replay could not discount lost updates. %s", error)

    def _agree(self) -> tuple[str, int]:
        """Returns the tag, the same in all replicas, and the count of starts."""
        own = f"{NO_TAG} 0"
        if self._first:
            try:
                with self._starts.locked() as starts:
                    own = f"{self._checkpoint.new_tag()} {starts}"
            except (CheckpointError, OSError) as error:
                logger.warning("Could not save. %s", error)
        tag, count = self._gather(f"tag {self._saves}", own)[0].split()
        return tag, int(count)

    def _gather(self, name: str, value: str) -> list[str]:
        """Returns the values of all replicas under a unique name."""
        return [value] if self._replicas is None else self._replicas.gather(name, value)

    def _run(self, running: concurrent.futures.Future[bool], *arguments: Any) -> None:
        try:
            _complete(running, self._write(*arguments))
        except Exception as error:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                running.set_exception(error)

    def _write(
        self, name: str, tag: str, data: Tree, parts: list[Any], starts: int
    ) -> bool:
        """Writes this replica's parts, and commits if this is the first one."""
        own = ""  # Stays empty if anything fails.
        try:
            own = self._write_parts(tag, data, parts)
        except Exception as error:  # Earlier checkpoints are not affected.
            if self._abandoned.is_set():
                return False
            if isinstance(error, DiskTooSmallError) and self._replicas is None:
                self._conclude(tag, [own], starts)
                self._take_back(tag)
                raise  # No save could ever succeed; the first one detects it.
            self._warn(error)
        every = self._gather(name, own)
        outcome = self._conclude(tag, every, starts) if self._first else ""
        outcome = self._gather(f"{name} done", outcome)[0]
        if outcome == SAVED:
            return True
        if self._replicas is not None:
            self._warn("Another replica may say why.")
        if outcome == NOT_COMMITTED:
            self._take_back(tag)
        return False

    def _write_parts(self, tag: str, data: Tree, parts: list[Any]) -> str:
        records: list[FileRecord] = []
        if self._first:  # The agent is the same in all replicas.
            records += self._writer.write(tag, {AGENT: data})
        meta: dict[str, Any] = {}
        for future in parts:
            files, facts = unpack_reply(future.result(SAVE_SECONDS))
            records += files
            meta |= facts
        return pack_reply(records, meta)

    def _conclude(self, tag: str, every: list[str], starts: int) -> str:
        """Commits, or removes the parts' files; returns the outcome."""
        try:
            if all(every):
                self._commit(tag, every, starts)
                return SAVED
        except Exception as error:
            self._warn(error)
        try:
            # This leaves the save alone if it was committed although `_commit` raised.
            return NOT_COMMITTED if self._checkpoint.discard(tag) else UNCLEAR
        except Exception as error:
            logger.warning(FILES_LEFT, error)
            return UNCLEAR

    def _commit(self, tag: str, every: list[str], starts: int) -> None:
        records: list[FileRecord] = []
        step = 0
        for text in every:
            files, facts = unpack_reply(text)
            records += files
            step += facts.get("step", 0)
        with self._starts.locked() as now:
            if now != starts:
                raise CheckpointError("A role was restarted meanwhile.")
            self._checkpoint.commit(tag, records, {"step": step})
        event = {"kind": SAVE, "step": step, "tag": tag}
        logger.info("Saved step %d.", step, extra={"event": event})

    def _warn(self, reason: object) -> None:
        logger.warning(NOT_SAVED, reason, self._checkpoint.describe_last())

    def _take_back(self, tag: str) -> None:
        """Removes the roles' files of a failed save, to make room for the next one."""
        try:
            for client in self._roles.values():
                client.discard(tag).result(DISCARD_SECONDS)
        except Exception as error:
            logger.warning(FILES_LEFT, error)


class RoleCheckpoint:
    """Saves and loads the parts of a role other than the agent. The role's process.

    With several replicas each has parts of its own, whose names end with the replica's
    number.

    Args:
      settings: `logdir`, `keep`, `replica` and `replicas`.
    """

    def __init__(self, settings: RunSettings):
        self.root = Path(settings.logdir)
        self._suffix = part_suffix(settings)
        self._replicas = settings.replicas
        self._checkpoint = Checkpoint(self.root, FOLDER, keep=settings.keep)
        self._writer = PartWriter(self._checkpoint, self._suffix)
        self._starts = StartCounter(self.root / FOLDER)

    def load(self, names: Iterable[str]) -> dict[str, Tree]:
        """Returns the parts of the newest checkpoint; those it lacks are left out.

        From here on, saves that began before this start of the role are not committed.
        Removes files that the role was writing when it was killed.

        Raises:
          CheckpointError: no checkpoint is whole, or another number of replicas has
            saved it.
        """
        self._starts.add()
        names = list(names)
        for name in names:  # A replay has files in a folder of its name, too.
            for folder in (f"{FOLDER}/{name}", name):
                self._checkpoint.remove_temporary(folder + self._suffix)
        manifest = self._checkpoint.newest(shared=True)
        if manifest is None:
            return {}
        found = set(self._checkpoint.parts(manifest))
        for name in names:
            check_replicas(found, name, self._replicas)
        return {
            name: self._checkpoint.read_part(manifest, name + self._suffix)
            for name in names
            if name + self._suffix in found
        }

    @property
    def is_new(self) -> bool:
        """Whether the run has no checkpoint yet."""
        return not self._checkpoint.exists()

    def folder(self, name: str) -> Path:
        """Returns the folder of a replay.

        Raises:
          CheckpointError: it is a symbolic link, whose files could not be removed.
        """
        return locate(self.root, name + self._suffix)

    def listed(self) -> set[str] | None:
        """Returns the paths of all files that a checkpoint lists; None if not known.

        Call it between `load` and the first save. In between nothing is committed: a
        save that began before `load` is refused, and a later one needs this role.
        """
        return self._checkpoint.listed()

    def begin(self) -> None:
        """Prepares a save, before its state is captured."""
        self._writer.discard_uncommitted()

    def write(
        self, tag: str, states: Mapping[str, Tree | Cut], meta: Mapping[str, Any]
    ) -> str:
        """Writes parts under the conductor's tag; returns the reply to it.

        Args:
          tag: from the conductor.
          states: by name, see `PartWriter.write`.
          meta: facts for the manifest.
        """
        return pack_reply(self._writer.write(tag, states), meta)

    def discard(self, tag: str) -> None:
        """Removes the files of a save that was not committed."""
        self._writer.discard(tag)


class StartCounter:
    """Counts how often roles were started, in a file. Any role.

    A restarted role continues from the newest checkpoint. If a save that it took part
    in before its restart were committed later, the role would lack the data of that
    save. So a role counts its start before it looks for the newest checkpoint, and a
    save is committed, with the file locked, only if no role has started since the save
    began. The kernel unlocks the file of a process that dies, and no process waits for
    another role while it holds the lock.

    Args:
      folder: of the checkpoints.
    """

    def __init__(self, folder: Path):
        self._path = folder / "starts"

    def add(self) -> None:
        """Counts one more start."""
        with self._open() as (fd, count):
            # Written in place, which also works on a full disk.
            os.pwrite(fd, (count + 1).to_bytes(_COUNT_BYTES, "little"), 0)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Yields the count, which does not change within the block."""
        with self._open() as (_, count):
            yield count

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[int, int]]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(fd, self._path)
            yield fd, int.from_bytes(os.pread(fd, _COUNT_BYTES, 0), "little")
        finally:
            os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise CheckpointError(
            f"Roles lock {path} to agree on checkpoints, but the file system has no "
            f"locks ({error.strerror}). Choose a logdir in another one, or mount this "
            "one with locks (for Lustre: -o flock)."
        ) from error


def part_suffix(settings: RunSettings) -> str:
    """Returns the suffix of the names of parts that every replica has."""
    return f"/{settings.replica:05}" if settings.replicas > 1 else ""


def pack_reply(records: Iterable[FileRecord], meta: Mapping[str, Any]) -> str:
    """Returns a role's reply to `save` as JSON, which any transport can carry."""
    return json.dumps([[record.to_json() for record in records], dict(meta)])


def unpack_reply(text: Any) -> tuple[list[FileRecord], dict[str, Any]]:
    """Returns what `pack_reply` was given."""
    records, meta = json.loads(str(text))
    return [FileRecord.from_json(record) for record in records], meta


def _call(method: Any, *arguments: Any) -> Any:
    """Returns the future of a call; a failed one if the call cannot be sent."""
    try:
        return method(*arguments)
    except Exception as error:
        failed: concurrent.futures.Future[str] = concurrent.futures.Future()
        failed.set_exception(error)
        return failed


def _complete(running: concurrent.futures.Future[bool], saved: bool) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        running.set_result(saved)
