"""LocoNav: mazes that can be solved, walkers that move, targets that reward."""

from __future__ import annotations

import numpy as np
import pytest
from suite_testing import check_suite, play, same, skip_without_rendering

pytest.importorskip("dm_control", reason="the extra 'dmc' is not installed")

from embodied.envs import UnknownTask, make
from embodied.envs.loconav import SIZES, WALKERS, LocoNav, _draw
from embodied.wrappers import wrap

OTHERS = sorted(WALKERS.keys() - {"ball"})


def reachable(text):
    """The open cells that can be reached from the first start."""
    lines = text.splitlines()
    cells = {
        (row, column): token
        for row, line in enumerate(lines)
        for column, token in enumerate(line)
    }
    queue = [next(cell for cell, token in cells.items() if token == "P")]
    for row, column in queue:
        near = ((row + 1, column), (row - 1, column), (row, column + 1))
        for cell in (*near, (row, column - 1)):
            if cells[cell] != "*" and cell not in queue:
                queue.append(cell)
    return queue


@pytest.mark.parametrize("layout", [*(f"maze_{size}" for size in SIZES), "empty"])
def test_every_place_of_a_maze_can_be_reached(layout):
    text = _draw(layout)
    assert len(reachable(text)) == sum(text.count(token) for token in ".PG")
    assert "P" in text
    assert "G" in text


@pytest.mark.slow
def test_suite():
    with skip_without_rendering():
        check_suite("loconav_ball_maze_s", steps=200, length=90)


def test_the_seed_decides_the_places():
    with skip_without_rendering():
        one, again, other = (
            LocoNav("ball_maze_l", camera=0, seed=seed).step({"reset": True})
            for seed in (1, 1, 2)
        )
    assert same([one], [again])
    assert not same([one], [other])


@pytest.mark.parametrize(
    "walker",
    ["ball", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_walkers(walker):
    with skip_without_rendering():
        env = LocoNav(f"{walker}_maze_m", size=(48, 64), length=8)
    history = play(wrap(env), 10)
    assert [obs["is_last"] for obs in history].index(True) == 8
    assert history[1]["image"].shape == (48, 64, 3)
    assert history[1]["image"].std() > 5
    assert 0 < history[-1]["log/coverage"] < 0.5


def test_other_cameras_see_the_maze_from_above():
    with skip_without_rendering():
        env = LocoNav("ball_maze_s", camera=0)
    first = env.step({"reset": True})["image"]
    later = env.step({"reset": False, "action": np.ones(2)})["image"]
    assert "walker/egocentric_camera" not in env.obs_space
    assert first.std() > 5
    assert first.shape == later.shape == (64, 64, 3)


def test_reaching_the_target_is_rewarded_and_the_episode_goes_on():
    with skip_without_rendering():
        env = LocoNav("ball_maze_s", camera=0)
    env.step({"reset": True})
    task, physics = env.dm_env.task, env.dm_env.physics
    start = np.array(physics.bind(env._walker.root_body).xpos)
    env._walker.set_pose(physics, [*task._target_position[:2], start[2]])
    steps = [env.step({"reset": False, "action": np.zeros(2)}) for _ in range(3)]
    assert sum(obs["reward"] for obs in steps) == 1
    assert not any(obs["is_last"] for obs in steps)


def test_mistakes():
    with pytest.raises(UnknownTask, match="Did you mean loconav_ant_maze_m"):
        make("loconav_ant_mazem")
    with pytest.raises(ValueError, match="length of at least 1"):
        LocoNav("ant_maze_m", length=0)
