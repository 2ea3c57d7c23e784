"""Scores of several runs and tasks as one number with its interval. Any process.

The method is that of Agarwal et al., "Deep Reinforcement Learning at the Edge of the
Statistical Precipice" (2021), which the package rliable implements: the interquartile
mean over all runs, and intervals by a bootstrap that resamples runs within each task.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 5000
CONFIDENCE = 0.95
MOST_REPEATED = 2520  # Runs of a task, each repeated; above, weights are rounded.
BLOCK = 1 << 21  # Scores that are drawn at a time, to bound memory.
SEED = 0  # So that the same runs give the same table.


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval.

    Attributes:
      value: the number.
      interval: its bounds; None if no task has more than one run, since a single run
        does not show how much runs differ.
    """

    value: float
    interval: tuple[float, float] | None


def task_mean(scores: np.ndarray) -> np.ndarray:
    """Returns the mean of `scores` [..., tasks, runs]."""
    return scores.mean((-2, -1))


def task_median(scores: np.ndarray) -> np.ndarray:
    """Returns the median over tasks of the means over runs of [..., tasks, runs]."""
    return np.median(scores.mean(-1), axis=-1)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Returns the mean of the middle half of all runs of [..., tasks, runs].

    A quarter of the runs, rounded down, is left out at each end.
    """
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(-1)


METRICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": task_mean,
    "median": task_median,
    "iqm": interquartile_mean,
}


def mean_score(scores: np.ndarray) -> Estimate:
    """Returns the mean over the runs of one task, `scores` [R] float64."""
    return aggregate([scores])["mean"]


def aggregate(
    tasks: Sequence[np.ndarray], resamples: int = RESAMPLES
) -> dict[str, Estimate]:
    """Aggregates the scores of several tasks.

    Args:
      tasks: normalised scores of the runs of each task, [R] float64; tasks may have
        different numbers of runs and weigh the same.
      resamples: how often runs are resampled for the intervals.

    Returns:
      Estimates of `METRICS`, by name.
    """
    # Repeat runs until all tasks have the same number, so that they weigh the same.
    runs = min(MOST_REPEATED, math.lcm(*(len(scores) for scores in tasks)))
    rng = np.random.default_rng(SEED)

    def stack(drawn: Sequence[np.ndarray]) -> np.ndarray:
        places = np.arange(runs)
        rows = [row[..., places * row.shape[-1] // runs] for row in drawn]
        return np.stack(rows, axis=-2)

    measured = stack(tasks)
    several = any(len(scores) > 1 for scores in tasks)
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in METRICS}
    for size in _blocks(resamples, measured.size) if several else ():
        sample = stack(
            [
                scores[rng.integers(len(scores), size=(size, len(scores)))]
                for scores in tasks
            ]
        )
        for name, metric in METRICS.items():
            drawn[name].append(metric(sample))
    return {
        name: Estimate(float(metric(measured)), _interval(drawn[name]))
        for name, metric in METRICS.items()
    }


def _blocks(resamples: int, size: int) -> list[int]:
    """Splits resamples of `size` values each into parts that fit into memory."""
    most = max(1, BLOCK // size)
    whole, rest = divmod(resamples, most)
    return [most] * whole + [rest] * (rest > 0)


def _interval(parts: Sequence[np.ndarray]) -> tuple[float, float] | None:
    if not parts:
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(parts), [tail, 1 - tail])
    return float(low), float(high)
