"""Tests how FromGym runs episodes, reports errors, finds ids and takes flags."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import pytest
from gym_testing import BINARY, Echo, box
from gymnasium import spaces
from suite_testing import RESET

from dreamerv3.cli.config import ConfigError, load_config, run_config
from dreamerv3.cli.factories import make_env
from dreamerv3.cli.logdir import prepare_logdir
from embodied.envs import MissingExtra, UnknownTask
from embodied.envs.from_gym import FromGym
from embodied.envs.keys import UnusableEnv
from embodied.wrappers import SpaceError, wrap


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_terminated_and_truncated_are_told_apart(terminated, truncated):
    env = FromGym(Echo(spaces.Discrete(2)))
    env.step(RESET)
    env.gym_env.outcome = (2.5, terminated, truncated, {})
    obs = env.step({"reset": False, "action": np.int32(0)})
    assert obs["reward"] == 2.5
    assert obs["is_last"] == (terminated or truncated)
    assert obs["is_terminal"] == terminated
    assert not obs["is_first"]


def test_first_observation_has_no_reward():
    obs = FromGym(Echo(spaces.Discrete(2))).step(RESET)
    assert obs["is_first"]
    assert obs["reward"] == 0
    assert not obs["is_last"]


def test_only_the_first_reset_is_seeded():
    env = FromGym(Echo(spaces.Discrete(2)), seed=7)
    for _ in range(3):
        env.step(RESET)
    assert env.gym_env.seeds == [7, None, None]


def test_a_finished_episode_is_reset_even_if_nobody_asks():
    env = FromGym(Echo(spaces.Discrete(2)))
    env.step(RESET)
    env.gym_env.outcome = (0.0, True, False, {})
    action = {"reset": False, "action": np.int32(0)}
    assert env.step(action)["is_last"]
    assert env.step(action)["is_first"]


def test_observations_are_copies_of_the_environments_buffer():
    env = FromGym(Echo(spaces.Box(0, 1, (3,), np.float32)))
    obs = env.step(RESET)["obs"]
    before = obs.copy()
    env.gym_env.observation += 1
    np.testing.assert_array_equal(obs, before)


def test_float_observations_may_leave_their_bounds():
    gym_env = Echo(spaces.Box(-1, 1, (2,), np.float64))
    gym_env.observation_space.sample = lambda: np.array([3.0, -3.0])
    obs = wrap(FromGym(gym_env)).step(RESET)
    np.testing.assert_array_equal(obs["obs"], np.float32([3, -3]))


def test_chosen_infos_are_logged():
    env = FromGym(Echo(spaces.Discrete(2)), info_keys=["success"])
    assert env.step(RESET)["log/success"] == 0
    env.gym_env.outcome = (0.0, True, False, {"success": True, "other": "text"})
    obs = env.step({"reset": False, "action": np.int32(0)})
    assert obs["log/success"] == 1
    assert obs.keys() == env.obs_space.keys()


def test_close_closes_once():
    env = FromGym(Echo(spaces.Discrete(2)))
    env.close()
    env.close()
    assert env.gym_env.closes == 1


def test_observation_without_a_declared_key():
    env = FromGym(Echo(spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))))
    env.gym_env.observation_space.sample = lambda: {"a": 1}
    with pytest.raises(UnusableEnv, match="'b' of an observation"):
        env.step(RESET)


@pytest.mark.parametrize(
    ("space", "value", "advice"),
    [
        (spaces.Box(-1, 1, (2,), np.float32), [np.nan, 0.0], "finite"),
        (spaces.Box(0, 9, (2,), np.int32), [1.5, 2.0], "Convert it to int32"),
        (spaces.Box(0, 9, (2,), np.int32), [1, 10], "bounds"),
        (spaces.Discrete(3, start=1), 4, "bounds"),
        (spaces.Discrete(3), "two", "Convert it to int32"),
        (spaces.Box(-1, 1, (2,), np.float32), [0.0], "shape"),
    ],
)
def test_wrong_observations_are_reported_by_key(space, value, advice):
    gym_env = Echo(space)
    gym_env.observation_space.sample = lambda: value
    with pytest.raises(SpaceError, match=f"'obs' of env Echo.*{advice}"):
        wrap(FromGym(gym_env)).step(RESET)


def test_exceptions_of_the_environment_pass_unchanged():
    class Broken(Echo):
        def step(self, action):
            raise OSError("socket lost")

    env = wrap(FromGym(Broken(spaces.Discrete(2))))
    env.step(RESET)
    with pytest.raises(OSError, match=r"^socket lost$"):
        env.step({"reset": False, "action": np.int32(0)})


def test_registered_ids_with_options():
    env = FromGym("CartPole-v1", max_episode_steps=3, seed=1)
    assert env.name == "gym_CartPole-v1"
    obs = env.step(RESET)
    lengths = 0
    while not obs["is_last"]:
        obs = env.step({"reset": False, "action": np.int32(lengths % 2)})
        lengths += 1
    assert lengths == 3
    assert not obs["is_terminal"]
    env.close()


def test_options_need_an_id():
    with pytest.raises(TypeError, match="render_mode"):
        FromGym(Echo(spaces.Discrete(2)), render_mode="rgb_array")


def test_unknown_id():
    with pytest.raises(UnknownTask, match=r"CartPol-v1.*CartPole"):
        FromGym("CartPol-v1")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.delitem(gymnasium.registry, "ALE/Pong-v5", raising=False)
    with pytest.raises(
        MissingExtra, match=r"pip install 'dreamerv3-parallel\[atari\]'"
    ):
        FromGym("ALE/Pong-v5")


def test_numbers_of_info_are_logged_and_others_refused():
    gym_env = Echo(BINARY)
    env = FromGym(gym_env, info_keys=["none", "speed"])
    assert "log/none" not in env.obs_space
    assert env.step(RESET)["log/speed"] == 0
    gym_env.outcome = (1.0, False, False, {"speed": "fast"})
    with pytest.raises(UnusableEnv, match=r"info\['speed'\] as a number"):
        env.step({"reset": False, "action": np.int32(0)})


def test_arguments_of_environments_are_flags(tmp_path):
    flags = [
        "--task",
        "gym_CartPole-v1",
        "--env.gym.kwargs.sutton_barto_reward",
        "True",
    ]
    config = load_config([*flags, "--logdir", str(tmp_path)], {})
    env = make_env(config, 0)
    assert env.gym_env.unwrapped._sutton_barto_reward is True
    env.close()
    prepare_logdir(config)
    assert run_config(tmp_path).env.gym.kwargs.sutton_barto_reward is True
    own = load_config(["--task", "test_from_gym:sized", "--env.gym.kwargs.n", "3"], {})
    env = make_env(own, 0)
    assert env.act_space["action"].classes == 3
    for name in ("", "a.b"):
        with pytest.raises(ConfigError, match="expected the name of an argument"):
            load_config([f"--env.gym.kwargs.{name}", "1"], {})


def sized(n=2):
    return Echo(BINARY, spaces.Discrete(n))


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ([], (64, 64)),
        (["--env.gym.size", "48", "80"], (48, 80)),
        (["--env.gym.size", "50", "70", "--random_agent", "True"], (50, 70)),
        (["--agent.enc.simple.mults", "1", "2"], (64, 64)),
    ],
)
def test_images_get_a_size_that_networks_take(flags, size):
    config = load_config(["--task", "test_from_gym:pictures", *flags], {})
    env = make_env(config, 0)
    assert env.obs_space["image"].shape == (*size, 3)
    assert env.step(RESET)["image"].shape == (*size, 3)
    fitting = load_config(["--task", "test_from_gym:fitting"], {})
    assert make_env(fitting, 0).obs_space["image"].shape == (96, 80, 3)


def pictures():
    return Echo(box((3, 210, 160)))


def fitting():
    return Echo(box((96, 80, 3)))
