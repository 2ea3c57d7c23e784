"""Evaluating the agent of a checkpoint."""

import pytest
from run_testing import LENGTH, NotingAgent, Parts, Task

from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.run import Evaluation


@pytest.fixture
def trained(tmp_path):
    """The logdir of a run of 30 steps."""
    Parts(tmp_path / "run", steps=30).train()
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
    assert (result.step, result.mean_score, result.margin) == (30, 3.0 * LENGTH, 0)
    assert parts.agent.updates > 0
    assert {mode for mode, _ in parts.agent.policies} == {"eval"}
    assert (
        "6 episodes of the agent of step 30: mean score 15" in capsys.readouterr().out
    )
    assert files(trained) == before, "it is only read"
    assert not (tmp_path / "eval").exists(), "and nothing is saved"


def test_metrics_are_those_of_evaluation_at_the_step_of_the_agent(trained, tmp_path):
    parts = Parts(tmp_path, from_checkpoint=str(trained), log_every=-1.0)
    parts.eval_only()
    logger = parts.logger
    assert logger.values("eval_episode/score") == [3.0 * LENGTH] * 2
    assert {step for step, _, _ in logger.rows} == {30}
    assert {"eval_epstats/reward_rate", "fps/policy"} <= logger.names()
    assert not [name for name in logger.names() if name.startswith(("epis", "epst"))]
    assert logger.closed


@pytest.mark.parametrize(
    ("envs", "episodes", "expected"), [(4, 1, 4), (2, 5, 5), (3, 3, 3)]
)
def test_each_env_plays_at_least_one_episode(
    trained, tmp_path, envs, episodes, expected
):
    parts = Parts(tmp_path, from_checkpoint=str(trained), envs=envs, eval_eps=episodes)
    assert len(parts.eval_only().scores) == expected


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
        # Standard deviation 1.29099, by the root of 4, times 1.95996.
        assert result.margin == pytest.approx(1.26516, abs=1e-5)
        text = "4 episodes of the agent of step 7: mean score 2.5 "
        assert str(result).startswith(f"{text}(95% confidence interval 1.235 to 3.765)")

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
