"""Crafter: rewards, achievements, and worlds that the seed decides."""

from __future__ import annotations

import types

import numpy as np
import pytest
from suite_testing import check_suite, play, rollout, same

crafter = pytest.importorskip("crafter", reason="the extra 'crafter' is not installed")

from embodied.envs import UnknownTask, make  # noqa: E402
from embodied.envs.crafter import Crafter  # noqa: E402

POSITIONS = [(3, 1), (0, 2), (3, 0), (1, 5)]


@pytest.mark.slow
def test_suite():
    check_suite("crafter_reward", steps=60, length=40, logs=True)


def test_image_has_the_chosen_size():
    env = Crafter(size=(72, 96))
    assert env.obs_space["image"].shape == (72, 96, 3)
    image = env.step({"reset": True})["image"]
    assert image.shape == (72, 96, 3)
    assert image.max() > 0


def test_creatures_are_drawn_in_the_order_of_their_positions(monkeypatch):
    # Sets of creatures iterate in the order of their addresses, whatever the seed.
    orders = []
    monkeypatch.setattr(
        crafter.Env,
        "_balance_object",
        lambda self, chunk, objs, *args: orders.append([cow.pos for cow in objs]),
    )
    creatures = [types.SimpleNamespace(pos=np.array(pos)) for pos in POSITIONS]
    env = Crafter()._env
    env._balance_object(None, creatures)
    env._balance_object(None, creatures[::-1])
    assert np.array_equal(orders, [sorted(POSITIONS)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_long_episodes_are_the_same_every_time(seed):
    # Long enough for a night, when zombies appear and are removed again.
    one, other = (play(Crafter(seed=seed), 1000) for _ in range(2))
    assert same(one, other)


def test_achievements_are_logged_and_rewarded():
    env = Crafter(logs=True, seed=1)
    names = {key for key in env.obs_space if key.startswith("log/achievement_")}
    assert len(names) == 22
    obs = env.step({"reset": True})
    assert all(obs[name] == 0 for name in names)
    counts = dict.fromkeys(names, 0.0)
    rewards = []
    for obs in play(env, 100)[1:]:
        if obs["is_last"]:
            break
        unlocked = [name for name in names if obs[name] and not counts[name]]
        counts = {name: obs[name] for name in names}
        rewards.append(obs["reward"])
        assert (obs["reward"] > 0.5) == bool(unlocked)
    assert max(rewards) >= 0.9


def test_without_reward_only_the_log_has_it():
    rewarded = rollout("crafter_reward", 45, logs=True)
    without = rollout("crafter_noreward", 45, logs=True)
    assert any(obs["reward"] for obs in rewarded)
    assert not any(obs["reward"] for obs in without)
    assert [obs["log/reward"] for obs in without] == [obs["reward"] for obs in rewarded]


def test_logs_are_off_by_default():
    assert not any(key.startswith("log/") for key in make("crafter_reward").obs_space)


def test_death_is_terminal_and_running_out_of_time_is_not():
    # A player that does nothing starves or is killed by zombies.
    env = Crafter(seed=2)
    obs = env.step({"reset": True})
    steps = 0
    while not obs["is_last"]:
        obs = env.step({"reset": False, "action": np.int32(0)})
        steps += 1
    assert obs["is_terminal"]
    assert steps < 1000
    cut = play(Crafter(length=10), 10)[-1]
    assert cut["is_last"]
    assert not cut["is_terminal"]


def test_unknown_task():
    with pytest.raises(UnknownTask, match=r"noreward, reward\), got 'rewrad'"):
        make("crafter_rewrad")
