"""Many updates that are due at once: they can be ended, logged and saved midway."""

import os
import signal

import numpy as np
import pytest
from run_testing import START, FailingAgent, NotingAgent, Parts, newest_step

# Two steps after the start, 84 updates of 4 sequences of 6 are due.
STEPS = START + 2
MANY = {"steps": STEPS, "envs": 2, "train_ratio": 1000.0}
ALWAYS = 1e-9  # Seconds; an interval that has passed at every check.


def finish(logdir):
    """Resumes the run, which makes the updates still due; returns the agent."""
    parts = Parts(logdir, log_every=ALWAYS, **MANY)
    parts.train()
    assert parts.agent.policies == [], "there were enough steps"
    assert 0 < parts.agent.updates * 4 * 6 - 1000 * 2 <= 4 * 6
    writes = len(parts.agent.trained) - 1
    assert parts.logger.writes == writes, "the first update starts the clock"
    return parts.agent


def test_a_signal_ends_them_and_the_others_are_made_later(tmp_path):
    class Stopping(NotingAgent):
        def train(self, carry, batch):
            if self.updates == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().train(carry, batch)

    parts = Parts(tmp_path, **MANY)
    parts.make_agent = Stopping
    result = parts.train()
    assert (result.updates, result.step, newest_step(tmp_path)) == (3, STEPS, STEPS)
    assert parts.replay.stats()["total_train_samples"] == 3 * 4, "none in vain"
    agent = finish(tmp_path)
    assert len(agent.trained) == agent.updates - 3


def test_a_signal_before_them_is_no_time_for_one_more(tmp_path):
    class Stopping(NotingAgent):
        def policy(self, carry, obs, mode="train"):
            if len(self.policies) == START // 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().policy(carry, obs, mode)

    parts = Parts(tmp_path, **MANY)
    parts.make_agent = Stopping
    result = parts.train()
    assert (result.updates, result.step) == (1, STEPS)
    finish(tmp_path)


def test_the_duration_ends_them(tmp_path):
    parts = Parts(tmp_path, steps=1e10, train_ratio=1e10, duration=1.0)
    result = parts.train()
    assert 1.0 <= result.seconds < 20
    assert result.updates > 0
    assert result.step == newest_step(tmp_path) == STEPS


def test_metrics_and_checkpoints_come_in_between(tmp_path):
    parts = Parts(tmp_path, log_every=ALWAYS, save_every=ALWAYS, **MANY)
    parts.make_agent = FailingAgent
    with pytest.raises(FloatingPointError):
        parts.train()
    assert parts.logger.values("train/updates") == [1, 2, 3, 4, 5]
    assert set(parts.logger.steps("train/updates")) == {START, STEPS}
    assert newest_step(tmp_path) == STEPS
    agent = finish(tmp_path)
    assert len(agent.trained) == agent.updates - 5, "the last one was saved"


def test_pauses_change_nothing(tmp_path):
    agents = []
    for every in (0.0, ALWAYS):
        parts = Parts(
            tmp_path / str(every), steps=START + 4, train_ratio=100.0, log_every=every
        )
        parts.train()
        agents.append(parts.agent)
    for one, other in zip(*(agent.trained for agent in agents), strict=True):
        assert np.array_equal(one["where"], other["where"])
