"""The queue: when runs start, which are retried, and the files of ended runs."""

from __future__ import annotations

import io
import itertools
import json
import threading

import pytest

from dreamerv3.suite import run_queue
from dreamerv3.suite.accelerators import Slot
from dreamerv3.suite.display import SuiteDisplay, format_seconds, status_line
from dreamerv3.suite.run_queue import RunQueue, SuiteRun

STEPS = 100


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(run_queue, "LOOK_SECONDS", 0.01)


def make_runs(folder, count):
    return [
        SuiteRun(f"task_{index}", 0, folder / str(index), ("--x",), STEPS, 2)
        for index in range(count)
    ]


class Ended:
    """A process that ended at once, with an exit code and after some agent steps."""

    def __init__(self, run, code=0, step=STEPS):
        self.exitcode = code
        row = {"step": step * run.repeat, "episode/score": 1.5}
        for name in ("metrics.jsonl", "scores.jsonl"):
            (run.logdir / name).write_text(f"{json.dumps(row)}\n")

    def on_exit(self, callback):
        callback(self)


def work(runs, start, slots=1, look=lambda: None):
    notes = []
    todo = RunQueue(runs, [Slot("cpu")] * slots, notes.append, start)
    todo.work(threading.Event(), look)
    return todo, notes


def test_all_run_and_leave_a_note_that_they_are_done(tmp_path):
    runs = make_runs(tmp_path, 3)
    todo, notes = work(runs, lambda run, slot: Ended(run), slots=2)
    assert [run.state for run in todo.runs] == ["done"] * 3
    for run in runs:
        content = json.loads((run.logdir / "done.json").read_text())
        assert (content["task"], content["step"]) == (run.task, STEPS)
        assert run.is_done()
    assert notes[0] == "task_0 seed 0: begins on cpu."
    assert status_line(todo) == "3 runs: 3 done."


def test_what_is_done_is_not_run_again_unless_it_is_to_go_further(tmp_path):
    runs = make_runs(tmp_path, 2)
    work(runs, lambda run, slot: Ended(run))
    started = []

    def start(run, slot):
        started.append(run.task)
        return Ended(run, step=run.steps)

    todo, _ = work(runs, start)
    assert started == [] and todo.count("done") == 2
    further = SuiteRun("task_0", 0, runs[0].logdir, (), 2 * STEPS, 2)
    todo, notes = work([further, runs[1]], start)
    assert started == ["task_0"] and todo.count("done") == 2
    assert "begins at step 100 on cpu" in notes[0]


def test_a_run_that_fails_is_tried_once_more_after_the_others(tmp_path):
    started = []

    def start(run, slot):
        started.append(run.task)
        bad = run.task == "task_0"
        with (run.logdir / "output.txt").open("a") as file:
            file.write("Traceback\nOSError: 5\n\n")
        return Ended(run, code=1 if bad else 0, step=10 if bad else STEPS)

    runs = make_runs(tmp_path, 3)
    todo, notes = work(runs, start)
    assert started == ["task_0", "task_1", "task_2", "task_0"]
    assert [run.state for run in todo.runs] == ["failed", "done", "done"]
    content = json.loads((runs[0].logdir / "failed.json").read_text())
    assert (content["exit"], content["step"]) == (1, 10)
    assert content["output"][-1] == "OSError: 5"
    assert notes[-1].endswith("OSError: 5")
    assert not (runs[0].logdir / "done.json").exists()

    todo, _ = work(runs, lambda run, slot: Ended(run))
    assert todo.count("done") == 3
    assert not (runs[0].logdir / "failed.json").exists()


def test_a_failure_that_does_not_repeat_is_none(tmp_path):
    codes = iter([1, 0])
    todo, _ = work(make_runs(tmp_path, 1), lambda run, slot: Ended(run, next(codes)))
    assert todo.count("done") == 1


def test_a_run_that_ends_before_its_steps_is_not_done(tmp_path):
    runs = make_runs(tmp_path, 1)
    todo, notes = work(runs, lambda run, slot: Ended(run, step=50))
    assert todo.runs[0].state == "stopped"
    assert "the same command continues" in notes[-1]
    assert not runs[0].is_done()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": null}', '{"step": 50}'])
def test_a_damaged_note_is_none(tmp_path, text):
    (run,) = make_runs(tmp_path, 1)
    run.logdir.mkdir()
    (run.logdir / "done.json").write_text(text)
    assert not run.is_done()


class Going:
    """A process that runs until the test ends it."""

    def __init__(self):
        self.exitcode = None

    def on_exit(self, callback):
        self.end = lambda: callback(self)


def test_as_many_run_at_a_time_as_there_are_slots(tmp_path):
    running = []
    most = []

    def start(run, slot):
        process = Going()
        running.append((run, process))
        return process

    def look():
        most.append(len(running))
        if running:
            run, process = running.pop()
            process.exitcode = Ended(run).exitcode
            process.end()

    todo, _ = work(make_runs(tmp_path, 5), start, slots=2, look=look)
    assert todo.count("done") == 5
    assert max(most) == 2


def test_starts_on_a_shared_device_keep_their_distance(tmp_path):
    slots = [Slot("gpu 0", spacing=0.2)] * 2
    starts = []

    def start(run, slot):
        starts.append(run_queue.time.monotonic())
        return Ended(run)

    todo = RunQueue(make_runs(tmp_path, 3), slots, lambda text: None, start)
    todo.work(threading.Event(), lambda: None)
    assert min(b - a for a, b in itertools.pairwise(starts)) >= 0.2


def test_the_time_left_follows_from_the_rates_of_what_runs(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(run_queue.time, "monotonic", lambda: now[0])
    runs = make_runs(tmp_path, 4)
    todo = RunQueue(runs, [Slot("cpu")] * 2, lambda text: None, lambda *_: Going())
    assert todo.seconds_left() is None
    todo._fill()
    now[0] += 10
    for run in todo.runs[:2]:
        (run.logdir / "metrics.jsonl").write_text('{"step": 100}\n')
    todo._update()
    # Two runs at 5 steps per second; 50 steps of each and two whole runs are left.
    assert todo.seconds_left() == pytest.approx(300 / 10)
    assert status_line(todo) == "4 runs: 2 running, 2 waiting; about 30 s left."


def test_a_terminal_shows_a_table_and_a_pipe_gets_lines(tmp_path):
    todo = RunQueue(
        make_runs(tmp_path, 2), [Slot("cpu")], lambda text: None, lambda *_: Going()
    )
    todo._fill()

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((Terminal(), "last score"), (io.StringIO(), "2 runs: 1")):
        with SuiteDisplay(stream) as display:
            display.note("[a note]")
            display.show(todo)
            display.show(todo)
        assert shown in stream.getvalue()
        assert "[a note]" in stream.getvalue()
    assert stream.getvalue().count("2 runs") == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.4, "5 s"), (65, "1 min 05 s"), (3 * 3600, "3 h 00 min")]
)
def test_durations_are_short(seconds, text):
    assert format_seconds(seconds) == text
