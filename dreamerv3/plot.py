"""Draws learning curves of finished or running runs; a program of its own.

    python -m dreamerv3.plot LOGDIR [LOGDIR ...] --out FILE.png
    python -m dreamerv3.plot 'logdir/*' --out curves.svg

Each dot is an episode, at the agent step at which it ended. A single run gets a running
mean. Runs with the same label are seeds of one curve, drawn as their mean in a band
from the lowest to the highest value. Runs of several tasks get a panel for each task.
The published curve of a task is drawn beside them in the same way if there is one
(`dreamerv3/suite/published.json`). Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

import argparse
import glob
import io
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dreamerv3.cli.config import FILENAME
from dreamerv3.suite import curves
from dreamerv3.suite.curves import Curve, PlotError
from dreamerv3.suite.presets import PublishedCurve, find_published, published_tasks

FORMATS = (".png", ".svg")
DPI = 150  # Pixels per inch.
COLORS = ("#1f6fb4", "#d9622b", "#2e8b57", "#8e5bb5", "#b8860b", "#c2447a")
INK, FAINT, GRID = "#333333", "#777777", "#e4e4e4"
WIDTH, HEIGHT = 1200, 720  # Pixels of the picture of one task.
PANEL = (480, 340)  # Pixels of a task's panel among several.
MARGIN = 60  # Pixels above all panels.
BINS = 25  # Of the mean over seeds, unless steps per bin are given.
LEGEND_COLUMNS, LEGEND_WIDTH = 3, 0.9  # At most; the width is a share of the picture's.


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the runs that the arguments name; returns 2 if it cannot, else 0."""
    try:
        out = render(**vars(parse(argv)))
    except PlotError as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    print(f"Written: {out}")
    return 0


def render(
    logdirs: Sequence[str | Path],
    out: str | Path,
    *,
    metric: str = curves.SCORE,
    labels: Sequence[str] | None = None,
    reference: str | None = None,
    steps_per: float | None = None,
    window: int | None = None,
    until: float | None = None,
) -> Path:
    """Draws runs, with a panel for each task if there are several.

    Args:
      logdirs: folders of the runs; may have wildcards, `**` for any depth.
      out: the file to write, which ends in .png or .svg.
      metric: what to draw over steps.
      labels: one for each run; runs with the same label are seeds of one curve. By
        default the size of the model.
      reference: task whose published curve to show, or `none`; by default the task of
        the runs, if it has such a curve and the metric is the score.
      steps_per: agent steps per bin of the mean over seeds.
      window: episodes in the running mean of a run; by default a tenth of its
        episodes, at most 100.
      until: agent step up to which to draw.

    Returns:
      The path of the picture.

    Raises:
      PlotError: files or packages are missing, or the files cannot be drawn.
    """
    out = Path(out)
    if out.suffix.lower() not in FORMATS:
        raise PlotError(
            f"--out: expected a file name that ends in {' or '.join(FORMATS)}, got "
            f"{out}."
        )
    folders = [folder for given in logdirs for folder in find_runs(given)]
    if labels is not None and len(labels) != len(folders):
        raise PlotError(
            f"--label: expected one for each of {len(folders)} runs, got {len(labels)}."
        )
    if not folders:
        raise PlotError("expected runs with at least one episode, found none.")
    end = math.inf if until is None else until
    runs = [curves.read_run(folder, metric).until(end) for folder in folders]
    tasks = _group(runs, labels or [run.size for run in runs])
    names = list(dict.fromkeys(label for groups in tasks for label in groups))
    colors = {label: COLORS[index % len(COLORS)] for index, label in enumerate(names)}
    figure, grid = _new_figure(len(tasks))
    for axes, groups in zip(grid, tasks):
        members = [run for runs in groups.values() for run in runs]
        _style_axes(axes, members, metric, 7 if len(tasks) > 1 else 9)
        published = _read_reference(members[0], metric, reference)
        if published and published.steps[0] <= end:
            _draw_reference(axes, published.until(end), members[0].task)
        last = max(float(run.steps[-1]) for run in members)
        width = steps_per or max(last / BINS, 1.0)
        for label, group in groups.items():
            _draw_group(axes, label, group, colors[label], width, window)
        axes.set_xlim(left=0)
    legend = _add_legend(figure)
    if len(tasks) > 1:
        # The panels keep their size, however many lines the legend has.
        lines = max(legend.get_window_extent().height - MARGIN, 0)
        figure.set_figheight(figure.get_figheight() + lines / DPI)
    _write_figure(figure, out)
    return out


def _group(
    runs: Iterable[Curve], labels: Iterable[str]
) -> list[dict[str, list[Curve]]]:
    """Returns the runs of each task by label.

    A task is another one with other observations if it is published with both.
    """
    tasks: dict[tuple[str, str], dict[str, list[Curve]]] = {}
    for run, label in zip(runs, labels):
        published = find_published(run.config, run.task)
        key = (run.task, published.suite if published else "")
        tasks.setdefault(key, {}).setdefault(label, []).append(run)
    return list(tasks.values())


def find_runs(given: str | Path) -> list[Path]:
    """Returns the logdirs that a path with or without wildcards stands for, sorted.

    Raises:
      PlotError: no logdir of a run matches the wildcards.
    """
    given = os.path.expanduser(given)
    if not glob.has_magic(given) or Path(given).exists():
        return [Path(given)]
    found = sorted(map(Path, glob.glob(given, recursive=True)))
    runs = [folder for folder in found if (folder / FILENAME).is_file()]
    if not runs:
        raise PlotError(
            f"{given}: expected wildcards that match logdirs of runs, which have a "
            f"{FILENAME}, found {len(found)} files and folders and no run."
        )
    return runs


def title(runs: Sequence[Curve]) -> str:
    """Returns task, sizes, and the number of seeds, or of runs if seeds repeat."""
    sizes = " and ".join(dict.fromkeys(run.size for run in runs))
    noun = "seed" if len({run.seed for run in runs}) == len(runs) else "run"
    plural = "" if len(runs) == 1 else "s"
    return f"{runs[0].task}, {sizes}, {len(runs)} {noun}{plural}"


def _read_reference(run: Curve, metric: str, name: str | None) -> PublishedCurve | None:
    """Finds the published curve to show beside a run: of its task or of task `name`."""
    if name == "none" or (name is None and metric != curves.SCORE):
        return None
    found = find_published(run.config, name or run.task)
    if name is not None and found is None:
        raise PlotError(
            f"--reference: expected none or one of {', '.join(published_tasks())}, as "
            f"the agent of the run sees them, got {name}."
        )
    return found


def _draw_reference(axes: Any, published: PublishedCurve, task: str) -> None:
    other = "" if published.task == task else f" {published.task}"
    low, high = published.seeds.min(0), published.seeds.max(0)
    axes.fill_between(published.steps, low, high, color=FAINT, alpha=0.15, linewidth=0)
    axes.plot(
        published.steps,
        published.mean,
        color=FAINT,
        linewidth=1.5,
        linestyle=(0, (4, 2)),
        marker="o",
        markersize=4.5,
        markerfacecolor="white",
        label=f"published{other}, mean and range of {len(published.seeds)} seeds",
    )


def _draw_group(
    axes: Any,
    label: str,
    runs: Sequence[Curve],
    color: str,
    width: float,
    window: int | None,
) -> None:
    """Draws one run, or several as the seeds of one curve."""
    alone = len(runs) == 1
    for run in runs:
        axes.plot(
            *(run.steps, run.values, "o"),
            color=color,
            alpha=0.3 if alone else 0.12,
            markersize=3.5,
            markeredgewidth=0,
        )
    if alone:
        count = len(runs[0].values)
        size = window or curves.default_window(count)
        begin = min(size, count) // 4  # The mean of few values is mostly noise.
        steps = runs[0].steps[begin:]
        mean = curves.running_mean(runs[0].values, size)[begin:]
        told = "running mean"
    else:
        for run in runs:
            line = curves.band([run], width)
            axes.plot(line.steps, line.mean, color=color, linewidth=0.7, alpha=0.45)
        band = curves.band(runs, width)
        axes.fill_between(
            band.steps, band.low, band.high, color=color, alpha=0.15, linewidth=0
        )
        steps, mean, told = band.steps, band.mean, f"mean and range of {len(runs)} runs"
    axes.plot(
        *(steps, mean),
        color=color,
        linewidth=2.2,
        marker="o" if len(mean) == 1 else None,
        label=f"{label}, {told}",
    )


# The figure around the curves.


def _new_figure(panels: int) -> tuple[Any, list[Any]]:
    """Makes a figure with axes for every panel.

    It does so without pyplot, which keeps global state.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(
            f"expected the package matplotlib, which cannot be imported ({error}). "
            f"Run: pip install 'dreamerv3-parallel[plot]'"
        ) from error
    columns = math.ceil(math.sqrt(panels))
    rows = math.ceil(panels / columns)
    width, height = columns * PANEL[0], rows * PANEL[1] + MARGIN
    if panels == 1:
        width, height = WIDTH, HEIGHT
    size = (width / DPI, height / DPI)
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[panels:]:
        axes.set_visible(False)
    return figure, grid


def _style_axes(axes: Any, runs: Sequence[Curve], metric: str, fontsize: int) -> None:
    """Adds the texts, and reduces the axes to what helps to read values."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=fontsize)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    repeat = runs[0].repeat
    frames = f" ({repeat} frames each)" if repeat > 1 else ""
    texts: dict[str, Any] = {"color": INK, "fontsize": fontsize + 1}
    axes.set_xlabel(f"agent steps{frames}", **texts)
    axes.set_ylabel(metric.replace("/", " "), **texts)
    axes.set_title(title(runs), loc="left", color=INK, fontsize=fontsize + 2)


def _add_legend(figure: Any) -> Any:
    """Puts one legend above all panels, with each label once, and returns it."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    for columns in range(LEGEND_COLUMNS, 0, -1):
        legend = figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            fontsize=9,
            labelcolor=INK,
        )
        fits = legend.get_window_extent().width <= LEGEND_WIDTH * figure.bbox.width
        if fits or columns == 1:
            break
        legend.remove()
    return legend


def _write_figure(figure: Any, out: Path) -> None:
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


# The command line.


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logdirs", nargs="+", metavar="LOGDIR")
    parser.add_argument("--out", required=True, metavar="FILE", help=".png or .svg")
    parser.add_argument("--metric", default=curves.SCORE)
    parser.add_argument(
        "--label",
        dest="labels",
        nargs="+",
        help="one per run; runs with equal labels are seeds of one curve",
    )
    parser.add_argument("--reference", help="task of a published curve, or none")
    parser.add_argument(
        "--steps-per", type=_positive(float), help="agent steps of a bin over seeds"
    )
    parser.add_argument(
        "--window", type=_positive(int), help="values in the running mean of a run"
    )
    parser.add_argument(
        "--until", type=_positive(float), help="agent step up to which to draw"
    )
    return parser.parse_args(argv)


def _positive(kind: type[int] | type[float]) -> Any:
    def convert(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
        return number

    return convert


if __name__ == "__main__":
    sys.exit(main())
