"""One consistent checkpoint over several roles. Conducted by the learner.

The learner asks replay and logger to save under one tag, saves the agent, and commits
all of it with one manifest. Each role restores its own parts when it starts.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from embodied.base import Agent, Tree
from embodied.checkpoint import Checkpoint, CheckpointError, FileRecord
from embodied.run.saving import AGENT, FOLDER, load_agent

SAVE_SECONDS = 900.0  # For a role to write its part.
DISCARD_SECONDS = 10.0

logger = logging.getLogger("embodied.run")


def pack_reply(records: Iterable[FileRecord], meta: Mapping[str, Any]) -> str:
    """Returns what a role answers to `save`, as JSON, which any transport keeps."""
    return json.dumps([[record.to_json() for record in records], dict(meta)])


def unpack_reply(text: Any) -> tuple[list[FileRecord], dict[str, Any]]:
    """Returns what `pack_reply` was given."""
    records, meta = json.loads(str(text))
    return [FileRecord.from_json(record) for record in records], meta


class RoleCheckpoint:
    """The parts of one role that is not the conductor.

    Args:
      args: `logdir` and `keep`.
    """

    def __init__(self, args: Any):
        self.root = Path(args.logdir)
        self._saved = ""
        self._checkpoint = Checkpoint(self.root, FOLDER, keep=args.keep)

    def load(self, names: Iterable[str]) -> dict[str, Tree]:
        """Returns the parts of the newest checkpoint; those it lacks are left out."""
        manifest = self._checkpoint.newest()
        if manifest is None:
            return {}
        found = set(self._checkpoint.parts(manifest))
        return {
            name: self._checkpoint.read_part(manifest, name)
            for name in names
            if name in found
        }

    def write(self, tag: str, parts: Mapping[str, Tree]) -> list[FileRecord]:
        """Writes parts under the conductor's tag."""
        records = [
            record
            for name, tree in parts.items()
            for record in self._checkpoint.write_part(tag, name, tree)
        ]
        self._saved = tag
        return records

    def has_saved(self, tag: str) -> bool:
        """Whether this very process has written the parts of a tag."""
        return self._saved == tag


class Conductor:
    """Restores the agent, and saves all roles at one moment.

    A save decides at once what belongs to it; files are written in the background.
    Belongs to the learner's thread.

    Args:
      agent: to save.
      replay: client of the replay role.
      logger: client of the logger role.
      args: `logdir`, `keep`, and where to start from.
    """

    def __init__(self, agent: Agent, replay: Any, logger: Any, args: Any):
        self._agent = agent
        self._roles = {"replay": replay, "logger": logger}
        self._args = args
        self._checkpoint = Checkpoint(Path(args.logdir), FOLDER, keep=args.keep)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "save")
        self._running: concurrent.futures.Future[bool] | None = None

    def restore(self) -> bool:
        """Continues the run of the logdir; returns whether there is one.

        A new run takes the agent from `args.from_checkpoint`, if given.
        """
        self._checkpoint.clean()
        args = self._args
        manifest = self._checkpoint.newest()
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
        try:
            tag = self._checkpoint.new_tag()
        except CheckpointError as error:
            logger.warning("Could not save. %s", error)
            self._running = concurrent.futures.Future()
            self._running.set_result(False)
            return
        parts = {
            "replay": self._roles["replay"].save(tag, trained),
            "logger": self._roles["logger"].save(tag),
        }
        data = self._agent.save()
        self._running = self._thread.submit(self._write, tag, data, parts)

    def wait(self) -> bool:
        """Waits until the last save is written; returns whether it succeeded."""
        if self._running is None:
            return True
        return self._running.result()

    def close(self) -> None:
        """Ends the background thread, which completes a save that is under way."""
        self._thread.shutdown()

    def _write(self, tag: str, data: Tree, parts: dict[str, Any]) -> bool:
        try:
            records = list(self._checkpoint.write_part(tag, AGENT, data))
            meta: dict[str, Any] = {}
            for future in parts.values():
                files, facts = unpack_reply(future.result(SAVE_SECONDS))
                records += files
                meta |= facts
            self._check_roles(tag)
            self._checkpoint.commit(tag, records, meta)
        except Exception as error:  # Nothing that is there already is lost by it.
            logger.warning(
                "A checkpoint could not be saved, training goes on. %s", error
            )
            self._take_back(tag)
            return False
        return True

    def _check_roles(self, tag: str) -> None:
        """Raises an error if a role has forgotten what it just saved.

        One that is restarted goes on from the newest checkpoint, which is the one
        before this: if this became the newest, its steps would be lost.
        """
        asked = {name: role.has_saved(tag) for name, role in self._roles.items()}
        for name, future in asked.items():
            if not future.result(SAVE_SECONDS):
                raise CheckpointError(f"The {name} was restarted meanwhile.")

    def _take_back(self, tag: str) -> None:
        """Removes the files of a save that failed, for the next to have room."""
        try:
            self._checkpoint.discard(tag)
            for client in self._roles.values():
                client.discard(tag).result(DISCARD_SECONDS)
        except Exception as error:
            logger.warning("Files of that save may be left. %s", error)
