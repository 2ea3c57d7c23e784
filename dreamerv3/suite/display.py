"""Progress of a suite on the terminal, or as lines in a pipe. The suite's process."""

from __future__ import annotations

import sys
import time
from typing import Any, Self, TextIO

from dreamerv3.suite.run_queue import RunQueue

LINE_SECONDS = 60.0  # Between lines of status in a pipe.
STATES = ("done", "running", "waiting", "failed", "stopped")


class SuiteDisplay:
    """Shows a table of the running runs on a terminal, and prints lines elsewhere.

    A context manager, which restores the terminal at its end.

    Args:
      stream: where to write. Default: `sys.stdout`.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._live: Any = None
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(console=console, refresh_per_second=1)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Prints a line, above the table if there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def show(self, runs: RunQueue) -> None:
        """Updates the table; without a terminal, prints a line once a minute."""
        if self._live is not None:
            self._live.update(_table(runs))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            self.note(status_line(runs))


def status_line(runs: RunQueue) -> str:
    """Returns a line with the number of runs in each state, and the time left."""
    counts = [f"{runs.count(state)} {state}" for state in STATES if runs.count(state)]
    left = runs.seconds_left()
    time_left = "" if left is None else f"; about {format_seconds(left)} left"
    return f"{len(runs.runs)} runs: {', '.join(counts)}{time_left}."


def format_seconds(seconds: float) -> str:
    """Returns a duration in at most two units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _table(runs: RunQueue) -> Any:
    from rich.table import Table

    table = Table(title=status_line(runs), title_justify="left", box=None)
    for name in ("task", "seed", "device"):
        table.add_column(name)
    for name in ("step", "of", "", "steps/s", "last score"):
        table.add_column(name, justify="right")
    now = time.monotonic()
    for run in runs.runs:
        if run.state != "running":
            continue
        table.add_row(
            *(run.task, str(run.seed), run.device),
            *(f"{run.step:,}", f"{run.steps:,}", f"{run.step / run.steps:.0%}"),
            f"{run.rate(now):.0f}",
            "" if run.score is None else f"{run.score:.4g}",
        )
    return table
