"""Saves a whole run as one checkpoint, and restores it. Any process that has state.

A save takes the state of all parts at one moment, writes it, and commits it:

    records = writer.write(tag, {'agent': agent.save(), 'replay': replay.cut()})
    checkpoint.commit(tag, records, {'step': step})

If that fails, `discard` of both removes the files. `RunCheckpoint` does all of this for
a run in one process; for a run over several processes see `parallel/conductor.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from embodied.base import Agent, Tree
from embodied.checkpoint import (
    Checkpoint,
    CheckpointError,
    DiskTooSmallError,
    Manifest,
    PartWriter,
    write_file,
)
from embodied.checkpoint.files import locate
from embodied.driver import EnvError
from embodied.logger import StepCount
from embodied.replay import Replay
from embodied.run.live import SAVE
from embodied.run.settings import RunSettings

FOLDER = "ckpt"  # In the logdir.
CONFIG_FILE = "config.yaml"
AGENT = "agent"
LOGGER = "logger"

logger = logging.getLogger("embodied.run")


class Part(Protocol):
    """A component with state, such as the agent or a replay."""

    def save(self) -> Tree:
        """Returns all state as arrays and plain values."""

    def load(self, data: Tree) -> None:
        """Restores what `save` returned."""


def check_replicas(parts: Iterable[str], name: str, replicas: int) -> None:
    """Raises CheckpointError if a part was saved by another number of replicas.

    Their steps and sequences would be lost, and the metrics of all steps removed.

    Args:
      parts: names of all parts of a checkpoint.
      name: name of the part without a suffix. A checkpoint need not have it.
      replicas: of the present run.
    """
    saved = sum(part == name or part.startswith(f"{name}/") for part in parts)
    if saved not in (0, replicas):
        raise CheckpointError(
            f"replicas: the run in this logdir was saved with {saved}, got {replicas}. "
            f"Continue it with --replicas {saved}, or choose another --logdir."
        )


def load_files(replay: Replay, folder: Path) -> None:
    """Loads the steps in the folder of a replay, for a run without a checkpoint."""
    if folder.is_dir():
        replay.load(directory=folder)
        if len(replay):
            logger.info(
                "There is no checkpoint; %s has %d sequences from its folder.",
                folder.name,
                len(replay),
            )


class RunCheckpoint:
    """The checkpoints of a run that lives in one process.

        checkpoint.restore()
        with checkpoint.saved_at_end(finish):
          while ...:
            ...
            if should_save():
              checkpoint.save()

    All parts are saved at one step and committed together: the newest whole
    checkpoint is loaded, or none. A checkpoint counts as whole even if files of a
    replay are damaged; the replay leaves these out.

    Args:
      settings: `logdir`, `keep` and where to start from; see `restore`.
      counter: step counter. Call `changed` for changes between two steps.
      agent: agent to save; `from_checkpoint` replaces its initial state.
      parts: all other parts by name. The name of a replay is that of its folder.
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
        self._writer = PartWriter(self._checkpoint)
        self._counter = counter
        self._agent = agent
        self._parts: dict[str, Part] = {
            AGENT: agent,
            LOGGER: StepCount(counter),
            **parts,
        }
        # Step of the last save; None if something has changed since.
        self._saved: int | None = None

    def restore(self) -> None:
        """Continues the run of the logdir, or starts a new one and saves it.

        A new run takes the agent from `from_checkpoint`, if given, restricted to the
        parameter names that `from_checkpoint_regex` matches. Its replays load the
        files that lie in their folders.

        Raises:
          CheckpointError: there are checkpoints, but none is whole; or the folder of a
            replay is a symbolic link, below which no file could be removed.
        """
        for name, part in self._parts.items():
            if isinstance(part, Replay):  # Its files are in a folder of its name.
                locate(self._root, name)
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
        """Saves when the body ends, also if an environment's failure ends it.

        Args:
          finish: called before that save.

        Raises:
          CheckpointError: the state at the end could not be saved.
        """
        try:
            yield
        except EnvError:
            # Everything that was collected and learned until then is valid.
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
        """Records that the state has changed although no step was counted."""
        self._saved = None

    def save(self) -> bool:
        """Saves if something has changed; returns whether everything is saved.

        A failure, such as a full disk, is a warning: the last checkpoint is untouched,
        and training goes on.

        Raises:
          DiskTooSmallError: no save could ever succeed; the first save raises it.
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
            stands = self._checkpoint.describe_last()
            logger.warning("Step %d was not saved. %s %s", step, error, stands)
            return False
        self._saved = step
        event = {"kind": SAVE, "step": step, "tag": tag}
        logger.info("Saved step %d.", step, extra={"event": event})
        return True

    def _take_back(self, tag: str) -> None:
        """Removes the files of a failed save, so that the next one has room."""
        try:
            # A commit may have succeeded although it raised; then all files stay.
            if self._checkpoint.discard(tag):
                self._writer.discard(tag)
        except (CheckpointError, OSError) as error:
            logger.warning(
                "Some files of the failed save could not be removed. %s", error
            )

    def _start(self) -> None:
        if self._settings.from_checkpoint:
            load_agent(
                self._agent,
                self._settings.from_checkpoint,
                self._settings.from_checkpoint_regex,
            )
        for name, part in self._parts.items():
            if isinstance(part, Replay):
                load_files(part, self._root / name)

    def _resume(self, manifest: Manifest) -> None:
        found = self._checkpoint.parts(manifest)
        # Includes the files of skipped checkpoints, which a person may repair.
        listed = self._checkpoint.listed()
        check_replicas(found, LOGGER, replicas=1)
        for name, part in self._parts.items():
            if name not in found:
                logger.warning(
                    "Checkpoint %s has no part %r; it starts from its initial state.",
                    manifest.tag,
                    name,
                )
                continue
            data = self._checkpoint.read_part(manifest, name)
            with explain_mismatch(self._root):
                part.load(data)
            if isinstance(part, Replay):
                part.clean(listed, self._root)
        logger.info(
            "Continuing at step %d, from checkpoint %s.",
            int(self._counter),
            manifest.tag,
        )


@contextlib.contextmanager
def explain_mismatch(logdir: str | os.PathLike[str]) -> Iterator[None]:
    """Explains what to do if the run in a logdir does not fit the present settings.

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


def write_config(logdir: str | os.PathLike[str], agent: Agent) -> None:
    """Writes `config.yaml`, for other programs, unless the logdir has one.

    Args:
      logdir: folder of the run.
      agent: agent whose attribute `config` is the whole configuration; if it has no
        such attribute, nothing is written.
    """
    config = getattr(agent, "config", None)
    if config and not Path(logdir, CONFIG_FILE).exists():
        content = config_yaml({**config, "logdir": str(logdir)})
        write_file(Path(logdir), CONFIG_FILE, content)


def config_yaml(config: Mapping[str, Any]) -> bytes:
    """Returns the contents of `config.yaml` for a configuration."""
    # Here, because importing the framework should not import a YAML parser.
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
      logdir: folder of the run.
      tag: tag of the checkpoint.
      step: step at which it was saved.
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
    """Loads an agent from a checkpoint of any run; returns the checkpoint's step.

    Args:
      agent: gets the state.
      source: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it.
      regex: matches the beginning of the parameter names to load.
      key: configuration key that names the source, for errors.

    Raises:
      CheckpointError: no checkpoint is whole, or it does not fit the agent.
    """
    saved = read_agent(source, key)
    try:
        agent.load(saved.data, regex)
    except ValueError as error:
        raise CheckpointError(f"{key}: {source}: {error}") from error
    logger.info("Loaded the agent of checkpoint %s in %s.", saved.tag, source)
    return saved.step


def read_agent(source: str | os.PathLike[str], key: str = "") -> SavedAgent:
    """Reads the agent of a run's newest whole checkpoint, even while the run goes on.

    Args:
      source: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it.
      key: configuration key that names the source, for errors.

    Raises:
      CheckpointError: no checkpoint is whole.
    """
    folder = find_checkpoints(source)
    if folder is None:
        begin = f"{key}: expected" if key else "Expected"
        raise CheckpointError(f"{begin} {_nothing(source)}")
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
        f"the logdir of a run, or the folder {FOLDER} in it, got {path}, which {found}."
    )
    folders = (path, path / FOLDER, path / FOLDER / AGENT)
    if any((folder / "latest").is_file() for folder in folders):
        text += " Use --script import_checkpoint first for one of the reference."
    return text
