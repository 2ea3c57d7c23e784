"""Reads checkpoints of the reference implementation. In the main process.

Files of the reference:

    latest          the name of the newest of these folders
    NAME/agent.pkl  a pickle: params by flat name, the optimiser's among them; counters
    NAME/step.pkl   a pickle of the step, in some of its programs
    NAME/done       there if the others are whole
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from dreamerv3.pickles import read_pickle
from embodied.checkpoint import CheckpointError
from embodied.run.saving import AGENT, FOLDER

LATEST, DONE = "latest", "done"
AGENT_FILE, STEP_FILE = "agent.pkl", "step.pkl"
LONGEST_NAME = 255  # Bytes of `latest`: it holds the name of a file.


@dataclasses.dataclass(frozen=True)
class Reference:
    """A checkpoint of the reference.

    Attributes:
      path: of the agent's file.
      params: arrays by its flat names.
      counters: by name.
      step: of the run; None if it is not in the checkpoint.
    """

    path: Path
    params: dict[str, np.ndarray]
    counters: dict[str, int]
    step: int | None


def read_reference(source: str | os.PathLike[str]) -> Reference:
    """Reads the newest checkpoint in a folder of the reference, without running code.

    Args:
      source: a logdir, a folder of checkpoints, or a checkpoint.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    path = find_reference(source) / AGENT_FILE
    content = read_pickle(path)
    if not isinstance(content, dict):
        content = {}
    params, counters = content.get("params"), content.get("counters", {})
    if not _is_dict_of(params, _is_array) or not params:
        raise CheckpointError(
            f"{path}: expected a dict with 'params', arrays by name, got "
            f"{_outline(content)}."
        )
    if not _is_dict_of(counters, _is_count):
        raise CheckpointError(
            f"{path}: expected 'counters', numbers by name, got {_outline(counters)}."
        )
    wrong = [name for name, value in params.items() if not np.isfinite(value).all()]
    if wrong:
        raise CheckpointError(
            f"{path}: expected finite numbers, got others in {len(wrong)} arrays, such "
            f"as {wrong[0]}. The run had failed before it was saved; use an earlier "
            "checkpoint of it."
        )
    return Reference(path, params, counters, _read_step(path.with_name(STEP_FILE)))


def find_reference(source: str | os.PathLike[str]) -> Path:
    """Returns the folder of the newest whole checkpoint of the reference.

    Args:
      source: a logdir, a folder of checkpoints, or a checkpoint.

    Raises:
      CheckpointError: there is none.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"run.from_checkpoint: expected a checkpoint folder of the reference "
            f"implementation, got {source}, which {found}."
        )
    if (path / AGENT_FILE).is_file():
        return path
    for folder in (path, path / FOLDER, path / FOLDER / AGENT, path / AGENT):
        for candidate in _candidates(folder):
            if (candidate / AGENT_FILE).is_file() and (candidate / DONE).exists():
                return candidate
    raise CheckpointError(
        f"run.from_checkpoint: expected a checkpoint folder of the reference "
        f"implementation, with a file {LATEST} and folders of {AGENT_FILE} and {DONE}, "
        f"got {source}, which has none."
    )


def _candidates(folder: Path) -> list[Path]:
    """Checkpoints in a folder: the one that `latest` names, then from new to old."""
    if not folder.is_dir():
        return []
    # Their names are times, so that they sort by age.
    found = sorted((path for path in folder.iterdir() if path.is_dir()), reverse=True)
    latest = ""
    if (folder / LATEST).is_file():
        with (folder / LATEST).open("rb") as file:
            latest = file.read(LONGEST_NAME).decode("utf-8", "replace").strip()
    return sorted(found, key=lambda path: path.name != latest)


def _read_step(path: Path) -> int | None:
    if not path.is_file():
        return None
    step = read_pickle(path)
    if not _is_count(step):
        raise CheckpointError(
            f"{path}: expected the number of steps, got {_outline(step)}."
        )
    return step


def _is_dict_of(value: Any, accepts: Callable[[Any], bool]) -> TypeGuard[dict]:
    return isinstance(value, dict) and all(map(accepts, value.values()))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _outline(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {', '.join(sorted(value)[:5]) or 'nothing'}"
    return f"a {type(value).__name__}"
