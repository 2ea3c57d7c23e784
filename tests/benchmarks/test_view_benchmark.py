"""The benchmark of the view, with few runs and rows."""

import json

import pytest

from benchmarks import end_to_end, view

pytest.importorskip("starlette", reason="the extra `view` is not installed")


def test_it_shows_all_runs_and_the_long_curve(capsys, monkeypatch):
    monkeypatch.setattr(view, "IDLE_SECONDS", 0.1)
    assert view.main(["--runs", "3", "--rows", "2000"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["runs"], found["points"]) == (3, 2000)
    assert found["first_page_s"] > 0 and found["memory_mb"] > 10


def test_runs_with_and_without_the_view_take_turns(capsys, monkeypatch):
    told = []

    def run(options, flags, seconds):
        told.append(flags[-1])
        rate = {"False": 100.0, "True": 99.0}[flags[-1]] + (len(told) - 1) // 2
        return {"env_steps": rate, "updates": 1.0, "cpu": 2.0, "bottleneck": "env"}

    monkeypatch.setattr(end_to_end, "run", run)
    assert end_to_end.main(["--view", "2"]) == 0
    assert told == ["True", "False", "False", "True"]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0.98 < found["env_steps_ratio"] < 1
    assert len(found["env_steps_per_second"]["with"]) == 2


@pytest.mark.slow
def test_a_dream_has_frames(capsys):
    assert view.main(["--dream", "size1m"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["frames_per_s"] > 0
