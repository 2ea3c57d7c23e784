"""Runs below a folder: how they are found and named, and their states."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from view_testing import write_rows, write_run

from dreamerv3.view import runs as runs_module
from dreamerv3.view.runs import Runs


@pytest.fixture
def gone():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def only(folder):
    (run,) = Runs([folder]).all()
    return run


def mark(folder, live=None, *events, age=0.0):
    now = time.time() - age
    if live is not None:
        host = socket.gethostname()
        content = {"time": now, "host": host, "pid": os.getpid(), **live}
        (folder / "live.json").write_text(json.dumps(content))
    rows = [{"time": now, "text": "", **event} for event in events]
    write_rows(folder / "events.jsonl", rows)


def test_runs_are_found_below_a_folder(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "deep/er/b", seed=3)
    (tmp_path / "a/replay").mkdir()
    write_run(tmp_path / "a/ckpt/no")
    runs = Runs([tmp_path]).all()
    assert [run.name for run in runs] == ["a", "deep/er/b"]
    assert len({run.identity for run in runs}) == 2
    summary = runs[1].summary()
    assert summary["task"] == "dummy_disc" and summary["seed"] == "3"
    assert summary["step"] == 500 and summary["score"] == 50
    assert runs[0].summary()["setting"] == summary["setting"]


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    outside = write_run(tmp_path / "outside/secret")
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown/link").symlink_to(outside)
    assert Runs([tmp_path / "shown"]).all() == []


def test_names_of_runs_are_no_paths(tmp_path):
    write_run(tmp_path / "a")
    runs = Runs([tmp_path])
    for name in ("a", "../a", str(tmp_path / "a"), "", "%2e%2e"):
        assert runs.get(name) is None


def test_states(tmp_path, gone):
    folder = write_run(tmp_path / "a")
    assert only(tmp_path).state() == "ended"
    start = {"kind": "start", "host": socket.gethostname(), "pid": os.getpid()}
    mark(folder, {"state": "live"}, start)
    assert only(tmp_path).state() == "live"
    mark(folder, {"state": "live"}, start, age=100)
    assert only(tmp_path).state() == "stalled"
    mark(folder, {"state": "live"}, {**start, "pid": gone}, age=100)
    assert only(tmp_path).state() == "failed"
    mark(folder, {"state": "ended"}, start, {"kind": "end"})
    assert only(tmp_path).state() == "ended"
    mark(folder, {"state": "ended"}, start, {"kind": "failed"})
    assert only(tmp_path).state() == "failed"
    mark(folder, {"state": "live"}, start, {"kind": "failed"}, start)
    assert only(tmp_path).state() == "live"


def test_damaged_files_do_no_harm(tmp_path):
    folder = write_run(tmp_path / "a")
    for name in ("live.json", "events.jsonl", "config.yaml", "scores.jsonl"):
        (folder / name).write_bytes(b'\xff{"time": [[[[')
    run = only(tmp_path)
    assert run.summary()["state"] == "ended" and run.events() == []
    assert run.live() == {} and "error" in run.configuration()
    (folder / "live.json").write_text('{"scores": "no", "rates": 3, "step": []}')
    assert only(tmp_path).summary()["score"] is None
    (folder / "live.json").write_text(f'{{"time": 1{"0" * 400}, "step": 1e999}}')
    (folder / "scores.jsonl").write_text("[" * 5000 + "\n")
    assert only(tmp_path).summary()["step"] == 0


def test_what_differs_from_the_defaults_is_told(tmp_path):
    folder = write_run(tmp_path / "a", seed=4)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("envs: 16", "envs: 3"))
    found = only(tmp_path).configuration()
    assert found["changed"] == {"seed": ["0", "4"], "run.envs": ["16", "3"]}
    assert len(found["values"]) > 100


def test_steps_have_times(tmp_path):
    folder = write_run(tmp_path / "a")
    ticks = [
        {"kind": "step", "step": s, "time": t} for s, t in ((0, 5), (0, 6), (9, 9))
    ]
    write_rows(folder / "events.jsonl", ticks)
    steps, times = only(tmp_path).times()
    assert steps.tolist() == [0, 9] and times.tolist() == [6, 9]


def test_steps_that_a_resumed_run_has_undone_have_no_times(tmp_path):
    folder = write_run(tmp_path / "a")
    ticks = [(0, 0), (50, 5), (100, 10), (40, 100), (90, 105), (140, 110)]
    rows = [{"kind": "step", "step": step, "time": time} for step, time in ticks]
    write_rows(folder / "events.jsonl", rows)
    steps, times = only(tmp_path).times()
    assert steps.tolist() == [0, 40, 90, 140]
    assert times.tolist() == [0, 100, 105, 110]


def test_published_curves_are_over_logged_steps(tmp_path):
    write_run(tmp_path / "a", task="atari100k_boxing")
    write_run(tmp_path / "b", task="dummy_disc")
    boxing, dummy = Runs([tmp_path]).all()
    found = boxing.published()
    assert found["steps"][0] == 4 * 10_000 and len(found["mean"]) == len(found["steps"])
    assert dummy.published() is None


def test_curves_of_runs_that_nobody_looks_at_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "MOST_OPEN", 4)
    for index in range(20):
        write_run(tmp_path / f"run{index}", rows=10)
    runs = Runs([tmp_path])
    for run in runs.all():
        opened = runs.get(run.identity)
        assert opened.scores.update() and opened.metrics.update()
        opened.events()
    points = [run.points for run in runs.all()]
    assert points.count(20) == 4 and points.count(0) == 16
    first = runs.get(runs.all()[0].identity)
    assert first.scores.update() and len(first.scores.column("episode/score")[0]) == 10


def test_curves_have_a_limit_altogether(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "MOST_POINTS", 50)
    for index in range(5):
        write_run(tmp_path / f"run{index}", rows=20)
    runs = Runs([tmp_path])
    for run in runs.all():
        runs.get(run.identity).scores.update()
    runs.get(run.identity)
    assert [run.points for run in runs.all()] == [0, 0, 0, 20, 20]
