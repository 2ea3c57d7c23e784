"""Scores of runs as curves over agent steps; in the process that plots or compares."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamerv3.cli.config import (
    ConfigError,
    action_repeat,
    flatten,
    read_blocks,
    run_config,
)
from dreamerv3.cli.schema import Flat

SCORE = "episode/score"
SCORES, METRICS = "scores.jsonl", "metrics.jsonl"
ENDED = 0.9  # Share of its steps after which a run without metrics counts as ended.
TAIL_BYTES = 1 << 16  # Of a metrics file, whose lines have a few thousand bytes.


class PlotError(ValueError):
    """There is nothing to draw, or it cannot be drawn; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Scores, or another metric, of one run over its steps.

    Attributes:
      task: the task's full name.
      size: the name of the matching size block, or a few words if none matches.
      seed: the seed in the configuration.
      repeat: frames of each agent step.
      steps: [N] float64, ascending; agent steps at which the values were logged.
      values: [N] float64.
      config: the configuration, by full key.
      reached: agent step that the run has reached, with or without an episode's end.
      logdir: folder of the run.
    """

    task: str
    size: str
    seed: int
    repeat: int
    steps: np.ndarray
    values: np.ndarray
    config: Mapping[str, Any]
    reached: float = 0.0
    logdir: Path = Path()

    def until(self, step: float) -> Curve:
        """Returns the part up to an agent step."""
        kept = self.steps <= step
        if not kept.any():
            raise PlotError(
                f"--until: expected a step from {self.steps[0]:.0f} on, at which there "
                f"is a first value, got {step:g}."
            )
        return dataclasses.replace(
            self, steps=self.steps[kept], values=self.values[kept]
        )


@dataclasses.dataclass(frozen=True)
class Band:
    """Mean and range of several runs: [N] float64 each, at the middles of bins."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


# Curves.


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of each value and up to `window - 1` before it, [N] float64.

    Values that are not finite do not count; a mean of none is NaN.
    """
    there = np.isfinite(values)
    if window <= 1:  # Differences of sums would round.
        return np.where(there, values, np.nan)
    counts = np.concatenate([[0], np.cumsum(there)])
    sums = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    with np.errstate(invalid="ignore"):
        return (sums[ends] - sums[starts]) / (counts[ends] - counts[starts])


def bin_means(
    steps: np.ndarray, values: np.ndarray, width: float, bins: int
) -> np.ndarray:
    """Averages values over bins of steps.

    Args:
      steps: [N] agent steps, ascending.
      values: [N].
      width: agent steps of a bin; the first begins at 0.
      bins: how many there are; values beyond the last bin count in it.

    Returns:
      [bins] float64. A bin without values that lies between others is interpolated,
      one before the first or after the last is NaN.
    """
    index = np.minimum((steps // width).astype(int), bins - 1)
    counts = np.bincount(index, minlength=bins)
    sums = np.bincount(index, values, minlength=bins)
    filled = np.flatnonzero(counts)
    means = sums[filled] / counts[filled]
    return np.interp(np.arange(bins), filled, means, left=np.nan, right=np.nan)


def band(runs: Sequence[Curve], width: float) -> Band:
    """Returns mean, minimum and maximum over runs, in bins that every run covers."""
    last = max(run.steps[-1] for run in runs)
    bins = max(1, math.ceil(last / width))
    rows = np.stack([bin_means(run.steps, run.values, width, bins) for run in runs])
    covered = ~np.isnan(rows).any(0)
    rows = rows[:, covered]
    middles = (np.flatnonzero(covered) + 0.5) * width
    return Band(middles, rows.mean(0), rows.min(0), rows.max(0))


def default_window(count: int) -> int:
    """Returns the episodes of a running mean: a tenth of `count`, at most 100."""
    return max(1, min(100, round(count / 10)))


# Files.


def read_run(logdir: str | Path, metric: str = SCORE) -> Curve:
    """Reads configuration and values of one run.

    Raises:
      PlotError: files are missing or damaged, or the metric is not in them.
    """
    logdir = Path(logdir)
    if not logdir.is_dir():
        raise PlotError(f"{logdir}: expected the logdir of a run, but it is no folder.")
    try:
        config = run_config(logdir).flat
    except ConfigError as error:
        raise PlotError(" ".join(str(error).split())) from error
    repeat = action_repeat(config)
    steps, values = read_metric(logdir, metric)
    return Curve(
        task=config["task"],
        size=model_size(config),
        seed=config["seed"],
        repeat=repeat,
        steps=steps / repeat,
        values=values,
        config=config,
        reached=_reached(logdir, float(steps[-1]), repeat, config["run.steps"]),
        logdir=logdir,
    )


def _reached(logdir: Path, episode: float, repeat: int, end: int) -> float:
    """Returns the agent step that a run has reached.

    Args:
      logdir: of the run.
      episode: step at which its last episode ended, as logged.
      repeat: frames of an agent step.
      end: agent step at which the run ends.
    """
    if (logdir / METRICS).is_file():
        return max(episode, last_step(logdir)) / repeat
    # For results that were kept without their metrics, the last episode decides. The
    # episode in progress at the end of the run was cut off.
    step = episode / repeat
    return float(end) if ENDED * end <= step <= end else step


def last_step(logdir: Path) -> int:
    """Returns the newest step in the metrics of a run, as logged; 0 without any."""
    row = last_row(logdir / METRICS, "step")
    return int(row["step"]) if row else 0


def last_score(logdir: Path) -> float | None:
    """Returns the score of the newest episode of a run."""
    row = last_row(logdir / SCORES, SCORE)
    return float(row[SCORE]) if row else None


def last_row(path: Path, key: str) -> dict[str, Any] | None:
    """Returns the last JSON line with a number under `key`; reads only the end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        # The first line may be cut, and the last one half written.
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get(key), int | float):
                return row
    return None


def read_metric(logdir: Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps as they were logged, ascending, and values, both [N] float64."""
    names = (SCORES, METRICS) if metric == SCORE else (METRICS,)
    path = next((logdir / name for name in names if (logdir / name).is_file()), None)
    if path is None:
        raise PlotError(
            f"{logdir}: expected {' or '.join(names)} in it. Runs write them with "
            f"jsonl among --logger.outputs."
        )
    rows = [row for row in _read_rows(path) if row.get(metric) is not None]
    if not rows:
        raise PlotError(
            f"{path}: expected values of {metric}, found none. Has an episode ended?"
            if metric == SCORE
            else f"{path}: expected values of {metric}, found none. Is the name right?"
        )
    try:
        points = np.array([(row["step"], row[metric]) for row in rows], np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise PlotError(
            f"{path}: expected a number for step and for {metric} in each line "
            f"({error!r})."
        ) from error
    points = points[np.argsort(points[:, 0], kind="stable")]
    return points[:, 0], points[:, 1]


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads JSON lines; the last may be half written by a run in progress."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlotError(f"{path}: cannot be read ({error}).") from error
    whole, _, rest = text.rpartition("\n")
    rows = []
    lines = whole.split("\n") if whole else []
    for number, line in enumerate([*lines, rest], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_parse_nan_as_none)
            if not isinstance(row, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            if number > len(lines):
                break
            raise PlotError(
                f"{path}: line {number} is not a JSON object ({error})."
            ) from error
        rows.append(row)
    return rows


def _parse_nan_as_none(name: str) -> None:
    """Reads NaN and infinities as None, like the null that runs write for them."""


def model_size(config: Mapping[str, Any]) -> str:
    """Returns the name of the size block whose values a configuration has."""
    if config["random_agent"]:
        return "random agent"
    for name, block in _size_blocks().items():
        if all(
            config[key] == value
            for pattern, value in block.items()
            for key in config
            if re.fullmatch(pattern, key)
        ):
            return name
    return f"{config['agent.dyn.rssm.deter']} recurrent units"


@functools.cache
def _size_blocks() -> dict[str, Flat]:
    blocks = read_blocks().items()
    return {name: flatten(block) for name, block in blocks if name.startswith("size")}
