"""The DeepMind Control Suite: from state, from images, or from both."""

from __future__ import annotations

import numpy as np
import pytest
from suite_testing import check_suite, play, same, skip_without_rendering

pytest.importorskip("dm_control", reason="the extra 'dmc' is not installed")

from embodied.envs import UnknownTask, make
from embodied.envs.dmc import DMC


def test_suite_from_state():
    check_suite("dmc_walker_walk", steps=140, repeat=8, image=False)


@pytest.mark.parametrize("task", ["cup_catch", "ball_in_cup_catch", "point_mass_easy"])
def test_names_of_tasks(task):
    env = DMC(task, image=False)
    obs = env.step({"reset": True})
    assert {"position", "velocity"} <= obs.keys()
    assert "image" not in obs


def test_repeat_shortens_episodes():
    lengths = []
    for repeat in (10, 25):
        history = play(DMC("cartpole_balance", image=False, repeat=repeat), 110)
        lengths.append([obs["is_last"] for obs in history].index(True))
    assert lengths == [100, 40]
    assert not any(obs["is_terminal"] for obs in history)


def test_images():
    with skip_without_rendering():
        env = DMC("walker_walk", size=(48, 80), proprio=False)
        obs = env.step({"reset": True})
    assert obs.keys() == env.obs_space.keys()
    assert obs["image"].shape == (48, 80, 3)
    assert obs["image"].std() > 5
    keys = {"image", "reward", "is_first", "is_last", "is_terminal"}
    assert env.obs_space.keys() == keys
    one, other = (play(DMC("walker_walk", seed=1), 3) for _ in range(2))
    assert same(one, other)
    assert one[0].keys() > keys


def test_cameras_show_different_images():
    with skip_without_rendering():
        images = [
            DMC("quadruped_walk", camera=camera).step({"reset": True})["image"]
            for camera in (-1, 2, 0)
        ]
    usual, second, zeroth = images
    np.testing.assert_array_equal(usual, second)
    assert not np.array_equal(usual, zeroth)


def test_mistakes():
    with pytest.raises(UnknownTask, match="Did you mean dmc_walker_walk"):
        make("dmc_walker_wlak", image=False)
    with pytest.raises(ValueError, match="Expected proprio, image or both"):
        DMC("walker_walk", image=False, proprio=False)
