"""Saves all of a run as one checkpoint, and restores it. Any process that has state.

A save takes the state of all parts at one moment, writes it, and commits it:

    records = writer.write(tag, {'agent': agent.save(), 'replay': replay.cut()})
    checkpoint.commit(tag, records, {'step': step})    # If that fails: discard both.

`RunCheckpoint` does so for a run in one process; for a run over several processes see
`parallel/conductor.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from embodied.base import Agent, Tree
from embodied.checkpoint import (
    Checkpoint,
    CheckpointError,
    DiskTooSmallError,
    FileRecord,
    Manifest,
    write_file,
)
from embodied.driver import EnvError
from embodied.replay import Replay, ReplayCut, SavedReplay
from embodied.run.live import SAVE, note_event
from embodied.run.settings import RunSettings

FOLDER = "ckpt"  # In the logdir.
CONFIG_FILE = "config.yaml"
AGENT = "agent"
LOGGER = "logger"

logger = logging.getLogger("embodied.run")


class Part(Protocol):
    """Something with state: the agent, a replay, and so on."""

    def save(self) -> Tree:
        """Returns all state as arrays and plain values."""

    def load(self, data: Tree) -> None:
        """Restores what `save` returned."""


class StepCount:
    """The logger's step counter, as a part of checkpoints."""

    def __init__(self, counter: Any):
        self._counter = counter

    def save(self) -> Tree:
        """Returns the number of agent steps of training environments."""
        return {"step": int(self._counter)}

    def load(self, data: Tree) -> None:
        """Goes on counting from there."""
        self._counter.load(int(data["step"]))


def rewind(logger: Any) -> None:
    """Has a logger take back what it has shown of steps after its present one.

    Loggers of users need not know how.
    """
    getattr(logger, "rewind", lambda: None)()


class PartWriter:
    """Writes parts of checkpoints, and removes those that were not committed.

    Args:
      checkpoint: that the parts belong to.
      root: the logdir.
      suffix: of the names of parts.
    """

    def __init__(self, checkpoint: Checkpoint, root: Path, suffix: str = ""):
        self._checkpoint = checkpoint
        self._root = root
        self._suffix = suffix
        self._tag = ""
        self._saved: list[SavedReplay] = []  # Under that tag.
        self._warned = False  # Whether it was looked if the disk has room for more.

    def write(
        self, tag: str, states: Mapping[str, Tree | ReplayCut]
    ) -> list[FileRecord]:
        """Writes parts under a tag; returns the records to commit.

        Args:
          tag: from `Checkpoint.new_tag`.
          states: by name of the part, its state or the cut of a replay. Cuts are
            closed.

        Raises:
          CheckpointError: one could not be written; replays have removed their files.
        """
        self._tag, self._saved = tag, []
        records: list[FileRecord] = []
        parts: list[FileRecord] = []
        try:
            with contextlib.ExitStack() as stack:
                for state in states.values():
                    if isinstance(state, ReplayCut):
                        stack.enter_context(state)
                for name, state in states.items():
                    if isinstance(state, ReplayCut):
                        with state:  # Ends here, so that inserts that wait go on.
                            saved = state.write()
                        self._saved.append(saved)
                        records += saved.records(self._root)
                        state = saved.data
                    name += self._suffix
                    parts += self._checkpoint.write_part(tag, name, state)
        except BaseException:
            self.discard(tag)
            raise
        self._warn_of_room(parts)
        return records + parts

    def _warn_of_room(self, parts: list[FileRecord]) -> None:
        """Says so at the first save if the disk cannot hold as many as are kept."""
        if self._warned:
            return
        self._warned = True
        with contextlib.suppress(CheckpointError, OSError):  # No reason not to save.
            nbytes = sum(record.size for record in parts)
            if problem := self._checkpoint.find_room_problem(nbytes):
                logger.warning(problem)

    def discard_uncommitted(self) -> None:
        """Removes the files of replays of the last save, if nobody has committed it.

        Call it before the state of the next save is taken: who conducted the last one
        may have died before it could say that it failed.
        """
        if self._saved and not self._checkpoint.may_be_committed(self._tag):
            self.discard(self._tag)

    def discard(self, tag: str) -> None:
        """Removes the files of replays that the last `write` wrote under a tag.

        Those of parts are removed by `Checkpoint.discard`.
        """
        if tag == self._tag:
            for saved in self._saved:
                saved.discard()
            self._saved = []


class RunCheckpoint:
    """The checkpoints of a run that lives in one process.

        checkpoint.restore()
        with checkpoint.saved_at_end(finish):
          while ...:
            ...
            if should_save():
              checkpoint.save()

    All parts are saved at one step and committed together: the newest whole
    checkpoint is loaded, or none. Files of replays are not required to be whole; the
    replay leaves out those that are not.

    Args:
      settings: `logdir`, `keep` and where to start from; see `restore`.
      counter: the step. Changes between two steps are told by `changed`.
      agent: has the state that `from_checkpoint` replaces.
      parts: what else there is, by name. That of a replay is its folder's name.
    """

    def __init__(
        self,
        settings: RunSettings,
        counter: Any,
        agent: Agent,
        parts: Mapping[str, Part],
    ):
        if settings.replicas > 1:
            raise ValueError(
                "This program trains on one host and expected replicas=1, got "
                f"{settings.replicas}: the others would overwrite its checkpoints. Use "
                "a parallel program for several hosts."
            )
        self._settings = settings
        self._root = Path(settings.logdir)
        self._checkpoint = Checkpoint(self._root, FOLDER, keep=settings.keep)
        self._writer = PartWriter(self._checkpoint, self._root)
        self._counter = counter
        self._agent = agent
        self._parts: dict[str, Part] = {
            AGENT: agent,
            LOGGER: StepCount(counter),
            **parts,
        }
        # Step of the last save; None if there is something new since.
        self._saved: int | None = None

    def restore(self) -> None:
        """Continues the run of the logdir, or starts one and saves that.

        A new run takes the agent from `from_checkpoint`, if given, restricted to the
        parameter names that `from_checkpoint_regex` matches, and its replays from what
        lies in their folders.

        Raises:
          CheckpointError: there are checkpoints, but none is whole.
        """
        self._checkpoint.clean()
        manifest = self._checkpoint.newest()
        if manifest is None:
            self._start()
            self.save()
        else:
            self._resume(manifest)
            self._saved = int(self._counter)

    @contextlib.contextmanager
    def saved_at_end(self, finish: Callable[[], None]) -> Iterator[None]:
        """Saves when the body has ended, or was ended by an environment's failure.

        Args:
          finish: called before that save.

        Raises:
          CheckpointError: the state at the end could not be saved.
        """
        try:
            yield
        except EnvError:
            # What was collected and learned until then is as it should be.
            finish()
            self.save()
            raise
        finish()
        if not self.save():
            raise CheckpointError(
                f"The end of the run, at step {int(self._counter)}, could not be saved "
                f"to {self._root}. The warning above says why."
            )

    def changed(self) -> None:
        """Notes that there is something to save although no step was counted."""
        self._saved = None

    def save(self) -> bool:
        """Saves unless nothing has changed; returns whether all is saved.

        A full disk or the like is a warning: the last checkpoint is untouched, and
        training goes on.

        Raises:
          DiskTooSmallError: no save could ever succeed, which the first one finds.
        """
        step = int(self._counter)
        if step == self._saved:
            return True
        tag = ""
        try:
            tag = self._checkpoint.new_tag()
            states = {
                name: part.cut() if isinstance(part, Replay) else part.save()
                for name, part in self._parts.items()
            }
            records = self._writer.write(tag, states)
            self._checkpoint.commit(tag, records, {"step": step})
        except CheckpointError as error:
            if tag:
                self._take_back(tag)
            if isinstance(error, DiskTooSmallError):
                raise
            stands = self._checkpoint.what_stands()
            logger.warning("Step %d was not saved. %s %s", step, error, stands)
            return False
        self._saved = step
        note_event(SAVE, f"Saved step {step}.", step=step, tag=tag)
        return True

    def _take_back(self, tag: str) -> None:
        """Removes the files of a save that failed, for the next to have room."""
        try:
            # What was committed after all, although that raised, is left alone.
            if self._checkpoint.discard(tag):
                self._writer.discard(tag)
        except (CheckpointError, OSError) as error:
            logger.warning("Files of that save may be left. %s", error)

    def _start(self) -> None:
        if self._settings.from_checkpoint:
            load_agent(
                self._agent,
                self._settings.from_checkpoint,
                self._settings.from_checkpoint_regex,
            )
        for name, part in self._parts.items():
            folder = self._root / name
            if isinstance(part, Replay) and folder.is_dir():
                part.load(directory=folder)
                if len(part):
                    logger.info(
                        "There is no checkpoint; %s has %d sequences from before.",
                        name,
                        len(part),
                    )

    def _resume(self, manifest: Manifest) -> None:
        found = self._checkpoint.parts(manifest)
        # Also what checkpoints list that were skipped: a person may mend them.
        listed = self._checkpoint.listed()
        for name, part in self._parts.items():
            if name not in found:
                logger.warning(
                    "Checkpoint %s has no part %r, which starts anew.",
                    manifest.tag,
                    name,
                )
                continue
            part.load(self._checkpoint.read_part(manifest, name))
            if isinstance(part, Replay):
                part.clean(listed, self._root)
        logger.info(
            "Continuing at step %d, from checkpoint %s.",
            int(self._counter),
            manifest.tag,
        )


@contextlib.contextmanager
def must_continue(logdir: str | os.PathLike[str]) -> Iterator[None]:
    """Explains what to do if the run of a logdir does not fit the settings of this one.

    Raises:
      CheckpointError: the body raised a ValueError.
    """
    try:
        yield
    except ValueError as error:
        raise CheckpointError(
            f"logdir: {logdir} holds a run with other settings. {error} Use those "
            "settings again, or another --logdir."
        ) from error


def describe_run(logdir: str | os.PathLike[str], agent: Agent) -> None:
    """Writes `config.yaml`, for other programs, unless the logdir has one.

    Args:
      logdir: of the run.
      agent: with the whole configuration as its attribute `config`; nothing is written
        for one that has none.
    """
    config = getattr(agent, "config", None)
    if config and not Path(logdir, CONFIG_FILE).exists():
        content = config_yaml({**config, "logdir": str(logdir)})
        write_file(Path(logdir), CONFIG_FILE, content)


def config_yaml(config: Mapping[str, Any]) -> bytes:
    """Returns a configuration as `config.yaml` has it."""
    # Here, because importing the framework should not import its parser.
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    content = io.BytesIO()
    yaml.dump(dict(config), content)
    return content.getvalue()


@dataclasses.dataclass(frozen=True)
class SavedAgent:
    """The agent of a checkpoint.

    Attributes:
      logdir: of the run.
      tag: of the checkpoint.
      step: at which it was saved.
      data: what the agent's `save` returned.
    """

    logdir: Path
    tag: str
    step: int
    data: Tree


def load_agent(
    agent: Agent,
    source: str | os.PathLike[str],
    regex: str,
    key: str = "run.from_checkpoint",
) -> int:
    """Loads an agent from a checkpoint of any run; returns the step of it.

    Args:
      agent: gets the state.
      source: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it.
      regex: which parameter names to load.
      key: of the configuration that the source is from, for errors.

    Raises:
      CheckpointError: there is no checkpoint that is whole, or it does not fit.
    """
    if find_checkpoints(source) is None:
        raise CheckpointError(f"{key}: {_nothing(source)}")
    saved = read_agent(source)
    try:
        agent.load(saved.data, regex)
    except ValueError as error:
        raise CheckpointError(f"{key}: {source}: {error}") from error
    logger.info("The agent is that of checkpoint %s in %s.", saved.tag, source)
    return saved.step


def read_agent(source: str | os.PathLike[str]) -> SavedAgent:
    """Reads the agent of the newest whole checkpoint of a run, which may go on.

    Args:
      source: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it.

    Raises:
      CheckpointError: there is no checkpoint that is whole.
    """
    folder = find_checkpoints(source)
    if folder is None:
        text = _nothing(source)
        raise CheckpointError(text[0].upper() + text[1:])
    found = Checkpoint(folder.parent, folder.name).read_newest([AGENT])
    assert found is not None
    manifest, parts = found
    step = int(manifest.meta.get("step", 0))
    return SavedAgent(folder.parent, manifest.tag, step, parts[AGENT])


def find_checkpoints(source: str | os.PathLike[str]) -> Path | None:
    """Returns the folder of a run's checkpoints, if there are any.

    Args:
      source: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it.
    """
    path = Path(source).expanduser().resolve()
    folders = [path / FOLDER, path]
    if path.name == AGENT:
        folders.append(path.parent)
    for folder in folders:
        # The root of the file system has no name.
        if folder.name and Checkpoint(folder.parent, folder.name).exists():
            return folder
    return None


def _nothing(source: str | os.PathLike[str]) -> str:
    path = Path(source).expanduser()
    found = "has no checkpoint" if path.exists() else "does not exist"
    text = (
        f"expected the logdir of a run, or the folder {FOLDER} in it, got {path}, "
        f"which {found}."
    )
    folders = (path, path / FOLDER, path / FOLDER / AGENT)
    if any((folder / "latest").is_file() for folder in folders):
        text += " For one of the reference, use --script import_checkpoint first."
    return text
