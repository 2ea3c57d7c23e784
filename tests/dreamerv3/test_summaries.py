"""The lines at the end of a run: scores of the newest episodes, not of all."""

from __future__ import annotations

import json

import pytest

from dreamerv3 import messages
from dreamerv3.config import load_config
from dreamerv3.rollout import Result as RolloutResult
from embodied.run import Result


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
    assert told in messages.parallel_summary(config, 9.0).splitlines()[0]


def test_a_run_in_one_process_does_likewise(tmp_path):
    config = load_config(["--logdir", str(tmp_path)], {})
    result = Result(
        step=100, steps=100, updates=5, seconds=2.0, episodes=60, mean_score=240.0
    )
    told = messages.summary(config, result)
    assert "60 episodes, mean score of the last 10: 240." in told


def test_a_rollout_tells_the_mean_of_all(tmp_path):
    config = load_config(["--logdir", str(tmp_path)], {})
    result = RolloutResult(steps=100, seconds=2.0, episodes=60, mean_score=3.0)
    assert "60 episodes, mean score 3." in messages.summary(config, result)
