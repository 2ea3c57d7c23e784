"""Pin pad: only the right order of pads is rewarded."""

from __future__ import annotations

import numpy as np
import pytest
from suite_testing import check_suite, episodes

from embodied.envs import UnknownTask, make
from embodied.envs.pinpad import HEIGHT, MOVES, PAD, REWARD, TASKS, WIDTH, PinPad


@pytest.mark.parametrize("task", TASKS)
def test_suite(task):
    history = check_suite(f"pinpad_{task}", steps=300, length=80)
    assert episodes(history) == 3
    assert not any(obs["is_terminal"] for obs in history)


def walk(env, target):
    """Goes to a pad without entering others; returns the sum of rewards."""
    total = 0.0
    for action in way(env, target):
        total += env.step({"reset": False, "action": np.int32(action)})["reward"]
    return total


def order(env):
    """Middle cells (row, column) of the pads, in the right order."""
    return [(row + PAD // 2, column + PAD // 2) for row, column in env._places]


def way(env, target):
    """The shortest moves to a pad that lead over no other pad."""
    own = env._pads[target]
    came = {env._agent: None}
    queue = [env._agent]
    for cell in queue:
        for action, (down, right) in list(enumerate(MOVES))[1:]:
            near = cell[0] + down, cell[1] + right
            inside = 0 < near[0] < HEIGHT - 1 and 0 < near[1] < WIDTH - 1
            open_cell = inside and env._pads[near] in (-1, own, env._pads[env._agent])
            if open_cell and near not in came:
                came[near] = (cell, action)
                queue.append(near)
    moves, cell = [], target
    while came[cell]:
        cell, action = came[cell]
        moves.append(action)
    return moves[::-1]


@pytest.mark.parametrize("task", TASKS)
def test_the_right_order_is_rewarded(task):
    env = PinPad(task)
    env.step({"reset": True})
    rewards = [walk(env, target) for target in order(env)]
    assert rewards == [0.0] * (len(rewards) - 1) + [REWARD]
    # Once more, from where the reward has moved the agent.
    assert sum(walk(env, target) for target in order(env)) == REWARD


def test_wrong_orders_are_not_rewarded_and_can_be_made_up_for():
    env = PinPad("three")
    env.step({"reset": True})
    first, second, third = order(env)
    assert walk(env, first) == walk(env, third) == walk(env, second) == 0
    assert walk(env, first) == walk(env, second) == 0
    assert walk(env, third) == REWARD


def test_history_is_visible():
    env = PinPad("four")
    image = env.step({"reset": True})["image"]
    assert not image[4 * HEIGHT :].any()
    for number, target in enumerate(order(env)[:2], 1):
        walk(env, target)
        image = env.step({"reset": False, "action": np.int32(0)})["image"]
        shown = image[-1, 4::8].any(-1)
        assert shown.sum() == number
        color = image[4 * target[0] + 5, 4 * target[1] + 5]
        np.testing.assert_array_equal(image[-1, 8 * number - 1], color)


def test_walls_stop_the_agent():
    env = PinPad("three", seed=1)
    env.step({"reset": True})
    for action in (1, 2, 3, 4):
        for _ in range(20):
            env.step({"reset": False, "action": np.int32(action)})
        before = env._agent
        env.step({"reset": False, "action": np.int32(action)})
        assert env._agent == before


@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
def test_size(size):
    env = PinPad("three", size=size)
    assert env.step({"reset": True})["image"].shape == (*size, 3)


def test_mistakes():
    with pytest.raises(UnknownTask, match=r"got 'nine'"):
        make("pinpad_nine")
    with pytest.raises(ValueError, match="multiples of 16 and 16"):
        PinPad("three", size=(60, 64))
    with pytest.raises(ValueError, match="length of at least 1"):
        PinPad("three", length=0)
