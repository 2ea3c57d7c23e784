"""The simulated device: a clock in place of computation."""

import time

import numpy as np
import pytest

from benchmarks import simulated
from embodied import Space
from embodied.envs.keys import SIGNALS

OBS = {"image": Space(np.uint8, (4, 4, 3)), **SIGNALS}
ACT = {"action": Space(np.int32, (), 0, 3), "reset": Space(bool)}


def test_work_is_done_one_after_the_other_and_not_before_it_is_queued():
    clock = simulated.Clock()
    before = time.monotonic()
    first, second = clock.queue(10.0), clock.queue(5.0)
    assert first == pytest.approx(before + 10, abs=1)
    assert second == pytest.approx(first + 5)


def test_an_update_returns_what_the_one_before_has_made():
    agent = simulated.ClockAgent(OBS, ACT, update=0.01, launch=0.0, policy=0.0)
    carry = agent.init_train(2)
    batches = [{"stepid": np.full((2, 5, 20), index, np.uint8)} for index in range(3)]
    carry, outputs, metrics = agent.train(carry, batches[0])
    assert (outputs, metrics) == ({}, {})
    begin = time.monotonic()
    for index in (1, 2):
        carry, outputs, metrics = agent.train(carry, batches[index])
        stored = outputs["replay"]
        assert (stored["stepid"] == index - 1).all()
        assert stored["stepid"].shape == (2, 4, 20)
        assert stored["dyn/deter"].shape == (2, 4, simulated.DETER)
        assert list(metrics) == ["loss"]
    assert time.monotonic() >= begin + 0.01, "it has waited for the device"


@pytest.mark.parametrize("beside", [False, True])
def test_policy_steps_wait_for_updates_unless_they_run_beside_them(beside):
    agent = simulated.ClockAgent(OBS, ACT, 0.5, launch=0.0, policy=0.0, beside=beside)
    begin = time.monotonic()
    agent.train(agent.init_train(2), {"stepid": np.zeros((2, 5, 20), np.uint8)})
    obs = {key: np.zeros((3, *space.shape), space.dtype) for key, space in OBS.items()}
    _, actions, latents = agent.policy(agent.init_policy(3), obs)
    waited = time.monotonic() >= begin + 0.5
    assert waited != beside
    assert actions["action"].shape == (3,)
    assert latents["dyn/stoch"].shape == (3, simulated.STOCH)


def test_batches_are_copied():
    agent = simulated.ClockAgent(OBS, ACT, update=0.0, launch=0.0, policy=0.0)
    batch = {"reward": np.zeros(3)}
    stream = agent.stream([batch])
    moved = next(stream)
    batch["reward"][:] = 1
    np.testing.assert_array_equal(moved["reward"], 0)
    stream.close()
