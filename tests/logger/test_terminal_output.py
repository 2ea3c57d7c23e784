"""A terminal shows a live status; a file or pipe gets plain lines."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time

import numpy as np
import pytest

from embodied.logger import Logger, TerminalOutput

FILTER = "score|length|fps|ratio|train/loss/|train/rand/"


class Clock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def scalars(step, **metrics):
    return [(step, name, np.array(value)) for name, value in metrics.items()]


class TestLines:
    def test_a_write_is_a_line_of_what_the_filter_finds(self):
        stream = io.StringIO()
        with Logger(100, [TerminalOutput(FILTER, "run", stream=stream)]) as logger:
            logger.add({"episode/score": 1.23456, "train/loss/dyn": 2, "train/adv": 3})
            logger.add({"eval_episode/score": 5, "text": "score", "score/v": [1, 2]})
        assert stream.getvalue() == (
            "[run] step 100 | episode/score 1.235 | eval_episode/score 5 | "
            "train/loss/dyn 2\n"
        )

    def test_rate_and_time_left_come_from_the_steps(self):
        stream, clock = io.StringIO(), Clock()
        output = TerminalOutput("$^", total_steps=10_000, stream=stream, clock=clock)
        for step in (1000, 2000):
            output(scalars(step, a=1))
            clock.now += 10
        assert stream.getvalue().splitlines() == [
            "step 1000",
            "step 2000 | 100 steps/s | 0:01:20 left",
        ]

    def test_the_rate_starts_anew_when_a_run_goes_back_to_its_checkpoint(self):
        stream, clock = io.StringIO(), Clock()
        output = TerminalOutput("$^", stream=stream, clock=clock)
        for step in (1000, 500, 600):
            output(scalars(step, a=1))
            clock.now += 10
        assert stream.getvalue().splitlines()[-1] == "step 600 | 10 steps/s"

    @pytest.mark.parametrize(
        ("steps_left", "text"),
        [(90_061, "1d 1:01:01 left"), (59, "0:00:59 left"), (-5, "0:00:00 left")],
    )
    def test_time_left_is_readable(self, steps_left, text):
        stream, clock = io.StringIO(), Clock()
        total = 10 + steps_left
        output = TerminalOutput("$^", total_steps=total, stream=stream, clock=clock)
        output(scalars(0, a=1))
        clock.now += 10
        output(scalars(10, a=1))
        assert stream.getvalue().splitlines()[-1].endswith(text)

    def test_long_lines_say_how_much_they_leave_out(self):
        stream = io.StringIO()
        output = TerminalOutput(limit=2, stream=stream)
        output(scalars(1, a=1, b=2, c=3, d=4))
        assert stream.getvalue() == "step 1 | a 1 | b 2 | 2 more\n"

    def test_nan_is_shown(self):
        stream = io.StringIO()
        TerminalOutput(stream=stream)(scalars(1, a=np.nan, b=-np.inf))
        assert stream.getvalue() == "step 1 | a nan | b -inf\n"

    def test_a_pipe_gets_no_control_codes_and_every_line_at_once(self):
        code = (
            "import numpy as np, sys\n"
            "from embodied.logger import TerminalOutput\n"
            "output = TerminalOutput()\n"
            "output([(1, 'a', np.array(1))])\n"
            "sys.stdin.read()\n"
        )
        environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        ) as process:
            assert process.stdout.readline() == b"step 1 | a 1\n"
            process.stdin.close()


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream):
    """Returns the text on a terminal without control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


class TestLiveStatus:
    def test_it_has_steps_rate_score_loss_time_left_and_last_values(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        stream, clock = FakeTerminal(), Clock()
        output = TerminalOutput(
            FILTER, "my run", total_steps=4000, stream=stream, clock=clock
        )
        output([(1000, "episode/length", np.array(77))])
        clock.now += 10
        output(
            [
                (2000, "episode/score", np.array(12.5)),
                (2000, "train/opt/loss", np.array(3.25)),
                (2000, "train/loss/dyn", np.array(0.125)),
            ]
        )
        output.close()
        text = shown(stream)
        last = text[text.rindex("my run") :]
        for expected in (
            "2,000 of 4,000 (50.0%)",
            "100",
            "12.5",
            "3.25",
            "0:00:20",
            "episode/length 77",
            "train/loss/dyn 0.125",
        ):
            assert expected in last

    def test_the_time_left_runs_down_between_writes(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        stream, clock = FakeTerminal(), Clock()
        output = TerminalOutput("$^", total_steps=200, stream=stream, clock=clock)
        output(scalars(0, a=1))
        clock.now += 10
        output(scalars(100, a=1))
        clock.now += 4
        output.close()
        last = shown(stream)[-400:]
        assert "0:00:06" in last
        assert "updated 0:00:04 ago" in last

    def test_markup_in_names_is_shown_as_it_is(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        stream = FakeTerminal()
        output = TerminalOutput(".*", "[red]run", stream=stream)
        output([(0, "a[/b]", np.array(1))])
        output.close()
        assert "[red]run" in shown(stream)
        assert "a[/b] 1" in shown(stream)

    def test_streams_are_restored_on_close(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        before = (sys.stdout, sys.stderr)
        output = TerminalOutput(stream=FakeTerminal())
        output(scalars(0, a=1))
        assert sys.stdout is not before[0]
        output.close()
        output.close()
        assert (sys.stdout, sys.stderr) == before

    @pytest.mark.parametrize("live", [False, None])
    def test_a_dumb_terminal_or_live_false_gets_lines(self, monkeypatch, live):
        monkeypatch.setenv("TERM", "xterm" if live is False else "dumb")
        stream = FakeTerminal()
        TerminalOutput(stream=stream, live=live)(scalars(1, a=1))
        assert stream.getvalue() == "step 1 | a 1\n"


def run_on_terminal(code):
    """Runs Python code on a real terminal and returns all that it showed."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    deadline = time.monotonic() + 60
    data = b""
    try:
        while select.select([controller], [], [], deadline - time.monotonic())[0]:
            try:
                part = os.read(controller, 65536)
            except OSError:  # Linux says so when the other end has closed.
                part = b""
            if not part:
                break
            data += part
    finally:
        os.close(controller)
        process.wait(10)
    return data.decode()


PREAMBLE = """
import numpy as np, sys
from embodied.logger import TerminalOutput
output = TerminalOutput('score', 'my run')
output([(1, 'episode/score', np.array(12.5))])
print('a print from elsewhere')
print('an error from elsewhere', file=sys.stderr)
output([(2, 'episode/score', np.array(13.5))])
"""
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class TestRealTerminal:
    def test_prints_appear_above_the_status_and_the_cursor_comes_back(self):
        text = run_on_terminal(PREAMBLE + "output.close()\nprint('the end')")
        assert "a print from elsewhere" in text
        assert "an error from elsewhere" in text
        assert "13.5" in text[text.index("an error from elsewhere") :]
        assert text.rindex(SHOW) > text.rindex(HIDE)
        assert text.index("the end") > text.rindex(SHOW)

    def test_the_cursor_comes_back_when_the_process_fails_without_closing(self):
        text = run_on_terminal(PREAMBLE + "raise RuntimeError('a failure')")
        assert "a failure" in text
        assert text.rindex(SHOW) > text.rindex(HIDE)
