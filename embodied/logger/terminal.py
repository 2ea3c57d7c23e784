"""Shows progress on the terminal; in the process that logs."""

from __future__ import annotations

import atexit
import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from embodied.logger.output import Output, Summary, compile_pattern

WIDTH = 100  # Maximum number of characters of a line.
BAR = 10  # Characters of the bar.
PAUSE_SECONDS = 10.0  # Longer pauses, such as to compile, do not count in rates.
BOTTLENECK = "parallel/bottleneck"  # Its text is `ROLE: REASON`, or a phase of the run.
# Short names of metrics on the line, the most important first.
SHORT_NAMES = {
    "episode/score": "score",
    BOTTLENECK: "bottleneck",
    "eval_episode/score": "eval score",
    "episode/length": "length",
    "train/opt/loss": "loss",
    "parallel/updates_per_second": "updates/s",
}


class TerminalOutput(Output):
    """Keeps one line up to date on a terminal, and prints one per write elsewhere.

    The line has the step, steps per second and the time left, the bottleneck of a
    parallel run, and the last values of the selected metrics as far as there is room.
    On a terminal, a bar precedes the line, and both are redrawn every second. Output
    of this process appears above them; another process has to erase the line first.

    `_lock` guards the values, which the drawing thread reads.

    Args:
      pattern: regular expression that is searched for in a metric's name.
      total_steps: logged step (environment steps) at which the run ends, if any.
      total_seconds: time after which the run ends, if any.
      stream: where to write. Default: `sys.stdout`.
      live: whether to redraw one line. Default: only if the stream is a terminal.
      clock: returns seconds.
      step: returns the logged step, to update the line between writes.
    """

    def __init__(
        self,
        pattern: str = ".*",
        *,
        total_steps: float | None = None,
        total_seconds: float | None = None,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        step: Callable[[], int] | None = None,
    ):
        super().__init__()
        self._search = compile_pattern(pattern).search
        self._progress = _Progress(total_steps, total_seconds, clock)
        self._stream = stream or sys.stdout
        self._clock = clock
        self._step = step
        self._lock = threading.Lock()
        self._latest: dict[str, str] = {}
        self._live: Any = None
        self._console: Any = None
        if _is_terminal(self._stream) if live is None else live:
            self._draw()

    def selected(self, summaries: Sequence[Summary]) -> list[Summary]:
        """Returns the summaries whose name contains the pattern, and the bottleneck."""
        return [
            item for item in summaries if self._search(item[1]) or item[1] == BOTTLENECK
        ]

    def __call__(self, summaries: Sequence[Summary]) -> None:
        """Redraws the line, or prints a new one."""
        if not summaries:
            return
        with self._lock:
            self._progress.add(max(step for step, _, _ in summaries))
            if self._live is None:
                self._latest.clear()
            self._latest.update(_shown(self.selected(summaries)))
        if self._live is None:
            print(self.line(), file=self._stream, flush=True)
        else:
            self._live.refresh()

    def close(self) -> None:
        """Leaves the last line on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self.close)

    def line(self, width: int = WIDTH) -> str:
        """Returns the current line, of at most `width` characters."""
        with self._lock:
            fields = [*self._progress.fields(), *self._metrics()]
        line, hidden = "", 0
        for field in fields:
            longer = f"{line} | {field}" if line else field
            if len(longer) > width:
                hidden += 1
            else:
                line = longer
        more = f" | {hidden} more"
        return line + more if hidden and len(line + more) <= width else line

    def __rich__(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            # Only from the first step on, since a rate before it is meaningless.
            if self._step is not None and (step := self._step()):
                self._progress.add(step)
            share = self._progress.share
        width = min(WIDTH, self._console.width)
        if share is None:
            return Text(self.line(width - 1), no_wrap=True, overflow="crop")
        grid = Table.grid(padding=(0, 1))
        text = self.line(width - BAR - 2)
        bar = ProgressBar(total=1.0, completed=share, width=BAR)
        grid.add_row(bar, Text(text, no_wrap=True, overflow="crop"))
        return grid

    def _metrics(self) -> list[str]:
        ordered = [name for name in SHORT_NAMES if name in self._latest]
        ordered += sorted(set(self._latest) - set(SHORT_NAMES))
        return [self._latest[name] for name in ordered]

    def _draw(self) -> None:
        """Starts to redraw the line, in a thread."""
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self._stream, force_terminal=True)
        self._live = Live(
            console=self._console, refresh_per_second=1, get_renderable=lambda: self
        )
        self._live.start()
        # Live hides the cursor, which a killed process could not show again.
        self._console.show_cursor(True)
        atexit.register(self.close)


class _Progress:
    """Step, rate and time left of a run. Belongs to one thread at a time."""

    def __init__(
        self,
        total_steps: float | None,
        total_seconds: float | None,
        clock: Callable[[], float],
    ):
        self._total_steps = total_steps
        self._total_seconds = total_seconds
        self._clock = clock
        self._began = clock()
        self._step = 0
        self._moved = self._began  # When the step changed last.
        self._points: collections.deque[tuple[float, int]] = collections.deque(
            maxlen=30
        )

    def add(self, step: int) -> None:
        """Records the current step."""
        now = self._clock()
        if step != self._step:
            # The step went back to a checkpoint, or goes on after a pause.
            seen = self._points[-1][0] if self._points else now
            if step < self._step or seen - self._moved > PAUSE_SECONDS:
                self._points.clear()
            self._moved = now
        self._step = step
        self._points.append((now, step))

    @property
    def share(self) -> float | None:
        """Completed fraction of the run; None if the run has no end."""
        shares = []
        if self._total_steps:
            shares.append(self._step / self._total_steps)
        if self._total_seconds:
            shares.append((self._clock() - self._began) / self._total_seconds)
        return min(1.0, max(shares)) if shares else None

    def fields(self) -> list[str]:
        """Returns step, rate and time left as strings."""
        step = f"step {self._step:,}"
        if self._total_steps:
            share = min(1.0, self._step / self._total_steps)
            step += f"/{self._total_steps:,.0f} ({share:.0%})"
        fields = [step]
        pause = self._clock() - self._moved
        rate = None if pause > PAUSE_SECONDS else self._rate()
        if rate:
            fields.append(f"{rate:.4g} steps/s")
        elif self._step and pause > PAUSE_SECONDS:
            fields.append(f"no steps for {_duration(pause)}")
        left = self._left(rate)
        if left is not None:
            fields.append(f"{_duration(left)} left")
        return fields

    def _rate(self) -> float | None:
        """Returns the steps per second over the last few writes or drawings."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else None

    def _left(self, rate: float | None) -> float | None:
        ends = []
        if self._total_steps and rate:
            ends.append((self._total_steps - self._step) / rate)
        if self._total_seconds:
            ends.append(self._total_seconds - (self._clock() - self._began))
        return max(0.0, min(ends)) if ends else None


def _shown(summaries: Sequence[Summary]) -> dict[str, str]:
    """Returns the texts to show for scalars and for the bottleneck, by name."""
    shown = {}
    for _, name, value in summaries:
        label = SHORT_NAMES.get(name, name)
        if name == BOTTLENECK:
            role, colon, _ = str(value).partition(":")
            shown[name] = f"{label} {role}" if colon else role
        elif not isinstance(value, str) and value.ndim == 0:
            shown[name] = f"{label} {float(value):.4g}"
    return shown


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour}h" if days else f"{hour}:{minute:02}:{second:02}"


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
