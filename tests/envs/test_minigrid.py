"""MiniGrid: rooms as images."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from suite_testing import check_suite

pytest.importorskip("minigrid", reason="the extra 'minigrid' is not installed")

from embodied.envs import MissingExtra, UnknownTask, make
from embodied.envs.minigrid import make_minigrid

LEFT, RIGHT, FORWARD = range(3)


def test_suite():
    check_suite("minigrid_DoorKey-5x5", steps=300)


def test_reaching_the_goal_is_terminal_and_running_out_of_time_is_not():
    env = make_minigrid("Empty-5x5")
    env.step({"reset": True})
    for action in (FORWARD, FORWARD, RIGHT, FORWARD, FORWARD):
        obs = env.step({"reset": False, "action": np.int32(action)})
    assert obs["is_last"]
    assert obs["is_terminal"]
    assert obs["reward"] > 0.9
    obs = env.step({"reset": True})
    while not obs["is_last"]:
        obs = env.step({"reset": False, "action": np.int32(LEFT)})
    assert not obs["is_terminal"]


@pytest.mark.parametrize("full", [True, False])
def test_images(full):
    env = make_minigrid("DoorKey-5x5", size=(48, 80), full=full)
    first = env.step({"reset": True})
    turned = env.step({"reset": False, "action": np.int32(LEFT)})
    assert first["image"].shape == turned["image"].shape == (48, 80, 3)
    assert not np.array_equal(first["image"], turned["image"])
    assert (first["direction"] - turned["direction"]) % 4 == 1


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("Empty-5x5", "MiniGrid-Empty-5x5-v0"),
        ("Empty-5x5-v0", "MiniGrid-Empty-5x5-v0"),
        ("MiniGrid-Empty-5x5", "MiniGrid-Empty-5x5-v0"),
        ("MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-5x5-v0"),
        ("MultiRoom-N4-S5", "MiniGrid-MultiRoom-N4-S5-v1"),
        ("MultiRoom-N4-S5-v1", "MiniGrid-MultiRoom-N4-S5-v1"),
    ],
)
def test_names(task, name):
    assert make(f"minigrid_{task}").name == f"gym_{name}"


def test_a_missing_part_of_minigrid_says_what_to_install(monkeypatch):
    def fails(name, **kwargs):
        raise gymnasium.error.DependencyNotInstalled("WFC dependencies are missing")

    monkeypatch.setattr(gymnasium, "make", fails)
    with pytest.raises(MissingExtra, match=r"pip install 'minigrid\[wfc\]'"):
        make("minigrid_WFC-MazeSimple")


def test_unknown_task():
    with pytest.raises(UnknownTask, match=r"Did you mean minigrid_DoorKey-5x5"):
        make("minigrid_DorKey-5x5")
