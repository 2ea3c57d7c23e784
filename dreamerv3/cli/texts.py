"""Texts that the command line prints: summaries, and failures of environments.

In the main process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import pathlib
import re
import textwrap
import traceback
from importlib import metadata

import elements

import dreamerv3
import embodied
from dreamerv3.cli.logdir import MANIFEST
from dreamerv3.suite.curves import SCORE, PlotError, read_metric
from embodied.checkpoint import Checkpoint
from embodied.driver import EnvError
from embodied.envs.registry import PACKAGE
from embodied.run import TrainResult
from embodied.run.collecting import RECENT_EPISODES

# Types of errors that a wrong command line causes, rather than an event in the run.
USAGE_ERRORS = (
    *("UnknownTask", "MissingExtra", "UnusableEnv", "UnsupportedSpace"),
    *("ObservationError", "ReplayMemoryError", "ConfigError"),
)
NO_TRACEBACK = (
    *USAGE_ERRORS,
    "SpaceError",
    "DiskTooSmallError",
    "StopTimeout",
)  # Errors whose message needs no traceback.

_OURS = tuple(
    f"{path}/"
    for path in (
        pathlib.Path(embodied.__file__).parent,
        pathlib.Path(dreamerv3.__file__).parent,
    )
)
# Files whose frames only call other code or pass errors on.
_PASSED_ON = (*_OURS, contextlib.__file__)
_FRAME = r'  File "(?P<path>.*?)", line \d+.*\n(?:    .*\n|  \[.*\n)*'
_FRAMES = re.compile(rf"(?:{_FRAME.replace('?P<path>', '?:')})+")


def summary(config: elements.Config, result: TrainResult) -> str:
    """Returns a summary of a program, and of the files in its logdir."""
    rate = result.steps / result.seconds if result.seconds else 0.0
    trains = config.script != "rollout"
    few, mean = min(RECENT_EPISODES, result.episodes), result.mean_score
    score = "" if mean is None else f", mean score of the last {few}: {mean:.3g}"
    trained = f" and {result.updates} updates" if trains else ""
    # `result.step` includes earlier calls, `result.steps` does not.
    total = "" if result.step == result.steps else f", now at step {result.step}"
    line = (
        f"{result.steps} steps{trained} in {result.seconds:.1f} s "
        f"({rate:.0f} steps/s), {result.episodes} episodes{score}{total}."
    )
    return "\n".join([line, *files(config, trains)])


def parallel_summary(config: elements.Config, seconds: float) -> str:
    """Returns a summary of a parallel run, and of the files in its logdir."""
    line = f"Done in {seconds:.0f} s"
    saved = Checkpoint(config.logdir).last()
    if saved is not None:
        line += f", at step {saved.meta.get('step', 0)}"
    # Without jsonl among the outputs, or before an episode has ended, there are none.
    with contextlib.suppress(PlotError):
        newest = read_metric(pathlib.Path(config.logdir), SCORE)[1][-RECENT_EPISODES:]
        mean = newest.mean()
        line += f", mean score of the last {len(newest)} episodes {mean:.3g}"
    return "\n".join([f"{line}.", *files(config, trained=True)])


def files(config: elements.Config, trained: bool) -> list[str]:
    """Returns a line for each kind of file in the logdir."""
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
        f"  {', '.join(saved):<15} the policy and its training: the same command "
        "continues,"
    )
    lines.append(f"{'':<18}and {play} plays it")
    return lines


def package_version() -> str:
    """Returns the version of the package, or a phrase if it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "from a folder of sources"


def _tensorboard(logdir: str) -> str:
    """Returns the command that shows event files."""
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
    return with_traceback(text, error.kind, trim_traceback(where))


def with_traceback(text: str, kind: str, where: str) -> str:
    """Adds a traceback, unless there is none or the text is clear without it.

    Args:
      text: what happened.
      kind: name of the error's type.
      where: the traceback.
    """
    if kind in NO_TRACEBACK or not where:
        return text
    return f"{text}\n\n{textwrap.indent(where.rstrip(), '  ')}"


def trim_traceback(where: str) -> str:
    """Returns a traceback without this project's frames above the first foreign one.

    A traceback with only this project's frames is kept, because the mistake is in them.
    """
    return _FRAMES.sub(_without_our_calls, where)


def _without_our_calls(match: re.Match[str]) -> str:
    frames = list(re.finditer(_FRAME, match[0]))
    foreign = itertools.dropwhile(
        lambda frame: frame["path"].startswith(_PASSED_ON), frames
    )
    return "".join(frame[0] for frame in foreign) or match[0]
