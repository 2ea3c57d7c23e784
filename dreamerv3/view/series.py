"""Metrics of a run as columns, read as they are appended. The view's server.

metrics = MetricFile(logdir / "metrics.jsonl")
metrics.update()                              # Reads what was appended since.
steps, values = metrics.column("train/loss")  # [N] float64 each.
steps, values = thin(steps, values, 800)
"""

from __future__ import annotations

import array
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 1 << 20  # Bytes that are parsed at once.
LINE = 1 << 16  # Bytes before a position in which a sample looks for a whole line.
TAIL = 256  # Bytes by which a file that was written anew is recognised.
MOST_NAMES = 5000  # Of metrics in one file; a run has a few hundred.
MOST_POINTS = 3_000_000  # Of one file in memory, 16 bytes each.
FEW_POINTS = 100  # Up to which a column is not thinned.
STEP = "step"


class MetricFile:
    """A file of JSON lines as columns, by name of the metric. Any thread.

    If what was read last is not there any more, the run went back to a checkpoint, and
    the file is read from its start. Lines that are not JSON objects are left out, as is
    a last line without its end. If a file has more than `MOST_POINTS` values, earlier
    ones are thinned.

    Args:
      path: of the file, which need not exist yet.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()  # Guards the fields below.
        self._tail = b""  # The last bytes that were read.
        self.forget()

    def forget(self) -> None:
        """Frees the memory; the next `update` reads the file from its start."""
        with self._lock:
            self._clear()

    def update(self) -> bool:
        """Reads the lines that were appended; returns whether there were any."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    return self._read(file)
            except OSError:
                return False

    @property
    def points(self) -> int:
        """Values in memory."""
        return self._points

    def names(self) -> list[str]:
        """Returns the names of all metrics, sorted."""
        with self._lock:
            return sorted(self._columns)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values, [N] float64 each, in the order of the file."""
        with self._lock:
            steps, values = self._columns.get(name, (array.array("d"),) * 2)
            return np.array(steps, np.float64), np.array(values, np.float64)

    def _read(self, file: Any) -> bool:
        file.seek(self._offset - len(self._tail))
        if file.read(len(self._tail)) != self._tail:
            self._clear()
        file.seek(self._offset)
        found = False
        while block := file.read(BLOCK):
            end = block.rfind(b"\n") + 1
            while not end and (more := file.read(BLOCK)):  # A very long line.
                block += more
                end = block.rfind(b"\n") + 1
            if not end:
                break
            self._offset += end
            self._tail = block[max(0, end - TAIL) : end]
            file.seek(self._offset)
            for row in parse_lines(block[:end]):
                self._add(row)
            if self._points > MOST_POINTS:
                self._thin()
            found = True
        return found

    def _clear(self) -> None:
        self._offset = self._points = 0
        self._tail = b""
        self._columns: dict[str, tuple[array.array, array.array]] = {}

    def _thin(self) -> None:
        """Leaves out half of every long column."""
        self._points = 0
        for name, (steps, values) in self._columns.items():
            if len(steps) > FEW_POINTS:
                x, y = np.array(steps, np.float64), np.array(values, np.float64)
                x, y = thin(x, y, len(x) // 2)
                steps, values = array.array("d", x), array.array("d", y)
                self._columns[name] = (steps, values)
            self._points += len(steps)

    def _add(self, row: dict[str, Any]) -> None:
        step = _finite(row.pop(STEP, None))
        if step is None:
            return
        for name, value in row.items():
            number = _finite(value)
            if number is None:
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_NAMES:
                    continue
                column = self._columns[name] = (array.array("d"), array.array("d"))
            column[0].append(step)
            column[1].append(number)
            self._points += 1


def _finite(value: Any) -> float | None:
    """Returns a finite number as a float; None for anything else."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is not int:
        return None
    try:
        return float(value)
    except OverflowError:  # A whole number beyond any float.
        return None


def parse_lines(block: bytes) -> list[dict[str, Any]]:
    """Returns the JSON objects of whole lines; other lines are left out."""
    lines = block.split(b"\n")
    try:  # All at once, which takes a third of the time.
        rows = json.loads(b"[" + b",".join(line for line in lines if line) + b"]")
    except (ValueError, RecursionError):
        rows = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return [row for row in rows if isinstance(row, dict)]


def sample_file(path: Path, name: str, points: int) -> list[tuple[float, float]]:
    """Returns a few values of a metric, spread over a file of any size.

    Only lines at `points` places are read, so that it takes milliseconds.
    """
    found: list[tuple[float, float]] = []
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= LINE:
                lines = file.read().splitlines()
                chosen = np.linspace(len(lines) - 1, 0, min(points, len(lines)))
                rows = [lines[int(index)] for index in chosen[::-1]]
            else:
                rows = [_line_at(file, size, i / points) for i in range(1, points + 1)]
    except OSError:
        return []
    for line in rows:
        for row in parse_lines(line):
            step, value = _finite(row.get(STEP)), _finite(row.get(name))
            if step is not None and value is not None:
                found.append((step, value))
    return found


def _line_at(file: Any, size: int, share: float) -> bytes:
    """Returns the last whole line that ends before a place in the file."""
    end = int(size * share)
    for length in (1024, LINE):
        start = max(0, end - length)
        file.seek(start)
        lines = file.read(end - start).split(b"\n")
        # The first line may lack its beginning, the last one its end.
        whole = lines[1:-1] if start else lines[:-1]
        if whole:
            return whole[-1]
    return b""


def thin(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Leaves out points that a chart of as many pixels would not show.

    Args:
      x: [N], in any order; returned ascending.
      y: [N].
      points: the most to return.

    Returns:
      At most `points` of the points: the smallest and the largest value in each of
      `points / 2` parts of the axis. Values that are not finite are left out.
    """
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if np.any(np.diff(x) < 0):  # The run went back to a checkpoint.
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    if len(x) <= points:
        return x, y
    parts = max(1, points // 2)
    edges = np.linspace(x[0], x[-1], parts + 1)[1:-1]
    bins = np.searchsorted(edges, x, side="right")
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    # Sorted by bin and then value: the first and last of each bin are its extremes.
    order = np.lexsort((y, bins))
    ends = np.append(starts[1:], len(x)) - 1
    kept = np.unique(np.concatenate([order[starts], order[ends]]))
    return x[kept], y[kept]
