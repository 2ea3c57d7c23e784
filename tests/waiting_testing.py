"""Waits for what other threads and processes do, which nothing signals to a test."""

from __future__ import annotations

import contextlib
import inspect
import time

WAIT = 60.0  # Seconds; far above what anything takes, also on a busy machine.
SHORTEST, LONGEST = 0.001, 0.05  # Seconds between two looks.


def wait_until(condition, what="", seconds=WAIT, program=None):
    """Returns the first true value of a condition; fails if none comes in time.

    Args:
      condition: function without arguments.
      what: what is waited for, if the code of the condition does not say it.
      seconds: limit, after which the test has failed.
      program: program that makes the condition true, with `running` and `output`. If it
        ends before, the test fails at once.
    """
    begin, pause = time.monotonic(), SHORTEST
    while True:
        # In this order: what a program did last counts.
        ended = program is not None and not program.running
        if found := condition():
            return found
        waited = time.monotonic() - begin
        if ended or waited > seconds:
            why = "the program has ended" if ended else f"waited for {waited:.0f} s"
            shown = f"\n{program.output()}" if program else ""
            raise AssertionError(f"{why}, without: {what or _code(condition)}{shown}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)


def _code(condition):
    """Returns the lines that define a function, else its name."""
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(condition).strip()
    return repr(condition)
