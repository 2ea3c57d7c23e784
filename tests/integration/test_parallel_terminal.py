"""What a parallel run shows: one line that is kept up to date, or short lines."""

import re
import sys

from parallel_testing import LEAN, Program, import_path, small
from terminal_testing import drawn_lines, run_on_terminal

FLAGS = ["--logger.outputs", "jsonl", "terminal", "--run.log_every", "0.5"]
FLAGS += ["--run.report_every", "0", "--run.eval_envs", "0"]
WIDEST = 100


def test_on_a_terminal_one_line_is_kept_up_to_date(tmp_path):
    argv = small(tmp_path / "run", *FLAGS, steps=1500)
    command = [sys.executable, "-m", "dreamerv3.main", *argv]
    text = run_on_terminal(command, columns=200, PYTHONPATH=import_path())
    drawn = [line for line in drawn_lines(text) if "/1,500 (" in line]
    assert max(map(len, drawn)) <= WIDEST, drawn
    assert re.search(r"^━+╸?╺?━* step [\d,]+/1,500 \(\d+%\)", drawn[0])
    assert re.search(r"\| [\d.e+]+ steps/s \| \d:\d\d:\d\d left \|", drawn[-1]), drawn
    assert any("bottleneck" in line for line in drawn), drawn
    # Messages of every process have lines of their own.
    for message in (
        "Starting: logger, replay, agent, 2 env workers.",
        r"The replay has \d+ sequences: training begins.",
        r"Bottleneck: \w+: .*",
        "Written to .*",
    ):
        assert any(re.fullmatch(message, line) for line in drawn_lines(text)), message


def test_in_a_pipe_every_write_is_a_short_line(tmp_path):
    argv = small(tmp_path / "run", *FLAGS, *LEAN, steps=1500)
    with Program(*argv) as program:
        assert program.wait() == 0, program.output()
        shown = program.output()
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert lines and max(map(len, lines)) <= WIDEST
    assert "\x1b" not in shown and "\r" not in shown
    assert any("| score " in line for line in lines)
    assert not re.search("^Step ", shown, re.MULTILINE)
