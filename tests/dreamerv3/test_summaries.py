"""The lines at the end of a run: scores of the newest episodes, and its files."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import tomllib

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


def test_a_line_that_is_half_written_is_left_out(tmp_path):
    write_scores(tmp_path, [1.0, 3.0])
    with (tmp_path / "scores.jsonl").open("a") as file:
        file.write('{"step": 3, "epi')
    config = load_config(["--logdir", str(tmp_path)], {})
    assert "last 2 episodes 2." in texts.parallel_summary(config, 9.0)


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


def make_files(logdir, *names):
    for name in names:
        path = logdir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


class TestFiles:
    def files(self, logdir, trained=True):
        config = load_config(["--logdir", str(logdir)], {})
        return "\n".join(texts.files(config, trained))

    def test_only_what_is_there_is_listed(self, tmp_path):
        make_files(tmp_path, "config.yaml", "replay/.keep")
        told = self.files(tmp_path)
        assert "config.yaml" in told
        for name in ("metrics.jsonl", "scores.jsonl", "events", "ckpt", "eval_only"):
            assert name not in told
        assert "No checkpoint: the run has ended before the first one." in told

    def test_all_that_a_run_has(self, tmp_path):
        make_files(tmp_path, "config.yaml", "metrics.jsonl", "scores.jsonl")
        make_files(tmp_path, "events.out.1", "ckpt/manifest.json", "replay/a.chunk")
        told = self.files(tmp_path)
        assert "  ckpt, replay    the policy and its training" in told
        for name in ("config.yaml", "metrics.jsonl", "scores.jsonl", "events.out.*"):
            assert f"\n  {name}" in told
        assert f"--script eval_only --logdir {tmp_path} plays it" in told
        assert "No checkpoint" not in told

    def test_the_events_of_a_run_are_not_those_of_tensorboard(self, tmp_path):
        make_files(tmp_path, "config.yaml", "events.jsonl")
        assert "tensorboard" not in self.files(tmp_path)

    def test_a_rollout_misses_no_checkpoint(self, tmp_path):
        make_files(tmp_path, "config.yaml")
        assert "checkpoint" not in self.files(tmp_path, trained=False)

    @pytest.mark.parametrize("installed", [True, False])
    def test_tensorboard_is_named_as_it_can_be_run(
        self, tmp_path, monkeypatch, installed
    ):
        def find_spec(name):
            return True if installed and name == "tensorboard" else None

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        make_files(tmp_path, "events.out.1")
        told = self.files(tmp_path)
        show = f"tensorboard --logdir {tmp_path}"
        install = "pip install 'dreamerv3-parallel[tensorboard]', then "
        assert f"curves and videos: {'' if installed else install}{show}" in told
        project = pathlib.Path(__file__).parents[2] / "pyproject.toml"
        extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
        assert extras["tensorboard"][0].startswith("tensorboard")
