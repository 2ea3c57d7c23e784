"""Training and evaluation in one process."""

import numpy as np
import pytest
from loop_testing import LENGTH, Task
from run_testing import Parts, contents, newest_step

from embodied.driver import EnvError


def test_scores_of_training_and_evaluation_are_apart(tmp_path):
    parts = Parts(tmp_path, steps=40, report_every=-1.0, eval_eps=2)
    result = parts.train_eval()
    logger = parts.logger
    assert set(logger.values("episode/score")) == {LENGTH}
    assert set(logger.values("eval_episode/score")) == {3 * LENGTH}
    assert len(logger.values("eval_episode/score")) == 2 * 20, "the last one too"
    assert logger.names() >= {
        "epstats/reward_rate",
        "eval_epstats/reward_rate",
        "report/reward_mean",
        "eval/reward_mean",
        "replay/items",
        "replay_eval/items",
        "timer/evaluate",
    }
    assert result.mean_score == LENGTH


def test_evaluation_acts_in_its_mode_and_on_its_own_envs(tmp_path):
    parts = Parts(tmp_path, steps=20, envs=3, eval_envs=2, report_every=-1.0)
    parts.train_eval()
    assert set(map(repr, parts.agent.policies)) == {
        repr(("train", [0, 1, 2])),
        repr(("eval", [3, 4])),
    }
    assert parts.envs == [(0, False), (1, False), (2, False), (3, True), (4, True)]


def test_evaluation_counts_no_steps_and_stores_them_apart(tmp_path):
    parts = Parts(tmp_path, steps=40, envs=2, eval_envs=2, report_every=-1.0)
    assert parts.train_eval().step == 40
    assert {env for env, _, _ in contents(parts.replay)} == {0, 1}
    assert {env for env, _, _ in contents(parts.replay_eval)} == {2, 3}
    assert parts.replay.stats()["total_inserts"] == 40
    assert newest_step(tmp_path) == 40


def test_both_replays_are_reported_on(tmp_path):
    parts = Parts(tmp_path, steps=40, report_every=-1.0)
    parts.train_eval()
    means = {
        name: parts.logger.values(f"{name}/reward_max") for name in ("report", "eval")
    }
    assert set(means["report"]) == {1.0}
    assert set(means["eval"]) == {3.0}


def test_every_evaluation_begins_with_new_episodes(tmp_path):
    parts = Parts(tmp_path, steps=30, report_every=-1.0, eval_envs=1, eval_eps=1)
    parts.train_eval()
    assert set(parts.logger.values("eval_episode/length")) == {LENGTH}
    # Each evaluation begins with a new episode, so no stored one is cut short.
    batch = parts.replay_eval.sample(500)
    for where, last in zip(batch["where"], batch["is_last"]):
        ends = np.flatnonzero(last[:-1])
        assert (where[ends, 2] == LENGTH).all()


@pytest.mark.parametrize(("envs", "episodes"), [(3, 2), (2, 5), (4, 4)])
def test_the_number_of_episodes_is_exact_and_not_in_favour_of_short_ones(
    tmp_path, envs, episodes
):
    class Uneven(Task):
        """Episodes are ten times as long in env 2, the first one for evaluation."""

        def __init__(self, index, reward=1.0):
            super().__init__(index, reward, length=10 if index == 2 else 1)

    parts = Parts(tmp_path, steps=20, envs=2, eval_envs=envs, eval_eps=episodes)
    parts.args = parts.args.update(report_every=-1.0)
    parts.task = Uneven
    parts.train_eval()
    lengths = parts.logger.values("eval_episode/length")
    share = episodes // envs + (episodes % envs > 0)
    evaluations = 10
    assert len(lengths) == episodes * evaluations
    assert lengths.count(10) == share * evaluations, "of the first eval env, id 2"


def test_it_continues_where_it_was(tmp_path):
    first = Parts(tmp_path, steps=40, report_every=-1.0)
    first.train_eval()
    again = Parts(tmp_path, steps=40, report_every=-1.0)
    again.train_eval()
    assert contents(again.replay) == contents(first.replay)
    assert contents(again.replay_eval) == contents(first.replay_eval) != set()


def test_a_run_without_evaluation_can_go_on_with_it_and_back(tmp_path, caplog):
    Parts(tmp_path, steps=20).train()
    Parts(tmp_path, steps=40, report_every=-1.0).train_eval()
    assert "has no part 'replay_eval'; it starts from its initial state" in caplog.text
    third = Parts(tmp_path, steps=60)
    assert third.train().steps == 20


def test_it_needs_environments_for_evaluation(tmp_path):
    with pytest.raises(ValueError, match="at least one environment, got none"):
        Parts(tmp_path, eval_envs=0).train_eval()


def test_an_env_that_fails_at_its_close_loses_no_metrics(tmp_path):
    class Failing(Task):
        def close(self):
            raise OSError("the env cannot be closed")

    parts = Parts(tmp_path, steps=40)
    parts.make_env_eval = Failing
    with pytest.raises(EnvError, match="the env cannot be closed"):
        parts.train_eval()
    assert newest_step(tmp_path) == 40
    assert parts.logger.writes == 1
    assert parts.logger.steps("fps/train") == [40]
    assert "train/updates" in parts.logger.names()


def test_its_end_comes_within_an_evaluation_too(tmp_path):
    parts = Parts(
        tmp_path, steps=1e10, duration=0.5, report_every=-1.0, eval_eps=100_000
    )
    result = parts.train_eval()
    assert 0.5 <= result.seconds < 20
    assert newest_step(tmp_path) == result.step > 0
