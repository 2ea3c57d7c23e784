"""The grid task: hard for a random policy, easy for one that sees the image."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from embodied.envs import UnknownTask
from embodied.envs.grid import CELLS, MOVES, Grid
from embodied.wrappers import wrap

RESET = {"reset": True}
AGENT, GOAL, TRAP = (255, 255, 255), (255, 255, 0), (255, 0, 255)
TASKS = pytest.mark.parametrize("task", ["reach", "avoid"])


def find(image, color):
    """Returns the cell whose middle has the `color`, or None."""
    height, width = (side // CELLS for side in image.shape[:2])
    middles = image[height // 2 :: height, width // 2 :: width]
    cells = np.argwhere((middles == color).all(-1))
    assert len(cells) <= 1
    return tuple(cells[0].tolist()) if len(cells) else None


def shortest_move(image):
    """The first move on a shortest way to the goal around the trap."""
    start, goal, trap = (find(image, color) for color in (AGENT, GOAL, TRAP))
    queue = collections.deque([goal])
    toward = {goal: 0}
    while queue:
        row, column = queue.popleft()
        for move, (down, right) in enumerate(MOVES):
            cell = row - down, column - right
            inside = 0 <= cell[0] < CELLS and 0 <= cell[1] < CELLS
            if inside and cell not in toward and cell != trap:
                toward[cell] = move
                queue.append(cell)
    return toward[start]


def play(env, choose, episodes):
    successes, lengths = 0, []
    for _ in range(episodes):
        obs = env.step(RESET)
        length = 0
        while not obs["is_last"]:
            action = np.int32(choose(obs["image"]))
            obs = env.step({"reset": False, "action": action})
            length += 1
        successes += int(obs["log/success"])
        lengths.append(length)
    return successes / episodes, lengths


@pytest.mark.parametrize(
    ("task", "low", "high"), [("reach", 0.11, 0.15), ("avoid", 0.07, 0.11)]
)
def test_random_policy_rarely_succeeds(task, low, high):
    rng = np.random.default_rng(0)
    actions = iter(rng.integers(0, len(MOVES), 200_000))
    rate, lengths = play(Grid(task, seed=0), lambda image: next(actions), episodes=5000)
    # The standard error is 0.005, so that the test would pass with other seeds too.
    assert low <= rate <= high
    assert max(lengths) == 10


@TASKS
def test_whoever_sees_the_image_always_succeeds(task):
    rate, lengths = play(Grid(task, seed=0), shortest_move, episodes=300)
    assert rate == 1.0
    assert min(lengths) == 3
    assert max(lengths) <= 2 * CELLS


def test_reaching_the_goal_is_rewarded_once_and_terminal():
    env = Grid(seed=1)
    obs = env.step(RESET)
    rewards = [obs["reward"]]
    while not obs["is_last"]:
        move = shortest_move(obs["image"])
        obs = env.step({"reset": False, "action": np.int32(move)})
        rewards.append(obs["reward"])
    assert rewards == [0] * (len(rewards) - 1) + [1]
    assert obs["is_terminal"]
    assert obs["log/success"] == 1


def test_the_trap_ends_the_episode_without_reward():
    env = Grid("avoid", seed=0)
    rng = np.random.default_rng(0)
    for _ in range(200):
        obs = env.step(RESET)
        trap = find(obs["image"], TRAP)
        while not obs["is_last"]:
            action = np.int32(rng.integers(len(MOVES)))
            obs = env.step({"reset": False, "action": action})
        if find(obs["image"], AGENT) == trap:
            assert obs["is_terminal"]
            assert obs["reward"] == 0
            assert obs["log/success"] == 0
            return
    pytest.fail("The random policy never met the trap.")


def test_running_out_of_time_is_not_terminal():
    env = Grid(seed=0, length=4)
    obs = env.step(RESET)
    for step in range(4):
        assert not obs["is_last"], step
        obs = env.step({"reset": False, "action": np.int32(0)})
    assert obs["is_last"]
    assert not obs["is_terminal"]


def test_the_edge_holds_the_agent():
    env = Grid(seed=3, length=50)
    up = {"reset": False, "action": np.int32(1)}
    for _ in range(20):
        obs = env.step(RESET)
        column = find(obs["image"], AGENT)[1]
        for _ in range(CELLS):
            if not obs["is_last"]:
                obs = env.step(up)
        if not obs["is_last"]:
            assert find(obs["image"], AGENT) == (0, column)
            return
    pytest.fail("The way up was never free.")


def test_the_trap_is_there_when_it_is_asked_for():
    for task, there in [("reach", False), ("avoid", True)]:
        image = Grid(task).step(RESET)["image"]
        assert (find(image, TRAP) is not None) == there
        assert find(image, GOAL) is not None


def test_seeds_decide_the_placement():
    def images(seed):
        env = Grid(seed=seed)
        return np.stack([env.step(RESET)["image"] for _ in range(10)])

    np.testing.assert_array_equal(images(5), images(5))
    assert not np.array_equal(images(5), images(6))
    assert len({image.tobytes() for image in images(5)}) > 5


def test_values_are_in_their_spaces_through_the_standard_wrappers():
    env = wrap(Grid("avoid", (32, 48)))
    obs = env.step(RESET)
    rng = np.random.default_rng(0)
    for _ in range(100):
        action = env.act_space["action"].sample(rng)
        obs = env.step({"reset": obs["is_last"], "action": action})
        for key, space in env.obs_space.items():
            assert obs[key] in space, key
    assert obs["image"].shape == (32, 48, 3)


def test_earlier_images_do_not_change():
    env = Grid(seed=0)
    first = env.step(RESET)["image"]
    before = first.copy()
    for move in (1, 2, 3, 4):
        env.step({"reset": False, "action": np.int32(move)})
    np.testing.assert_array_equal(first, before)


def test_wrong_arguments():
    with pytest.raises(UnknownTask, match="reach"):
        Grid("race")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Grid(length=0)
    with pytest.raises(ValueError, match="multiples of 4"):
        Grid(size=(48, 47))
