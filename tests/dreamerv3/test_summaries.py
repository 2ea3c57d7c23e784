"""The lines at the end of a run: scores of the newest episodes, not of all."""

from __future__ import annotations

import json

import pytest

from dreamerv3.cli import texts
from dreamerv3.cli.config import load_config
from embodied.run import TrainResult


def write_scores(logdir, scores):
    rows = [
        json.dumps({"step": step, "episode/score": score})
        for step, score in enumerate(scores)
    ]
    (logdir / "scores.jsonl").write_text("".join(f"{row}\n" for row in rows))


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        (
            [20.0] * 50 + [None] + [240.0] * 10,
            "mean score of the last 10 episodes 240.",
        ),
        ([1.0, 2.0, 6.0], "mean score of the last 3 episodes 3."),
    ],
)
def test_a_parallel_run_tells_the_mean_of_its_last_ten_episodes(tmp_path, scores, told):
    write_scores(tmp_path, scores)
    config = load_config(["--logdir", str(tmp_path)], {})
    assert told in texts.parallel_summary(config, 9.0).splitlines()[0]


def test_a_run_in_one_process_does_likewise(tmp_path):
    config = load_config(["--logdir", str(tmp_path)], {})
    result = TrainResult(
        step=100, steps=100, updates=5, seconds=2.0, episodes=60, mean_score=240.0
    )
    told = texts.summary(config, result)
    assert "60 episodes, mean score of the last 10: 240." in told


def test_a_rollout_has_no_updates_to_tell_of(tmp_path):
    config = load_config(["--script", "rollout", "--logdir", str(tmp_path)], {})
    result = TrainResult(100, 100, 0, seconds=2.0, episodes=4, mean_score=3.0)
    told = texts.summary(config, result)
    assert "4 episodes, mean score of the last 4: 3." in told
    assert "100 steps in" in told
