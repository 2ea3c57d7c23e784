"""Finds, reads and converts checkpoints of the reference implementation.

In the main process.

    dreamerv3 --script import_checkpoint --configs size12m atari \
        --run.from_checkpoint REFERENCE --logdir NEW

The flags describe the agent as in the reference; the new logdir can then be continued,
evaluated, loaded, or given as `run.from_checkpoint`. Files of the reference:

    latest          the name of the newest of these folders
    NAME/agent.pkl  a pickle: params by flat name, the optimiser's among them; counters
    NAME/step.pkl   a pickle of the step, in some of its programs
    NAME/done       exists if the other files are complete
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import elements
import numpy as np

from dreamerv3.cli.config import ConfigError
from dreamerv3.cli.logdir import prepare_logdir
from dreamerv3.policies.pickles import read_pickle
from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.run.saving import AGENT, FOLDER

LATEST, DONE = "latest", "done"
AGENT_FILE, STEP_FILE = "agent.pkl", "step.pkl"
LONGEST_NAME = 255  # Bytes of `latest`: it holds the name of a file.

OPT = "opt/"  # Prefix of the optimiser's flat names, there and here.
# Arrays that are not trained may be missing, and are then initialised.
UNTRAINED = re.compile(r"(opt|retnorm|valnorm|advnorm|slowval_count)/")
# Moving averages of the optimiser, in the order in which it applies them.
AVERAGE = re.compile(r"opt/state/(\d+)/1/(.+)")
AVERAGES = ("opt/square", "opt/momentum")
COUNT = re.compile(r"opt/state/\d+/(0|count)|opt/step/value")
STEP = "opt/step/value"
COUNTERS = {"updates": "updates", "actions": "policy_calls"}

SHOWN = 8  # Names in a message; the others are counted.

logger = logging.getLogger("embodied.checkpoint")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A checkpoint of the reference.

    Attributes:
      path: path of the agent's file.
      params: arrays by flat names of the reference.
      counters: counters by name.
      step: step of the run; None if it is not in the checkpoint.
    """

    path: Path
    params: dict[str, np.ndarray]
    counters: dict[str, int]
    step: int | None


def import_checkpoint(config: elements.Config) -> str:
    """Converts the checkpoint at `run.from_checkpoint` into one in `logdir`.

    Args:
      config: the whole configuration, with the task and sizes of the agent.
        `run.from_checkpoint_regex` selects the names, after renaming, to import; other
        arrays are as in an untrained agent.

    Returns:
      A report of what was imported.

    Raises:
      CheckpointError: there is no checkpoint, it is damaged or does not fit the agent,
        or the logdir has a checkpoint already.
      ConfigError: the configuration is not that of an agent that learns.
    """
    if config.random_agent:
        raise ConfigError(
            "random_agent: expected False for --script import_checkpoint, got True."
        )
    # The reference has this key, but its policies do not use it.
    config = config.update({"agent.policy.unimix": 0.0})
    target = Checkpoint(config.logdir, FOLDER)
    if target.exists():
        raise CheckpointError(
            f"logdir: {config.logdir} exists and its checkpoints would be overwritten. "
            "Choose another --logdir."
        )
    reference = read_reference(config.run.from_checkpoint)
    arrays, unused = translate(reference.params)
    # Imported here, so that the errors above do not wait for JAX.
    from dreamerv3.cli.factories import make_agent
    from dreamerv3.policies.acting_agent import on_one_device
    from embodied.jax.agent import join_parts

    # On the CPU, because nothing is computed that needs an accelerator.
    agent = make_agent(on_one_device(config, "cpu"))
    own = join_parts(agent.save())
    chosen = {
        name: value
        for name, value in arrays.items()
        if name in own and re.match(config.run.from_checkpoint_regex, name)
    }
    _load(agent, own, chosen, reference.counters, config.run.from_checkpoint_regex)
    step = reference.step or 0
    prepare_logdir(config)
    target.save({AGENT: agent.save()}, {"step": step})
    lines = [f"Imported {len(chosen)} arrays of {reference.path}, step {step}."]
    if fresh := sorted(set(own) - set(chosen)):
        lines.append(f"Not in it, and started anew: {_listing(fresh)}.")
    others = [f"counters/{x}" for x in reference.counters if x not in COUNTERS]
    if left_out := sorted({*unused, *others, *(set(arrays) - set(chosen))}):
        lines.append(f"Not imported: {_listing(left_out)}.")
    lines += [
        f"Written to {config.logdir}. Train on with the same flags and logdir, or "
        "start another run from it:",
        f"  --run.from_checkpoint {config.logdir}",
    ]
    return "\n".join(lines)


def _load(
    agent: Any,
    own: Mapping[str, Any],
    chosen: Mapping[str, Any],
    counters: Mapping[str, int],
    regex: str,
) -> None:
    """Loads arrays and counters; raises CheckpointError unless they fit the agent.

    Of the agent's own arrays, those that are not trained or not selected are kept.
    """
    from embodied.jax.agent import split_parts

    kept = {
        name: value
        for name, value in own.items()
        if UNTRAINED.match(name) or not re.match(regex, name)
    }
    counts = {
        name: counters[theirs]
        for theirs, name in COUNTERS.items()
        if theirs in counters
    }
    try:
        agent.load({**split_parts({**kept, **chosen}), "counters": counts})
    except ValueError as error:
        raise CheckpointError(
            "run.from_checkpoint: expected the checkpoint of an agent for this task "
            f"and of these sizes, got another. {error} Use the flags of that run, "
            "such as --task and --configs, or leave names out with "
            "run.from_checkpoint_regex."
        ) from error
    if not chosen:
        raise CheckpointError(
            f"run.from_checkpoint_regex: expected to match names such as {min(own)!r}, "
            f"got {regex!r}, which matches none."
        )


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


def translate(params: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Renames arrays of the reference to the names used here.

    Parameters, slow value and normalisers have the same names. The moving averages of
    the reference's optimiser are numbered by their place in its chain, and each of them
    counts updates.

    Returns:
      Arrays by the names used here, and the names of arrays without a counterpart.
    """
    places = sorted({int(m[1]) for name in params if (m := AVERAGE.fullmatch(name))})
    kinds = dict(zip(places, AVERAGES))
    arrays: dict[str, Any] = {}
    unused = []
    counts: dict[str, int] = {}
    for name, value in params.items():
        average = AVERAGE.fullmatch(name)
        if average and int(average[1]) in kinds:
            arrays[f"{kinds[int(average[1])]}/{average[2]}"] = value
        elif COUNT.fullmatch(name) and value.size == 1:
            counts[name] = int(value.reshape(()))
        elif name.startswith(OPT):
            unused.append(name)
        else:
            arrays[name] = value
    if counts:
        # The count of the moving averages, if there is one: it corrects their bias.
        first = min(counts)
        arrays[STEP] = np.asarray(counts[first], np.int32)
        if len(set(counts.values())) > 1:
            logger.warning(
                "The optimiser's counts of updates differ (%s). Using %s.",
                ", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
                first,
            )
    return arrays, unused


def _candidates(folder: Path) -> list[Path]:
    """Checkpoints in a folder: the one named by `latest`, then from new to old."""
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


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
