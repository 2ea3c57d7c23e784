"""A terminal shows one line that is kept up to date; a file or pipe gets lines."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from terminal_testing import drawn_lines, run_on_terminal, without_codes

from embodied.logger import Logger, TerminalOutput

FILTER = "score|length|fps|ratio|train/loss/|train/rand/"


class Clock:
    """A clock that only the test advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def scalars(step, **metrics):
    return [(step, name, np.array(value)) for name, value in metrics.items()]


class TestLines:
    def test_a_write_is_a_line_of_what_the_filter_finds(self):
        stream = io.StringIO()
        with Logger(100, [TerminalOutput(FILTER, stream=stream)]) as logger:
            logger.add({"episode/score": 1.23456, "train/loss/dyn": 2, "train/adv": 3})
            logger.add({"eval_episode/score": 5, "text": "score", "score/v": [1, 2]})
        assert stream.getvalue() == (
            "step 100 | score 1.235 | eval score 5 | train/loss/dyn 2\n"
        )

    def test_rate_and_time_left_come_from_the_steps(self):
        stream, clock = io.StringIO(), Clock()
        output = TerminalOutput(
            "$^", total_steps=10_000, stream=stream, clock=clock, live=False
        )
        for step in (1000, 2000):
            output(scalars(step, a=1))
            clock.now += 10
        assert stream.getvalue().splitlines() == [
            "step 1,000/10,000 (10%)",
            "step 2,000/10,000 (20%) | 100 steps/s | 0:01:20 left",
        ]

    def test_long_times_between_writes_are_no_pauses(self):
        stream, clock = io.StringIO(), Clock()
        output = TerminalOutput("$^", stream=stream, clock=clock)
        for step in (12, 24):
            output(scalars(step, a=1))
            clock.now += 120
        assert stream.getvalue().splitlines()[-1] == "step 24 | 0.1 steps/s"

    def test_a_rate_and_a_time_left_that_compiling_makes_wrong_are_not_shown(self):
        stream, clock = io.StringIO(), Clock()
        output = TerminalOutput("$^", total_steps=900, stream=stream, clock=clock)
        for step in (100, 200, 200, 200, 300, 400):
            output(scalars(step, a=1))
            clock.now += 10
        assert [
            line.partition(" | ")[2] for line in stream.getvalue().splitlines()
        ] == [
            "",
            "10 steps/s | 0:01:10 left",
            "5 steps/s | 0:02:20 left",
            "no steps for 0:00:20",
            "",
            "10 steps/s | 0:00:50 left",
        ]

    def test_a_run_may_end_by_its_duration(self):
        stream, clock = io.StringIO(), Clock()
        output = TerminalOutput("$^", total_seconds=60, stream=stream, clock=clock)
        clock.now += 15
        output(scalars(7, a=1))
        assert stream.getvalue() == "step 7 | 0:00:45 left\n"

    @pytest.mark.parametrize(
        ("bottleneck", "text"),
        [("actor: the policy runs 80%", "bottleneck actor"), ("compiling",) * 2],
    )
    def test_the_bottleneck_is_shown_in_short(self, bottleneck, text):
        stream = io.StringIO()
        TerminalOutput("$^", stream=stream)([(3, "parallel/bottleneck", bottleneck)])
        assert stream.getvalue() == f"step 3 | {text}\n"

    def test_lines_are_short_and_have_what_matters(self):
        # As in a parallel run: hundreds of metrics, and a filter that lets all pass.
        metrics = {f"server/actor/some_rate_{i}": 1e9 / 7 for i in range(300)}
        metrics |= {"episode/score": -12345.678, "train/opt/loss": 1.5}
        metrics |= {"parallel/bottleneck": "learner: it waits 0% of the time"}
        stream, clock = io.StringIO(), Clock()
        output = TerminalOutput(
            ".*", total_steps=51_000_000, stream=stream, clock=clock
        )
        for step in (1_000_000, 1_002_000):
            with Logger(step, [output]) as logger:
                logger.add(metrics)
            clock.now += 10
        line = stream.getvalue().splitlines()[-1]
        assert len(line) <= 100
        assert line.startswith("step 1,002,000/51,000,000 (2%) | 200 steps/s | 2d ")
        assert "score -1.235e+04" in line and "bottleneck learner" in line

    def test_the_rate_starts_anew_when_a_run_goes_back_to_its_checkpoint(self):
        stream, clock = io.StringIO(), Clock()
        output = TerminalOutput("$^", stream=stream, clock=clock)
        for step in (1000, 500, 600):
            output(scalars(step, a=1))
            clock.now += 10
        assert stream.getvalue().splitlines()[-1] == "step 600 | 10 steps/s"

    @pytest.mark.parametrize(
        ("steps_left", "text"),
        [(90_061, "1d 1h left"), (59, "0:00:59 left"), (-5, "0:00:00 left")],
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
        output = TerminalOutput(stream=stream)
        output(scalars(1, **{letter * 35: 1 for letter in "abcd"}))
        expected = f"step 1 | {'a' * 35} 1 | {'b' * 35} 1 | 2 more\n"
        assert stream.getvalue() == expected

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


def lines(stream):
    return drawn_lines(stream.getvalue())


def run_code(code):
    return run_on_terminal([sys.executable, "-c", code])


class TestLiveLine:
    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")

    def test_it_has_a_bar_steps_rate_time_left_and_last_values(self):
        stream, clock = FakeTerminal(), Clock()
        output = TerminalOutput(FILTER, total_steps=4000, stream=stream, clock=clock)
        output([(1000, "episode/length", np.array(77))])
        clock.now += 10
        output(
            [
                (2000, "episode/score", np.array(12.5)),
                (2000, "train/loss/dyn", np.array(0.125)),
            ]
        )
        output.close()
        last = lines(stream)[-1]
        bar, text = last[:10], last[10:]
        assert text == (
            " step 2,000/4,000 (50%) | 100 steps/s | 0:00:20 left | score 12.5 | "
            "length 77 | 1 more"
        )
        assert set(bar) <= set("━╸╺ ")
        assert max(map(len, lines(stream))) <= 100

    def test_it_goes_on_between_writes(self):
        stream, clock, step = FakeTerminal(), Clock(), [0]
        output = TerminalOutput(
            "$^", total_steps=200, stream=stream, clock=clock, step=lambda: step[0]
        )
        for now, then in ((0, 0), (10, 20), (20, 40), (30, 60)):
            clock.now, step[0] = now, then
            output._live.refresh()
        output.close()
        # The rate counts from the first steps, because compiling comes before them.
        assert "step 60/200 (30%) | 2 steps/s | 0:01:10 left" in lines(stream)[-1]

    def test_a_pause_is_not_part_of_the_rate(self):
        stream, clock, step = FakeTerminal(), Clock(), [0]
        output = TerminalOutput("$^", stream=stream, clock=clock, step=lambda: step[0])
        for now in range(41):
            # Ten steps a second, but none from the fifth second on for half a minute.
            clock.now, step[0] = now, 10 * min(now, 5) + 10 * max(0, now - 35)
            output._live.refresh()
        output.close()
        assert lines(stream)[-1] == "step 100 | 10 steps/s"

    def test_a_run_without_an_end_has_no_bar(self):
        stream = FakeTerminal()
        output = TerminalOutput("a", stream=stream, clock=Clock())
        output(scalars(3, a=1))
        output.close()
        assert lines(stream)[-1] == "step 3 | a 1"

    def test_a_narrow_terminal_is_not_wrapped(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "60")
        stream, clock = FakeTerminal(), Clock()
        output = TerminalOutput(total_steps=4000, stream=stream, clock=clock)
        output(scalars(2000, episode=1, something_with_a_long_name=2))
        output.close()
        assert max(map(len, lines(stream))) < 60

    def test_markup_in_names_is_shown_as_it_is(self):
        stream = FakeTerminal()
        output = TerminalOutput(stream=stream)
        output([(0, "a[/b]", np.array(1))])
        output.close()
        assert "a[/b] 1" in without_codes(stream.getvalue())

    def test_streams_are_restored_on_close(self):
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


PREAMBLE = """
import numpy as np, sys
from embodied.logger import TerminalOutput
output = TerminalOutput('score')
output([(1, 'episode/score', np.array(12.5))])
print('a print from elsewhere')
print('an error from elsewhere', file=sys.stderr)
output([(2, 'episode/score', np.array(13.5))])
"""
MESSAGE = """
import logging
from embodied.run.console import show_messages
print("the line of another process", end="")
with show_messages():
    logging.getLogger("embodied").info("a message")
"""
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class TestRealTerminal:
    def test_prints_appear_above_the_status_and_the_cursor_comes_back(self):
        text = run_code(PREAMBLE + "output.close()\nprint('the end')")
        assert "a print from elsewhere" in text
        assert "an error from elsewhere" in text
        assert "13.5" in text[text.index("an error from elsewhere") :]
        assert text.rindex(SHOW) > text.rindex(HIDE)
        assert text.index("the end") > text.rindex(SHOW)

    def test_the_cursor_is_there_also_while_the_line_is_shown(self):
        # The process cannot restore the cursor after SIGKILL.
        text = run_code(PREAMBLE + "import os\nos.kill(os.getpid(), 9)")
        assert text.rindex(SHOW) > text.rindex(HIDE)

    def test_messages_of_other_processes_erase_the_line_first(self):
        text = run_code(MESSAGE)
        assert "a message" in text.split("\r\x1b[K")[1]

    def test_the_cursor_comes_back_when_the_process_fails_without_closing(self):
        text = run_code(PREAMBLE + "raise RuntimeError('a failure')")
        assert "a failure" in text
        assert text.rindex(SHOW) > text.rindex(HIDE)
