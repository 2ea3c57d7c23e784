"""Draws learning curves; in the process of the suite, or in one of its own.

    draw_tasks(tasks, folder / "curves.png")   # A small curve for every task.

Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamerv3.suite.curves import PlotError
from dreamerv3.suite.score_table import TaskScores

DPI = 150  # Pixels per inch.
COLORS = ("#1f6fb4", "#d9622b", "#2e8b57", "#8e5bb5", "#b8860b", "#c2447a")
INK, FAINT, GRID = "#333333", "#777777", "#e4e4e4"
PANEL = (300, 220)  # Pixels of a task's panel.
MARGINS = 90  # Pixels of the legend above all panels and the unit below.
MOST_COLUMNS = 6


def draw_tasks(tasks: Sequence[TaskScores], out: Path) -> None:
    """Draws a panel for every task: the mean over seeds, and the published mean.

    Bands reach from the lowest to the highest seed. With a single seed, dots show its
    episodes.

    Raises:
      PlotError: matplotlib is missing, there is nothing to draw, or the file cannot be
        written.
    """
    if not tasks:
        raise PlotError("expected runs with at least one episode, found none.")
    columns = min(MOST_COLUMNS, math.ceil(math.sqrt(len(tasks) * 1.5)))
    rows = math.ceil(len(tasks) / columns)
    figure = new_figure(max(columns, 2) * PANEL[0], rows * PANEL[1] + MARGINS)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, task in zip(grid.flat, tasks):
        _draw_task(axes, task)
    for axes in list(grid.flat)[len(tasks) :]:
        axes.set_visible(False)
    add_legend(figure, columns=2)
    units = sorted({task.unit for task in tasks})
    figure.supxlabel(" or ".join(units), fontsize=9, color=INK)
    write_figure(figure, out)


def _draw_task(axes: Any, task: TaskScores) -> None:
    from matplotlib.ticker import MaxNLocator

    style_axes(axes, ticks=4)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(labelsize=7)
    seeds = f", {len(task.runs)} seeds" if len(task.runs) > 1 else ""
    name = task.task.partition("_")[2].replace("_", " ") or task.task
    axes.set_title(f"{name}{seeds}", loc="left", fontsize=9, color=INK)
    unit = np.array([task.told(index) for index in range(len(task.steps))], float)
    per_step = task.published.per_step if task.published else 1
    if task.published:
        published = task.published
        axes.fill_between(
            *(unit, published.seeds.min(0), published.seeds.max(0)),
            color=FAINT,
            alpha=0.15,
            linewidth=0,
        )
        label = "published: mean and range of seeds"
        line = {"color": FAINT, "linestyle": (0, (4, 2)), "linewidth": 1.2}
        axes.plot(unit, published.mean, label=label, **line)
    if len(task.runs) == 1:
        run = task.runs[0]
        axes.plot(
            *(run.steps * per_step, run.values, "o"),
            color=COLORS[0],
            alpha=0.25,
            markersize=2,
            markeredgewidth=0,
        )
    _draw_runs(axes, unit, task.scores)
    axes.set_xlim(left=0)


def _draw_runs(axes: Any, steps: np.ndarray, scores: np.ndarray) -> None:
    """Draws runs, scores [R, N], and their mean where the most runs have a score.

    Further on, the mean of fewer runs would jump by chance.
    """
    counts = (~np.isnan(scores)).sum(0)
    if not counts.any():
        return
    if len(scores) > 1:
        for row in scores:
            axes.plot(steps, row, color=COLORS[0], linewidth=0.6, alpha=0.4)
    steps, scores = steps[counts == counts.max()], scores[:, counts == counts.max()]
    if len(scores) > 1:
        axes.fill_between(
            *(steps, np.nanmin(scores, 0), np.nanmax(scores, 0)),
            color=COLORS[0],
            alpha=0.15,
            linewidth=0,
        )
    axes.plot(
        *(steps, np.nanmean(scores, 0)),
        color=COLORS[0],
        linewidth=1.8,
        marker="o",
        markersize=2.5,
        label="ours: mean and range of seeds",
    )


# Shared by all pictures of curves.


def new_figure(width: int, height: int) -> Any:
    """Makes a figure, sized in pixels, without pyplot, which keeps global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(
            f"expected the package matplotlib, which cannot be imported ({error}). "
            f"Run: pip install 'dreamerv3-parallel[plot]'"
        ) from error
    size = (width / DPI, height / DPI)
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_legend(figure: Any, columns: int) -> None:
    """Puts one legend above all panels, with each label once."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def style_axes(axes: Any, ticks: int) -> None:
    """Reduces the axes to what helps to read values, with about `ticks` intervals."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10]))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def write_figure(figure: Any, out: Path) -> None:
    """Writes a figure as PNG or SVG; equal curves become equal files."""
    import matplotlib

    content = io.BytesIO()
    kind = out.suffix.lower().removeprefix(".")
    # Omit the version of the library, the date, and random names.
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    with matplotlib.rc_context({"svg.hashsalt": "dreamerv3"}):
        figure.savefig(content, format=kind, metadata=metadata)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content.getvalue())
    except OSError as error:
        raise PlotError(f"--out: {out} cannot be written ({error}).") from error
