"""One consistent checkpoint over several roles. Conducted by the learner.

The learner asks replay and logger to save under one tag, saves the agent, and commits
all of it with one manifest. Each role restores its own parts when it starts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embodied.base import Agent, Tree
from embodied.checkpoint import Checkpoint, CheckpointError, FileRecord
from embodied.run.parallel.replicas import Replicas
from embodied.run.saving import AGENT, FOLDER, load_agent

SAVE_SECONDS = 900.0  # For a role to write its part.
DISCARD_SECONDS = 10.0
_COUNT_BYTES = 8
NOT_SAVED = "A checkpoint could not be saved, training goes on. %s"
NO_TAG = "-"  # In place of a tag, if there can be no save.

logger = logging.getLogger("embodied.run")


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

    def write(self, tag: str, parts: Mapping[str, Tree]) -> list[FileRecord]:
        """Writes parts under the conductor's tag."""
        return [
            record
            for name, tree in parts.items()
            for record in self._checkpoint.write_part(tag, name + self._suffix, tree)
        ]


class Conductor:
    """Restores the agent, and saves all roles at one moment.

    A save decides at once what belongs to it; files are written in the background.
    Belongs to the learner's thread.

    Args:
      agent: to save.
      replay: client of the replay role.
      logger: client of the logger role.
      args: `logdir`, `keep`, and where to start from.
      replicas: the hosts of the run. All save at the same time, under the tag of the
        first one, which commits.
    """

    def __init__(
        self,
        agent: Agent,
        replay: Any,
        logger: Any,
        args: Any,
        replicas: Replicas | None = None,
    ):
        self._agent = agent
        self._replicas = replicas or Replicas()
        self._saves = 0
        self._roles = {"replay": replay, "logger": logger}
        self._args = args
        self._checkpoint = Checkpoint(Path(args.logdir), FOLDER, keep=args.keep)
        self._starts = Starts(Path(args.logdir, FOLDER))
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "save")
        self._running: concurrent.futures.Future[bool] | None = None

    def restore(self) -> bool:
        """Continues the run of the logdir; returns whether there is one.

        A new run takes the agent from `args.from_checkpoint`, if given.
        """
        if self._replicas.first:
            self._checkpoint.clean()
        self._replicas.gather("clean", "")
        args = self._args
        manifest = self._checkpoint.newest()
        found = self._replicas.gather("found", manifest.tag if manifest else "none")
        if len(set(found)) > 1:
            raise CheckpointError(
                f"The replicas found different checkpoints in {args.logdir}: {found}. "
                "They need one logdir, in a file system that all of them share."
            )
        if args.from_checkpoint:
            load_agent(self._agent, args.from_checkpoint, args.from_checkpoint_regex)
        if manifest is None:
            return False
        self._agent.load(self._checkpoint.read_part(manifest, AGENT))
        step = manifest.meta.get("step", 0)
        logger.info("Continuing at step %s, from checkpoint %s.", step, manifest.tag)
        return True

    def save(self, trained: int) -> None:
        """Starts a save of this moment, after the one before it is written.

        Args:
          trained: batches that the learner has trained on since it started.
        """
        self.wait()
        self._saves += 1
        tag, starts = self._replicas.gather(f"tag {self._saves}", self._new_tag())[
            0
        ].split()
        if tag == NO_TAG:
            self._running = concurrent.futures.Future()
            self._running.set_result(False)
            return
        parts = [
            self._roles["replay"].save(tag, trained),
            self._roles["logger"].save(tag),
        ]
        data = self._agent.save()
        name = f"save {self._saves}"
        self._running = self._thread.submit(
            self._write, name, tag, data, parts, int(starts)
        )

    @property
    def busy(self) -> bool:
        """Whether the last save is still being written."""
        return self._running is not None and not self._running.done()

    def wait(self) -> bool:
        """Waits until the last save is written; returns whether it succeeded."""
        if self._running is None:
            return True
        return self._running.result()

    def close(self) -> None:
        """Ends the background thread, which completes a save that is under way."""
        self._thread.shutdown()

    def _new_tag(self) -> str:
        """Returns a tag and the number of starts until now, where this one commits."""
        if self._replicas.first:
            try:
                with self._starts.locked() as starts:
                    return f"{self._checkpoint.new_tag()} {starts}"
            except (CheckpointError, OSError) as error:
                logger.warning("Could not save. %s", error)
        return f"{NO_TAG} 0"

    def _write(
        self, name: str, tag: str, data: Tree, parts: list[Any], starts: int
    ) -> bool:
        """Writes this replica's parts, and commits if this is the first one."""
        own = ""  # Stays so if anything fails.
        try:
            own = self._write_parts(tag, data, parts)
        except Exception as error:  # Nothing that is there already is lost by it.
            logger.warning(NOT_SAVED, error)
        saved = ""
        every = self._replicas.gather(name, own)
        if self._replicas.first and all(every):
            try:
                self._commit(tag, every, starts)
                saved = tag
            except Exception as error:
                logger.warning(NOT_SAVED, error)
        if self._replicas.gather(f"{name} done", saved)[0]:
            return True
        if not self._replicas.alone:
            logger.warning(NOT_SAVED, "Another replica may say why.")
        self._take_back(tag)
        return False

    def _write_parts(self, tag: str, data: Tree, parts: list[Any]) -> str:
        records: list[FileRecord] = []
        if self._replicas.first:  # All replicas have the same.
            records += self._checkpoint.write_part(tag, AGENT, data)
        meta: dict[str, Any] = {}
        for future in parts:
            files, facts = unpack_reply(future.result(SAVE_SECONDS))
            records += files
            meta |= facts
        return pack_reply(records, meta)

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

    def _take_back(self, tag: str) -> None:
        """Removes the files of a save that failed, for the next to have room."""
        try:
            if self._replicas.first:
                self._checkpoint.discard(tag)
            for client in self._roles.values():
                client.discard(tag).result(DISCARD_SECONDS)
        except Exception as error:
            logger.warning("Files of that save may be left. %s", error)
