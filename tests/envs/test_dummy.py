"""The dummy environment: cheap, with varied observations of every kind."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.envs import UnknownTask
from embodied.envs.dummy import Dummy
from embodied.wrappers import wrap

RESET = {"reset": True}


def sample(env, rng):
    action = {key: space.sample(rng) for key, space in env.act_space.items()}
    return {**action, "reset": False}


@pytest.mark.parametrize(
    ("task", "actions"),
    [
        ("disc", {"act_disc"}),
        ("cont", {"act_cont"}),
        ("both", {"act_disc", "act_cont"}),
    ],
)
def test_tasks_differ_in_their_actions(task, actions):
    env = Dummy(task)
    assert env.act_space.keys() == actions | {"reset"}
    if "act_disc" in actions:
        assert env.act_space["act_disc"].classes == 5
    if "act_cont" in actions:
        assert env.act_space["act_cont"].shape == (6,)


@pytest.mark.parametrize("task", ["disc", "cont", "both"])
def test_values_are_in_their_spaces_through_the_standard_wrappers(task):
    env = wrap(Dummy(task, length=7))
    rng = np.random.default_rng(0)
    obs = env.step(RESET)
    for _ in range(30):
        obs = env.step({**sample(env, rng), "reset": obs["is_last"]})
        for key, space in env.obs_space.items():
            assert obs[key] in space, key


def test_episodes_have_the_given_length_and_every_other_one_is_terminal():
    env = Dummy(length=3)
    episodes = []
    for _ in range(4):
        steps = [env.step(RESET)]
        while not steps[-1]["is_last"]:
            steps.append(env.step({"reset": False, "act_disc": np.int32(0)}))
        episodes.append(steps)
    for steps in episodes:
        assert [int(obs["count"]) for obs in steps] == [0, 1, 2, 3]
        assert [bool(obs["is_first"]) for obs in steps] == [True, False, False, False]
        assert [float(obs["reward"]) for obs in steps] == [0, 0, 0, 1]
    ends = [bool(steps[-1]["is_terminal"]) for steps in episodes]
    assert ends == [False, True, False, True]


def test_a_reset_in_the_middle_starts_over():
    env = Dummy(length=3)
    env.step(RESET)
    env.step({"reset": False, "act_disc": np.int32(0)})
    obs = env.step(RESET)
    assert obs["is_first"]
    assert obs["count"] == 0


@pytest.mark.parametrize("key", ["image", "vector", "float2d"])
def test_observations_differ_between_steps_and_seeds(key):
    env, other = Dummy(seed=1), Dummy(seed=2)
    one, two = env.step(RESET), env.step({"reset": False, "act_disc": np.int32(0)})
    assert not np.array_equal(one[key], two[key])
    assert not np.array_equal(one[key], other.step(RESET)[key])


def test_wrong_arguments():
    with pytest.raises(UnknownTask, match=r"both, cont, disc\), got 'discrete'"):
        Dummy("discrete")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Dummy(length=0)
