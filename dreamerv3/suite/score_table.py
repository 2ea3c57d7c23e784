"""Compares the scores of runs in a folder with published ones, in files there.

    scores.csv    the mean score of every run in the interval before each step
    table.json    our and the published scores, per task and over each suite
    table.md      the same for people

In the process that runs the suite, or later on folders that were made elsewhere.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamerv3.cli.config import FILENAME
from dreamerv3.suite import aggregates
from dreamerv3.suite.curves import Curve, PlotError, read_run
from dreamerv3.suite.presets import PublishedCurve, find_published
from embodied.checkpoint import write_file

INTERVALS = 10  # Of a task without published scores.
COLUMNS = ("task", "seed", "step", "unit", "score", "episodes", "logdir")
SETTINGS = ("run.train_ratio", "run.envs", "run.steps", "batch_size", "batch_length")
NAMES = {"mean": "mean", "median": "median", "iqm": "interquartile mean"}


@dataclasses.dataclass(frozen=True)
class TaskScores:
    """Runs of one task, and their scores at some steps.

    Attributes:
      task: full name.
      runs: the runs, R of them.
      published: published scores of the task; None if there are none.
      steps: [N] float64, agent steps.
      scores: [R, N] float64, mean of the episodes that ended in the interval before
        each step, or in the last interval in which one ended; NaN where a run has not
        reached the step or has ended no episode by then.
      episodes: [R, N] int64, how many ended in the interval before.
    """

    task: str
    runs: tuple[Curve, ...]
    published: PublishedCurve | None
    steps: np.ndarray
    scores: np.ndarray
    episodes: np.ndarray

    @property
    def unit(self) -> str:
        """Unit in which steps are reported."""
        return self.published.unit if self.published else "agent steps"

    def told(self, index: int) -> int:
        """Returns the step at an index, in `unit`."""
        per_step = self.published.per_step if self.published else 1
        return round(float(self.steps[index]) * per_step)

    @property
    def compared(self) -> int | None:
        """Index of the last step where the most runs have scores; None if none has."""
        counts = (~np.isnan(self.scores)).sum(0)
        if not counts.any():
            return None
        return int(np.flatnonzero(counts == counts.max())[-1])

    def at(self, index: int) -> np.ndarray:
        """Returns the scores of the runs that have one at a step."""
        column = self.scores[:, index]
        return column[~np.isnan(column)]


def find_runs(folder: Path) -> tuple[list[Curve], list[str]]:
    """Reads the runs in a folder and up to two levels below it.

    Returns:
      The runs, and a sentence for each run that cannot be read yet.
    """
    runs, problems = [], []
    for pattern in ("", "*/", "*/*/"):
        for path in sorted(folder.glob(f"{pattern}{FILENAME}")):
            try:
                runs.append(read_run(path.parent))
            except PlotError as error:
                problems.append(str(error))
    return runs, problems


def group_by_task(runs: Sequence[Curve]) -> list[TaskScores]:
    """Groups runs by task and scores them, in the order of suites and names."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for run in runs:
        published = find_published(run.config, run.task)
        suite = published.suite if published else ""
        groups.setdefault((suite, run.task), []).append(run)
    return [_score(groups[key]) for key in sorted(groups)]


def _score(runs: list[Curve]) -> TaskScores:
    runs = sorted(runs, key=lambda run: (run.seed, run.logdir))
    published = find_published(runs[0].config, runs[0].task)
    steps = published.steps if published else _even_steps(runs)
    # Published scores of some suites are unevenly spaced. Intervals are as long as the
    # shortest distance, so that a score is that of the policy at its step.
    width = float(np.diff(steps, prepend=0.0).min())
    rows = [interval_scores(run, steps, width) for run in runs]
    return TaskScores(
        task=runs[0].task,
        runs=tuple(runs),
        published=published,
        steps=steps,
        scores=np.stack([scores for scores, _ in rows]),
        episodes=np.stack([episodes for _, episodes in rows]),
    )


def _even_steps(runs: Sequence[Curve]) -> np.ndarray:
    """Returns evenly spaced steps up to the end of runs, or up to the reached step."""
    reached = max(run.reached for run in runs)
    end = max(float(run.config["run.steps"]) for run in runs)
    if reached < end / INTERVALS:  # By default runs have no end.
        end = reached
    return np.arange(1, INTERVALS + 1) * (max(end, 1.0) / INTERVALS)


def interval_scores(
    run: Curve, steps: np.ndarray, width: float
) -> tuple[np.ndarray, np.ndarray]:
    """Averages the episodes that ended in the intervals before some steps.

    Args:
      run: scores of the episodes.
      steps: [N] float64, agent steps.
      width: agent steps of an interval, which includes its end but not its beginning.

    Returns:
      Scores [N] float64 and numbers of episodes [N] int64; see `TaskScores`.
    """
    scores = np.full(len(steps), np.nan)
    episodes = np.zeros(len(steps), np.int64)
    for index, step in enumerate(steps):
        if run.reached < step:
            break
        inside = (run.steps > step - width) & (run.steps <= step)
        episodes[index] = inside.sum()
        if inside.any():
            scores[index] = run.values[inside].mean()
        elif (run.steps <= step).any():
            # Long episodes leave intervals empty: the last interval with one counts.
            last = run.steps[run.steps <= step][-1]
            near = (run.steps > last - width) & (run.steps <= last)
            scores[index] = run.values[near].mean()
    return scores, episodes


# Tables.


def make_table(tasks: Sequence[TaskScores]) -> dict[str, Any]:
    """Returns the scores per task and over the tasks of each suite, for JSON."""
    rows = [row for task in tasks if (row := _task_row(task))]
    return {
        "settings": _settings([run for task in tasks for run in task.runs]),
        "tasks": rows,
        "suites": {
            suite: _suite_row([task for task in tasks if _suite_of(task) == suite])
            for suite in sorted({_suite_of(task) for task in tasks} - {""})
        },
    }


def _suite_of(task: TaskScores) -> str:
    known = task.published is not None and task.compared is not None
    return task.published.suite if known and task.published else ""


def _task_row(task: TaskScores) -> dict[str, Any] | None:
    index = task.compared
    if index is None:
        return None
    scores = task.at(index)
    counted = ~np.isnan(task.scores[:, index])
    row: dict[str, Any] = {
        "task": task.task,
        "suite": task.published.suite if task.published else "",
        "step": task.told(index),
        "unit": task.unit,
        "seeds": [run.seed for run, known in zip(task.runs, counted) if known],
        "scores": scores.tolist(),
        "mean": dataclasses.asdict(aggregates.mean_score(scores)),
    }
    if task.published:
        published = task.published.seeds[:, index]
        normalised = _normalise(task, scores), _normalise(task, published)
        row["normalised"] = float(normalised[0].mean())
        row["published"] = {
            "seeds": len(published),
            "mean": dataclasses.asdict(aggregates.mean_score(published)),
            "normalised": float(normalised[1].mean()),
        }
    return row


def _suite_row(tasks: Sequence[TaskScores]) -> dict[str, Any]:
    ours, published = [], []
    for task in tasks:
        index = task.compared
        assert index is not None and task.published is not None
        ours.append(_normalise(task, task.at(index)))
        published.append(_normalise(task, task.published.seeds[:, index]))
    return {
        "tasks": len(tasks),
        "runs": sum(map(len, ours)),
        "ours": _aggregates(ours),
        "published": _aggregates(published),
    }


def _aggregates(scores: Sequence[np.ndarray]) -> dict[str, Any]:
    estimates = aggregates.aggregate(scores)
    return {name: dataclasses.asdict(value) for name, value in estimates.items()}


def _normalise(task: TaskScores, scores: np.ndarray) -> np.ndarray:
    assert task.published is not None
    low, high = task.published.bounds
    return (scores - low) / (high - low)


def _settings(runs: Sequence[Curve]) -> dict[str, list[Any]]:
    """Returns the distinct values that a few settings have among runs."""
    found: dict[str, list[Any]] = {"size": sorted({run.size for run in runs})}
    for key in SETTINGS:
        found[key] = sorted({run.config[key] for run in runs})
    repeats = sorted({run.repeat for run in runs})
    return {**found, "action repeat": repeats}


def scores_csv(folder: Path, tasks: Sequence[TaskScores]) -> str:
    """Returns CSV with a line for every run and step at which it has a score.

    Args:
      folder: the logdirs of the runs are written relative to it.
      tasks: the runs.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for task in tasks:
        for run, scores, episodes in zip(task.runs, task.scores, task.episodes):
            where = os.path.relpath(run.logdir, folder)
            for index, score in enumerate(scores.tolist()):
                if not math.isnan(score):
                    row = (task.task, run.seed, task.told(index), task.unit)
                    found = (f"{score:.6g}", episodes[index], where)
                    writer.writerow([*row, *found])
    return text.getvalue()


def table_markdown(table: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Returns a table that `make_table` has made as Markdown."""
    settings = "; ".join(
        f"{key} {' and '.join(map(_number, values))}"
        for key, values in table["settings"].items()
        if values
    )
    lines = ["# Scores", "", *([f"{settings}.", ""] if settings else [])]
    lines += [*(f"- {note}" for note in notes), ""] if notes else []
    lines += [
        "| task | step | runs | score | 95% interval | published | its seeds "
        "| 95% interval | normalised | published |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for row in table["tasks"]:
        mean, published = row["mean"], row.get("published")
        cells = [row["task"], f"{row['step']:,}", str(len(row["scores"]))]
        cells += [_number(mean["value"]), _range(mean["interval"])]
        if published:
            mean = published["mean"]
            cells += [_number(mean["value"]), str(published["seeds"])]
            cells += [_range(mean["interval"]), f"{row['normalised']:.3f}"]
            cells += [f"{published['normalised']:.3f}"]
        else:
            cells += ["–"] * 5
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_units(table), ""]
    for suite, content in table["suites"].items():
        lines += _suite_lines(suite, content)
    return "\n".join(lines)


def _units(table: Mapping[str, Any]) -> list[str]:
    units = sorted({row["unit"] for row in table["tasks"]})
    if not units:
        return ["No run has reached a step at which scores are compared."]
    return [
        f"Steps are {' or '.join(units)}: the last one that most of the task's runs "
        "have reached. A score is the mean of the episodes that ended in the interval "
        "before it; intervals are a bootstrap over runs."
    ]


def _suite_lines(suite: str, content: Mapping[str, Any]) -> list[str]:
    kind = "human-normalised" if suite.startswith("atari") else "share of full score"
    lines = [
        f"## {suite}: {content['tasks']} tasks, {content['runs']} runs, {kind}",
        "",
        "| | ours | 95% interval | published, same tasks and steps | 95% interval |",
        "| --- | ---: | --- | ---: | --- |",
    ]
    for name, title in NAMES.items():
        ours, published = content["ours"][name], content["published"][name]
        cells = [title, f"{ours['value']:.3f}", _range(ours["interval"], 3)]
        cells += [f"{published['value']:.3f}", _range(published["interval"], 3)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value
    digits = 0 if abs(value) >= 100 or value == int(value) else 1
    return f"{value:,.{digits}f}" if abs(value) >= 1 or not value else f"{value:.3g}"


def _range(interval: Sequence[float] | None, digits: int | None = None) -> str:
    if interval is None:
        return "–"
    shown = [_number(x) if digits is None else f"{x:.{digits}f}" for x in interval]
    return f"{shown[0]} to {shown[1]}"


def write_tables(
    folder: Path, tasks: Sequence[TaskScores], notes: Sequence[str] = ()
) -> None:
    """Writes scores.csv, table.json and table.md, each of them atomically."""
    table = {**make_table(tasks), "notes": list(notes)}
    write_file(folder, "scores.csv", scores_csv(folder, tasks).encode())
    write_file(folder, "table.json", f"{json.dumps(table, indent=1)}\n".encode())
    write_file(folder, "table.md", table_markdown(table, notes).encode())
