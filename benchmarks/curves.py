"""Reads scores of runs and turns them into curves; in the process that plots."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamerv3.cli.config import (
    ConfigError,
    Values,
    flatten,
    read_blocks,
    run_config,
)

SCORE = "episode/score"
SCORES, METRICS = "scores.jsonl", "metrics.jsonl"
REFERENCES = Path(__file__).with_name("reference_curves.json")


class PlotError(ValueError):
    """There is nothing to draw, or no way to; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one logdir tells.

    Attributes:
      task: the task's full name.
      size: the name of the block of sizes, or a few words where none fits.
      seed: that of the configuration.
      repeat: frames of each agent step.
      steps: [N] float64, ascending; agent steps at which the values were logged.
      values: [N] float64.
      config: the configuration, by full key.
    """

    task: str
    size: str
    seed: int
    repeat: int
    steps: np.ndarray
    values: np.ndarray
    config: Mapping[str, Any]

    def until(self, step: float) -> Run:
        """What happened up to an agent step."""
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
class Reference:
    """A published curve: `values` [N] at `steps` [N], in agent steps."""

    label: str
    steps: np.ndarray
    values: np.ndarray

    def until(self, step: float) -> Reference:
        """The curve up to an agent step, with its value there between two points."""
        steps = np.unique(np.minimum(self.steps, step))
        values = np.interp(steps, self.steps, self.values)
        return Reference(self.label, steps, values)


@dataclasses.dataclass(frozen=True)
class Band:
    """Several runs as one curve: [N] float64 each, at the middles of bins."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


# Curves.


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of each value and up to `window - 1` before it, [N] float64."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def bin_means(
    steps: np.ndarray, values: np.ndarray, width: float, bins: int
) -> np.ndarray:
    """Averages values over bins of steps.

    Args:
      steps: [N] agent steps, ascending.
      values: [N].
      width: agent steps of a bin; the first begins at 0.
      bins: how many there are; what lies beyond the last belongs to it.

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


def band(runs: Sequence[Run], width: float) -> Band:
    """Returns mean, least and most over runs, in the bins that every run covers."""
    last = max(run.steps[-1] for run in runs)
    bins = max(1, math.ceil(last / width))
    rows = np.stack([bin_means(run.steps, run.values, width, bins) for run in runs])
    covered = ~np.isnan(rows).any(0)
    rows = rows[:, covered]
    middles = (np.flatnonzero(covered) + 0.5) * width
    return Band(middles, rows.mean(0), rows.min(0), rows.max(0))


def default_window(count: int) -> int:
    """Episodes of a running mean: a tenth of them, at most 100."""
    return max(1, min(100, round(count / 10)))


# Files.


def read_run(logdir: str | Path, metric: str = SCORE) -> Run:
    """Reads configuration and values of one run.

    Raises:
      PlotError: files are missing or damaged, or the metric is not in them.
    """
    logdir = Path(logdir)
    if not logdir.is_dir():
        raise PlotError(f"{logdir}: expected the logdir of a run, but it is no folder.")
    try:
        config = flatten(dict(run_config(logdir)))
    except (ConfigError, OSError) as error:
        raise PlotError(" ".join(str(error).split())) from error
    repeat = config.get(f"env.{config['task'].partition('_')[0]}.repeat", 1)
    steps, values = read_metric(logdir, metric)
    return Run(
        task=config["task"],
        size=model_size(config),
        seed=config["seed"],
        repeat=repeat,
        steps=steps / repeat,
        values=values,
        config=config,
    )


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
    """Reads JSON lines; the last may be half written, by a run that goes on."""
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
            row = json.loads(line, parse_constant=_not_a_value)
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


def _not_a_value(name: str) -> None:
    """Reads NaN and infinities, which our files have as null, the same way."""


def model_size(config: Mapping[str, Any]) -> str:
    """Names the block of sizes that would change nothing about a configuration."""
    if config["random_agent"]:
        return "random agent"
    for name, block in read_blocks().items():
        if name.startswith("size"):
            values = Values(dict(config))
            for key, value in flatten(block).items():
                values.set(key, [value])
            if values.flat == config:
                return name
    return f"{config['agent.dyn.rssm.deter']} recurrent units"


def read_reference(run: Run, name: str | None = None) -> Reference | None:
    """Finds the published curve to show beside a run.

    Args:
      run: says the task, where no name does, and the frames of a step.
      name: a task of `reference_curves.json`, or `none`.

    Raises:
      PlotError: there is no curve of that name.
    """
    curves = json.loads(REFERENCES.read_text("utf-8"))["curves"]
    if name == "none" or (name is None and run.task not in curves):
        return None
    if name is not None and name not in curves:
        raise PlotError(
            f"--reference: expected none or one of {', '.join(curves)}, got {name}."
        )
    curve = curves[name or run.task]
    alike = all(run.config.get(key) == value for key, value in curve["config"].items())
    if name is None and not alike:
        return None
    repeat = run.repeat if curve["unit"] == "frames" else 1
    seeds = f", mean of {curve['seeds']} seeds" if curve["seeds"] else ""
    task = "" if name in (None, run.task) else f" {name}"
    return Reference(
        f"published{task}{seeds}",
        np.array(curve["steps"], np.float64) / repeat,
        np.array(curve["scores"], np.float64),
    )
