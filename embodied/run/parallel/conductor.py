"""One consistent checkpoint over several roles. Agent process.

The learner asks replay and logger to save under one tag, saves the agent, and commits
all of it with one manifest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

from embodied.base import Agent, Tree
from embodied.checkpoint import Checkpoint, CheckpointError, FileRecord
from embodied.run.parallel.replicas import Replicas
from embodied.run.parallel.saving import Starts, pack_reply, unpack_reply
from embodied.run.saving import AGENT, FOLDER, load_agent, must_continue

SAVE_SECONDS = 900.0  # For a role to write its part.
DISCARD_SECONDS = 10.0
NO_TAG = "-"  # In place of a tag, if there can be no save.
# How a save ended, told by the first replica to all.
SAVED, NOT_COMMITTED, UNCLEAR = "saved", "not committed", "unclear"
NOT_SAVED = "A checkpoint could not be saved, training goes on. %s"
FILES_LEFT = "Files of that save may be left. %s"

logger = logging.getLogger("embodied.run")


class Conductor:
    """Restores the agent, and saves all roles at one moment.

    A save decides at once what belongs to it; files are written in the background, by
    a thread of its own. Belongs to the learner's thread, except `abandon`.

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
        self._running: concurrent.futures.Future[bool] | None = None
        self._abandoned = threading.Event()

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
        data = self._checkpoint.read_part(manifest, AGENT)
        with must_continue(args.logdir):
            self._agent.load(data)
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
        self._running = concurrent.futures.Future()
        if self._abandoned.is_set():  # Looked at after `_running` is there to be ended.
            _complete(self._running, False)
            return
        tag, starts = self._replicas.gather(f"tag {self._saves}", self._new_tag())[
            0
        ].split()
        if tag == NO_TAG:
            _complete(self._running, False)
            return
        parts = [
            self._roles["replay"].save(tag, trained),
            self._roles["logger"].save(tag),
        ]
        data = self._agent.save()
        name = f"save {self._saves}"
        threading.Thread(
            target=self._run,
            args=(self._running, name, tag, data, parts, int(starts)),
            name=name,
            daemon=True,  # One that waits for a dead role must not keep the process.
        ).start()

    @property
    def busy(self) -> bool:
        """Whether the last save is still being written."""
        return self._running is not None and not self._running.done()

    def wait(self) -> bool:
        """Waits until the last save is written; returns whether it succeeded."""
        if self._running is None:
            return True
        return self._running.result()

    def abandon(self) -> None:
        """Has nobody wait for saves any more, since the roles are gone. Any thread.

        The thread of one that is under way ends with the connections.
        """
        self._abandoned.set()
        if self._running is not None:
            _complete(self._running, False)

    def close(self) -> None:
        """Waits for a save that is under way."""
        if self._running is not None:
            concurrent.futures.wait([self._running])

    def _new_tag(self) -> str:
        """Returns a tag and the number of starts until now, where this one commits."""
        if self._replicas.first:
            try:
                with self._starts.locked() as starts:
                    return f"{self._checkpoint.new_tag()} {starts}"
            except (CheckpointError, OSError) as error:
                logger.warning("Could not save. %s", error)
        return f"{NO_TAG} 0"

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
        own = ""  # Stays so if anything fails.
        try:
            own = self._write_parts(tag, data, parts)
        except Exception as error:  # Nothing that is there already is lost by it.
            if self._abandoned.is_set():
                return False
            logger.warning(NOT_SAVED, error)
        every = self._replicas.gather(name, own)
        outcome = self._conclude(tag, every, starts) if self._replicas.first else ""
        outcome = self._replicas.gather(f"{name} done", outcome)[0]
        if outcome == SAVED:
            return True
        if not self._replicas.alone:
            logger.warning(NOT_SAVED, "Another replica may say why.")
        if outcome == NOT_COMMITTED:
            self._take_back(tag)
        return False

    def _conclude(self, tag: str, every: list[str], starts: int) -> str:
        """Commits, or removes the agent's files; returns which of the two was done."""
        try:
            if all(every):
                self._commit(tag, every, starts)
                return SAVED
        except Exception as error:
            logger.warning(NOT_SAVED, error)
        try:
            # What was committed after all, although that raised, is left alone.
            return NOT_COMMITTED if self._checkpoint.discard(tag) else UNCLEAR
        except Exception as error:
            logger.warning(FILES_LEFT, error)
            return UNCLEAR

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
        """Removes the roles' files of a save that failed, for the next to have room."""
        try:
            for client in self._roles.values():
                client.discard(tag).result(DISCARD_SECONDS)
        except Exception as error:
            logger.warning(FILES_LEFT, error)


def _complete(running: concurrent.futures.Future[bool], saved: bool) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        running.set_result(saved)
