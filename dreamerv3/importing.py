"""Converts checkpoints of the reference implementation. In the main process.

    dreamerv3 --script import_checkpoint --configs size12m atari \
        --run.from_checkpoint REFERENCE --logdir NEW

The flags describe the agent as they did in the reference; the new logdir can then be
continued, evaluated, loaded, or given as `run.from_checkpoint`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import elements
import numpy as np

from dreamerv3.config import ConfigError, prepare_logdir
from dreamerv3.reference import read_reference
from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.run.saving import AGENT, FOLDER

OPT = "opt/"  # Flat names of the optimiser's state begin with it, there and here.
# What is not trained may be missing, and then starts anew.
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
class Imported:
    """What was imported. As text, it is a report.

    Attributes:
      source: the file.
      logdir: where the checkpoint is now.
      imported: names of the agent's arrays that were.
      fresh: those that start anew.
      left_out: names in the file that this agent has no use for.
      step: of the run.
    """

    source: Path
    logdir: str
    imported: tuple[str, ...]
    fresh: tuple[str, ...]
    left_out: tuple[str, ...]
    step: int

    def __str__(self) -> str:
        lines = [
            f"Imported {len(self.imported)} arrays of {self.source}, step {self.step}."
        ]
        if self.fresh:
            lines.append(f"Not in it, and started anew: {_listing(self.fresh)}.")
        if self.left_out:
            lines.append(f"Not imported: {_listing(self.left_out)}.")
        lines += [
            f"Written to {self.logdir}. Train on with the same flags and logdir, or "
            "start another run from it:",
            f"  --run.from_checkpoint {self.logdir}",
        ]
        return "\n".join(lines)


def import_checkpoint(config: elements.Config) -> Imported:
    """Converts the checkpoint at `run.from_checkpoint` into one in `logdir`.

    Args:
      config: the whole configuration, with the task and sizes of the agent.
        `run.from_checkpoint_regex` decides which of our names are imported; arrays
        of other names are as in an agent that was not trained.

    Raises:
      CheckpointError: there is none, it is damaged or does not fit the agent, or the
        logdir has a checkpoint already.
      ConfigError: the configuration is not that of an agent that learns.
    """
    if config.random_agent:
        raise ConfigError(
            "random_agent: expected False for --script import_checkpoint, got True."
        )
    target = Checkpoint(config.logdir, FOLDER)
    if target.exists():
        raise CheckpointError(
            f"logdir: expected one without checkpoints, got {config.logdir}, whose "
            "would be replaced. Choose another --logdir."
        )
    reference = read_reference(config.run.from_checkpoint)
    arrays, unused = translate(reference.params)
    # Here, because errors until now should not wait for JAX.
    from dreamerv3.acting import on_one_device
    from dreamerv3.factories import make_agent

    # Nothing is computed, so that the accelerator can be left to others.
    agent = make_agent(on_one_device(config, "cpu"))
    own = _named(agent.save())
    chosen = _choose(arrays, own, config.run.from_checkpoint_regex)
    counters = {
        name: reference.counters[theirs]
        for theirs, name in COUNTERS.items()
        if theirs in reference.counters
    }
    unused += [
        f"counters/{name}" for name in reference.counters if name not in COUNTERS
    ]
    agent.load(_by_part({**own, **chosen}, counters))
    step = reference.step or 0
    prepare_logdir(config)
    target.save({AGENT: agent.save()}, {"step": step})
    return Imported(
        source=reference.path,
        logdir=config.logdir,
        imported=tuple(sorted(chosen)),
        fresh=tuple(sorted(set(own) - set(chosen))),
        left_out=tuple(sorted({*unused, *(set(arrays) - set(chosen))})),
        step=step,
    )


def translate(params: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Gives arrays of the reference our names.

    Parameters, slow value and normalisers have the same names. Of the optimiser, the
    moving averages are numbered by their place in its chain, and each counts updates.

    Returns:
      Arrays by our names, and the names of those that we have no place for.
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
        # That of the moving averages, if there are any: these are corrected by it.
        first = min(counts)
        arrays[STEP] = np.asarray(counts[first], np.int32)
        if len(set(counts.values())) > 1:
            logger.warning(
                "The optimiser's counts of updates differ (%s). Using %s.",
                ", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
                first,
            )
    return arrays, unused


def _choose(
    arrays: Mapping[str, Any], own: Mapping[str, Any], regex: str
) -> dict[str, Any]:
    """Returns what is imported, by name, if it fits the agent."""
    chosen = {
        name: value
        for name, value in arrays.items()
        if name in own and re.match(regex, name)
    }
    wrong = [
        f"{name} (expected {own[name].shape}, got {np.shape(value)})"
        for name, value in sorted(chosen.items())
        if np.shape(value) != own[name].shape
    ]
    missing = [
        name
        for name in sorted(set(own) - set(chosen))
        if re.match(regex, name) and not UNTRAINED.match(name)
    ]
    problems = f" Other shapes: {_listing(wrong)}." if wrong else ""
    problems += f" Missing: {_listing(missing)}." if missing else ""
    if problems:
        raise CheckpointError(
            "run.from_checkpoint: expected the checkpoint of an agent for this task "
            f"and of these sizes, got another.{problems} Use the flags of that run, "
            "such as --task and --configs, or leave names out with "
            "run.from_checkpoint_regex."
        )
    if not chosen:
        raise CheckpointError(
            f"run.from_checkpoint_regex: expected to match names such as {min(own)!r}, "
            f"got {regex!r}, which matches none."
        )
    return chosen


def _named(data: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of an agent by flat name, those of the optimiser included."""
    return {
        **data["params"],
        **{OPT + name: value for name, value in data["opt"].items()},
    }


def _by_part(arrays: Mapping[str, Any], counters: Mapping[str, int]) -> dict[str, Any]:
    """Inverse of `_named`, as agents load it."""
    opt = {k.removeprefix(OPT): v for k, v in arrays.items() if k.startswith(OPT)}
    params = {k: v for k, v in arrays.items() if not k.startswith(OPT)}
    return {"params": params, "opt": opt, "counters": dict(counters)}


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
