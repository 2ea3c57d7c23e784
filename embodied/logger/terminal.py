"""Shows metrics on the terminal; in the process that logs."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from embodied.logger.output import Output, Summary, compile_pattern

SCORE = "episode/score"
LOSS = "train/opt/loss"


class TerminalOutput(Output):
    """Shows a live status on a terminal, and prints a line per write elsewhere.

    The status has the step, steps per second, last score, last loss and time left,
    and the last values of the selected metrics. While it is shown, output of this
    process appears above it; that of other processes on the same terminal does not,
    and may be drawn over: pass `live=False` where there is some.

    The display is refreshed by a thread of its own, which only ever sees immutable
    `_Status` objects; everything else belongs to the caller's thread.

    Args:
      pattern: regular expression that is searched for in a metric's name.
      name: the run's name, shown with every status or line.
      total_steps: logged step (environment steps) at which the run ends, for the
        time left.
      limit: the most metrics shown in a status or a line.
      stream: where to write. Default: `sys.stdout`.
      live: whether to show the status. Default: if the stream is a terminal.
      clock: returns seconds.
    """

    def __init__(
        self,
        pattern: str = ".*",
        name: str = "",
        total_steps: float | None = None,
        limit: int = 30,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._search = compile_pattern(pattern).search
        self._name = name
        self._total_steps = total_steps
        self._limit = limit
        self._stream = stream or sys.stdout
        self._use_live = _is_terminal(self._stream) if live is None else live
        self._clock = clock
        self._rate = _Rate()
        self._latest: dict[str, float] = {}
        self._score: float | None = None
        self._loss: float | None = None
        self._live: Any = None

    def selected(self, summaries: Sequence[Summary]) -> list[Summary]:
        """Returns the summaries in whose name the pattern is found."""
        return [item for item in summaries if self._search(item[1])]

    def __call__(self, summaries: Sequence[Summary]) -> None:
        """Updates the status or prints a line."""
        if not summaries:
            return
        now = self._clock()
        step = max(step for step, _, _ in summaries)
        self._rate.add(now, step)
        for _, name, value in summaries:
            if not isinstance(value, str) and value.ndim == 0:
                self._score = float(value) if name == SCORE else self._score
                self._loss = float(value) if name == LOSS else self._loss
        current = _scalars(self.selected(summaries))
        if self._use_live:
            self._latest.update(current)
            self._show(self._status(now, step, self._latest))
        else:
            status = self._status(now, step, current)
            print(status.line(), file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the last status on the terminal and restores its cursor."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self.close)

    def _status(self, now: float, step: int, metrics: dict[str, float]) -> _Status:
        fps = self._rate.per_second()
        left = None
        if self._total_steps is not None and fps:
            left = max(0.0, (self._total_steps - step) / fps)
        shown = tuple(sorted(metrics.items())[: self._limit])
        return _Status(
            name=self._name,
            step=step,
            total_steps=self._total_steps,
            fps=fps,
            score=self._score,
            loss=self._loss,
            left=left,
            metrics=shown,
            hidden=len(metrics) - len(shown),
            time=now,
            clock=self._clock,
        )

    def _show(self, status: _Status) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, force_terminal=True)
            live = Live(status, console=console, refresh_per_second=1)
            live.start()
            self._live = live
            # A hidden cursor must not outlive a process that fails to close us.
            atexit.register(self.close)
        self._live.update(status, refresh=True)


@dataclasses.dataclass(frozen=True)
class _Status:
    """Content of the display, rendered as a table by rich, or as a line."""

    name: str
    step: int
    total_steps: float | None
    fps: float | None
    score: float | None
    loss: float | None
    left: float | None  # Seconds, at `time`.
    metrics: tuple[tuple[str, float], ...]
    hidden: int
    time: float
    clock: Callable[[], float]

    def line(self) -> str:
        parts = [f"step {self.step}"]
        if self.fps is not None:
            parts.append(f"{self.fps:.4g} steps/s")
        if self.left is not None:
            parts.append(f"{_duration(self.left)} left")
        parts += [f"{name} {value:.4g}" for name, value in self.metrics]
        if self.hidden:
            parts.append(f"{self.hidden} more")
        prefix = f"[{self.name}] " if self.name else ""
        return prefix + " | ".join(parts)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        age = max(0.0, self.clock() - self.time)
        head = Table.grid(padding=(0, 3))
        head.add_row(*(Text(label, style="dim") for label in self._head(age)))
        head.add_row(*(Text(value, style="bold") for value in self._head(age).values()))
        table = Table.grid(padding=(0, 3))
        entries = [Text.assemble((n, "cyan"), f" {v:.4g}") for n, v in self.metrics]
        columns = 2 if len(entries) > 1 else 1
        for start in range(0, len(entries), columns):
            table.add_row(*entries[start : start + columns])
        footer = f"updated {_duration(age)} ago"
        if self.hidden:
            footer += f", {self.hidden} more metrics"
        parts = [head, Text(""), table] if entries else [head]
        title = Text(self.name) if self.name else None
        return Panel(Group(*parts), title=title, subtitle=footer, expand=False)

    def _head(self, age: float) -> dict[str, str]:
        step = f"{self.step:,}"
        if self.total_steps:
            share = min(1.0, self.step / self.total_steps)
            step += f" of {self.total_steps:,.0f} ({share:.1%})"
        left = None if self.left is None else max(0.0, self.left - age)
        return {
            "step": step,
            "steps/s": _number(self.fps),
            "score": _number(self.score),
            "loss": _number(self.loss),
            "time left": "–" if left is None else _duration(left),
        }


class _Rate:
    """Steps per second over the last few writes."""

    def __init__(self, window: int = 10):
        self._points: collections.deque[tuple[float, int]] = collections.deque(
            maxlen=window
        )

    def add(self, now: float, step: int) -> None:
        if self._points and step < self._points[-1][1]:
            self._points.clear()  # The run went back to a checkpoint.
        self._points.append((now, step))

    def per_second(self) -> float | None:
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else None


def _scalars(summaries: Sequence[Summary]) -> dict[str, float]:
    return {
        name: float(value)
        for _, name, value in summaries
        if not isinstance(value, str) and value.ndim == 0
    }


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}"
    return f"{days}d {clock}" if days else clock


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
