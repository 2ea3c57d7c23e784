"""Evaluating the agent of a checkpoint."""

import json
import math
import sys

import numpy as np
import PIL.Image
import pytest
import scipy.stats
from loop_testing import LENGTH, Task
from run_testing import NotingAgent, Parts

import embodied
from embodied.base import TaskError
from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.logger import output
from embodied.run import Evaluation
from embodied.run.eval_only import write_result

evaluation = sys.modules["embodied.run.eval_only"]  # The function hides the module.


@pytest.fixture
def trained(tmp_path):
    """The logdir of a run of 40 steps."""
    Parts(tmp_path / "run", steps=40).train()
    return tmp_path / "run"


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("folder", ["", "ckpt", "ckpt/agent"])
def test_it_plays_with_the_agent_of_the_run(trained, tmp_path, capsys, folder):
    before = files(trained)
    parts = Parts(tmp_path / "eval", from_checkpoint=str(trained / folder), eval_eps=6)
    result = parts.eval_only()
    assert result.scores == (3.0 * LENGTH,) * 6
    assert result.lengths == (LENGTH,) * 6
    assert (result.step, result.mean_score, result.margin) == (40, 3.0 * LENGTH, 0)
    assert parts.agent.updates > 0
    assert {mode for mode, _ in parts.agent.policies} == {"eval"}
    assert (
        "6 episodes of the agent of step 40: mean score 15" in capsys.readouterr().out
    )
    assert files(trained) == before, "it is only read"
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["eval"]


def test_metrics_are_those_of_evaluation_at_the_step_of_the_agent(trained, tmp_path):
    parts = Parts(tmp_path, from_checkpoint=str(trained), log_every=-1.0)
    parts.eval_only()
    logger = parts.logger
    assert logger.values("eval_episode/score") == [3.0 * LENGTH] * 2
    assert {step for step, _, _ in logger.rows} == {40}
    assert {"eval_epstats/reward_rate", "fps/policy"} <= logger.names()
    assert not [name for name in logger.names() if name.startswith(("epis", "epst"))]
    assert logger.closed


@pytest.mark.parametrize(("envs", "episodes"), [(4, 1), (2, 5), (3, 3)])
def test_it_plays_the_number_of_episodes_asked_for(trained, tmp_path, envs, episodes):
    parts = Parts(tmp_path, from_checkpoint=str(trained), envs=envs, eval_eps=episodes)
    assert len(parts.eval_only().scores) == episodes
    assert len(parts.envs) == min(envs, episodes)


def test_results_are_written_as_json(trained, tmp_path, capsys):
    parts = Parts(tmp_path, from_checkpoint=str(trained), eval_eps=3)
    parts.eval_only()
    path = tmp_path / "eval/40.json"
    assert f"Written to {path}" in capsys.readouterr().out
    assert json.loads(path.read_text()) == {
        "checkpoint": str(trained),
        "step": 40,
        "episodes": 3,
        "wanted": 3,
        "mean_score": 15.0,
        "confidence": 0.95,
        "interval": [15.0, 15.0],
        "mean_length": 5.0,
        "scores": [15.0] * 3,
        "lengths": [5] * 3,
        "largest": {"log/count": [5.0] * 3},
        "videos": [],
    }


class Declining(Task):
    """Logs a value that is largest at the start, and differs between episodes."""

    @property
    def obs_space(self):
        logs = {"log/energy": embodied.Space(np.float32)}
        return {**super().obs_space, **logs, "log/map": embodied.Space(np.uint8, (2,))}

    def step(self, action):
        obs = super().step(action)
        _, episode, count = obs["where"]
        energy = np.float32(10 * episode - count)
        return {**obs, "log/energy": energy, "log/map": np.zeros(2, np.uint8)}


def test_the_largest_value_of_each_episode_is_kept_by_key(trained, tmp_path):
    parts = Parts(tmp_path, from_checkpoint=str(trained), envs=1, eval_eps=3)
    parts.task = Declining
    assert parts.eval_only().largest == {
        "log/count": [float(LENGTH)] * 3,
        "log/energy": [0.0, 10.0, 20.0],
    }


def test_an_evaluation_without_episodes_has_a_result_too(trained, tmp_path):
    Parts(tmp_path, from_checkpoint=str(trained), steps=1).eval_only()
    result = json.loads((tmp_path / "eval/40.json").read_text())
    assert (result["episodes"], result["wanted"]) == (0, 2)
    assert result["mean_score"] is result["interval"] is result["mean_length"] is None


class Filmed(Task):
    """Shows the number of the episode and the position in it."""

    @property
    def obs_space(self):
        image = embodied.Space(np.uint8, (16, 24, 3))
        return {**super().obs_space, "image": image, "small/view": image}

    def step(self, action):
        obs = super().step(action)
        _, episode, count = obs["where"]
        image = np.full((16, 24, 3), 40 * count, np.uint8)
        image[:8] = 100 * episode
        return {**obs, "image": image, "small/view": image}


@pytest.mark.parametrize("log_every", [0.0, -1.0])
def test_a_video_of_an_episode_is_written_by_key(
    trained, tmp_path, log_every, monkeypatch
):
    monkeypatch.setattr(output, "find_ffmpeg", lambda: None)
    source = str(trained)
    parts = Parts(tmp_path, from_checkpoint=source, eval_eps=4, log_every=log_every)
    parts.task = Filmed
    parts.eval_only()
    videos = json.loads((tmp_path / "eval/40.json").read_text())["videos"]
    assert videos == ["eval/40-image.gif", "eval/40-small_view.gif"]
    for name in videos:
        with PIL.Image.open(tmp_path / name) as film:
            assert (film.n_frames, film.size) == (LENGTH + 1, (24, 16))
            for frame in range(film.n_frames):
                film.seek(frame)
                pixels = np.asarray(film.convert("RGB"))
                assert abs(int(pixels[12, 12, 0]) - 40 * frame) < 8
                assert abs(int(pixels[2, 2, 0]) - 100) < 8, "the second episode"


class Screen(evaluation.Window):
    """Stands in for a window."""

    def __init__(self, title):
        self.frames, self.closed = [], False
        Screen.last = self

    def show(self, frame):
        self.frames.append(frame)

    def close(self):
        self.closed = True


def test_a_window_shows_the_first_environment(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "Window", Screen)
    parts = Parts(
        tmp_path, from_checkpoint=str(trained), envs=2, eval_eps=2, render=True
    )
    parts.task = Filmed
    parts.eval_only()
    assert len(Screen.last.frames) == LENGTH + 1
    assert Screen.last.frames[0].shape == (16, 24, 3)
    assert Screen.last.closed


def test_without_a_display_the_window_is_refused(monkeypatch):
    tkinter = pytest.importorskip("tkinter")
    monkeypatch.delenv("DISPLAY", raising=False)
    if sys.platform != "linux":
        pytest.skip("elsewhere there is always a display")
    assert tkinter.TclError
    with pytest.raises(TaskError, match=r"run\.render: expected a display"):
        evaluation.Window("Title")


def test_the_window_prefers_frames_that_were_drawn():
    image, frame = (np.full((4, 4, 3), value, np.uint8) for value in (1, 2))
    other = np.zeros((4, 4, 2), np.uint8)
    assert evaluation.pick_frame({"other": other}) is None
    assert evaluation.pick_frame({"other": other, "image": image}) is image
    assert evaluation.pick_frame({"image": image, "log/frame": frame}) is frame


def test_results_that_cannot_be_written_are_an_error(trained, tmp_path, capsys):
    (tmp_path / "eval").touch()
    with pytest.raises(CheckpointError, match=r"eval"):
        Parts(tmp_path, from_checkpoint=str(trained)).eval_only()
    assert "mean score 15" in capsys.readouterr().out, "but they are shown"


@pytest.mark.parametrize("limit", [{"steps": 8}, {"duration": 1.0}])
def test_steps_and_duration_end_it(trained, tmp_path, capsys, limit):
    parts = Parts(
        tmp_path, from_checkpoint=str(trained), envs=1, eval_eps=10**9, **limit
    )
    result = parts.eval_only()
    assert 1 <= len(result.scores) < 10**6
    assert "(of 1000000000, so that" in capsys.readouterr().out


def test_the_regex_decides_what_is_loaded(trained, tmp_path):
    parts = Parts(tmp_path, from_checkpoint=str(trained), from_checkpoint_regex="rng.*")
    parts.eval_only()
    assert parts.agent.updates == 0


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (None, r"run.from_checkpoint: expected the logdir .* got ''"),
        ("nowhere", r"run.from_checkpoint: .*nowhere, which does not exist"),
        ("", r"run.from_checkpoint: .*, which has no checkpoint"),
    ],
)
def test_without_a_checkpoint_it_says_what_is_missing(tmp_path, folder, message):
    source = "" if folder is None else str(tmp_path / folder)
    parts = Parts(tmp_path / "eval", from_checkpoint=source)
    with pytest.raises(CheckpointError, match=message):
        parts.eval_only()
    assert parts.logger is None, "nothing was opened for writing"


def test_a_damaged_checkpoint_is_named(trained, tmp_path):
    for path in (trained / "ckpt/agent").glob("*.safetensors"):
        path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"ckpt/agent/.*safetensors is damaged"):
        Parts(tmp_path, from_checkpoint=str(trained)).eval_only()


def test_a_checkpoint_without_agent_is_refused(trained, tmp_path):
    other = Parts(tmp_path, from_checkpoint=str(trained))
    Checkpoint(trained, keep=1).save({"replay": 1})
    with pytest.raises(CheckpointError, match="has no part 'agent'"):
        other.eval_only()


class TestEvaluation:
    def test_confidence_interval(self):
        result = Evaluation(7, (1.0, 2.0, 3.0, 4.0), (5, 5, 5, 5), wanted=4)
        # Standard deviation 1.29099 / √4, times Student's t of 3.1824.
        assert result.margin == pytest.approx(2.0542, rel=2e-3)
        assert result.interval == pytest.approx((0.4458, 4.5542), abs=5e-3)
        text = "4 episodes of the agent of step 7: mean score 2.5 "
        assert str(result).startswith(f"{text}(95% confidence interval 0.4")

    @pytest.mark.parametrize("count", [2, 3, 5, 20, 1000])
    def test_margins_are_those_of_student(self, count):
        scores = tuple(np.random.default_rng(count).normal(size=count))
        result = Evaluation(7, scores, (5,) * count, wanted=count)
        error = scipy.stats.sem(scores)
        interval = scipy.stats.t.interval(0.95, count - 1, result.mean_score, error)
        assert result.interval == pytest.approx(interval)

    def test_the_interval_contains_the_mean_as_often_as_it_says(self):
        rng = np.random.default_rng(0)
        for count in (3, 10):
            hits = 0
            for scores in rng.normal(5, 2, (2000, count)):
                low, high = Evaluation(7, tuple(scores), (5,) * count, count).interval
                hits += low < 5 < high
            assert 0.93 < hits / 2000 < 0.97

    def test_scores_that_are_not_finite_are_null(self, tmp_path):
        result = Evaluation(7, (math.inf,), (5,), wanted=1)
        write_result(str(tmp_path), "run", result, {})
        content = json.loads((tmp_path / "eval/7.json").read_text())
        assert content["mean_score"] is None
        assert content["scores"] == [None]

    def test_one_episode_has_no_interval(self):
        result = Evaluation(7, (2.0,), (5,), wanted=1)
        assert result.margin is None
        assert str(result) == (
            "1 episode of the agent of step 7: mean score 2, mean length 5."
        )

    def test_no_episode_has_no_score(self):
        result = Evaluation(7, (), (), wanted=3)
        assert (result.mean_score, result.margin) == (None, None)
        assert str(result) == "No episode was finished (of 3)."


def test_a_failing_env_is_an_error(trained, tmp_path):
    class Failing(Task):
        def step(self, action):
            raise OSError("the env broke")

    parts = Parts(tmp_path, from_checkpoint=str(trained))
    parts.task = Failing
    with pytest.raises(RuntimeError, match="the env broke"):
        parts.eval_only()
    assert parts.logger.closed
    assert isinstance(parts.agent, NotingAgent)
