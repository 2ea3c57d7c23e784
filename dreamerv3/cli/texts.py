"""Texts that the command line prints: summaries, and failures of environments.

In the main process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import pathlib
import re
import textwrap
import traceback
from importlib import metadata

import elements

import dreamerv3
import embodied
from dreamerv3.cli.logdir import MANIFEST
from embodied.driver import EnvError
from embodied.envs.registry import PACKAGE
from embodied.run import TrainResult
from embodied.run.collecting import RECENT

# Types of errors that come from a wrong command line, rather than on the way.
MISTAKES = (
    *("UnknownTask", "MissingExtra", "UnusableEnv", "UnsupportedSpace"),
    *("ObservationError", "ReplayMemoryError", "ConfigError"),
)
CLEAR = (
    *MISTAKES,
    "SpaceError",
    "DiskTooSmallError",
    "StopTimeout",
)  # Their message says all.

_OURS = tuple(
    f"{path}/"
    for path in (
        pathlib.Path(embodied.__file__).parent,
        pathlib.Path(dreamerv3.__file__).parent,
    )
)
_PASSED_ON = (*_OURS, contextlib.__file__)  # Whose frames only call or pass errors on.
_FRAME = r'  File "(?P<path>.*?)", line \d+.*\n(?:    .*\n|  \[.*\n)*'
_FRAMES = re.compile(rf"(?:{_FRAME.replace('?P<path>', '?:')})+")


def summary(config: elements.Config, result: TrainResult) -> str:
    """Returns a summary of a program, and of the files in its logdir."""
    rate = result.steps / result.seconds if result.seconds else 0.0
    trains = config.script != "rollout"
    few, mean = min(RECENT, result.episodes), result.mean_score
    score = "" if mean is None else f", mean score of the last {few}: {mean:.3g}"
    trained = f" and {result.updates} updates" if trains else ""
    # The step counts earlier calls, too.
    total = "" if result.step == result.steps else f", now at step {result.step}"
    line = (
        f"{result.steps} steps{trained} in {result.seconds:.1f} s "
        f"({rate:.0f} steps/s), {result.episodes} episodes{score}{total}."
    )
    return "\n".join([line, *files(config, trains)])


def parallel_summary(config: elements.Config, seconds: float) -> str:
    """Returns a summary of a parallel run, and of the files in its logdir."""
    from embodied.checkpoint import Checkpoint

    line = f"Done in {seconds:.0f} s"
    saved = Checkpoint(config.logdir).last()
    if saved is not None:
        line += f", at step {saved.meta.get('step', 0)}"
    path = pathlib.Path(config.logdir, "scores.jsonl")
    if path.exists():
        rows = [json.loads(row) for row in path.read_text().splitlines()]
        scores = [row.get("episode/score") for row in rows]
        # Without those that are not numbers, of rewards that are not.
        scores = [score for score in scores if score is not None]
        if scores:
            newest = scores[-RECENT:]
            mean = sum(newest) / len(newest)
            line += f", mean score of the last {len(newest)} episodes {mean:.3g}"
    return "\n".join([f"{line}.", *files(config, trained=True)])


def files(config: elements.Config, trained: bool) -> list[str]:
    """Returns a line for each kind of file that the logdir has."""
    logdir = pathlib.Path(config.logdir)
    known = {
        "config.yaml": "the configuration",
        "metrics.jsonl": "all metrics, a JSON object per line",
        "scores.jsonl": "the score of every episode",
        "events.out.*": f"curves and videos: {_tensorboard(config.logdir)}",
        "scope": "metrics and videos for Scope",
    }
    lines = [f"Written to {logdir}:"]
    for name, meaning in known.items():
        if any(logdir.glob(name)):
            lines.append(f"  {name:<15} {meaning}")
    if not trained:
        return lines
    if not (logdir / MANIFEST).exists():
        return [*lines, "No checkpoint: the run has ended before the first one."]
    play = f"--script eval_only --logdir {logdir}"
    saved = [name for name in ("ckpt", "replay") if (logdir / name).exists()]
    lines.append(
        f"  {', '.join(saved):<15} the policy and its training: the same command goes "
        "on,"
    )
    lines.append(f"{'':<18}and {play} plays it")
    return lines


def package_version() -> str:
    """Returns the version of the package; it has none where it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "from a folder of sources"


def _tensorboard(logdir: str) -> str:
    """Returns how to look at event files."""
    show = f"tensorboard --logdir {logdir}"
    if importlib.util.find_spec("tensorboard") is not None:
        return show
    return f"pip install '{PACKAGE}[tensorboard]', then {show}"


def env_failure(error: EnvError) -> str:
    """Returns the text to show for a failed environment of this process."""
    where = error.traceback
    if not where and error.__cause__ is not None:
        where = "".join(traceback.format_exception(error.__cause__))
    text = f"Env {error.index} {error.reason}"
    return with_traceback(text, error.kind, foreign_part(where))


def with_traceback(text: str, kind: str, where: str) -> str:
    """Adds a traceback, unless there is none or the text says all.

    Args:
      text: what happened.
      kind: name of the error's type.
      where: the traceback.
    """
    if kind in CLEAR or not where:
        return text
    return f"{text}\n\n{textwrap.indent(where.rstrip(), '  ')}"


def foreign_part(where: str) -> str:
    """Returns a traceback without our frames above the first one of somebody else.

    One that has only ours remains as it is: the mistake is there.
    """
    return _FRAMES.sub(_without_our_calls, where)


def _without_our_calls(match: re.Match[str]) -> str:
    frames = list(re.finditer(_FRAME, match[0]))
    foreign = itertools.dropwhile(
        lambda frame: frame["path"].startswith(_PASSED_ON), frames
    )
    return "".join(frame[0] for frame in foreign) or match[0]
