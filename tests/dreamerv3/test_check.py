"""`--script check`: what an agent would see, and what would stop training."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from dreamerv3.cli.check import StepStatistics
from dreamerv3.main import main

BOX = gymnasium.spaces.Box


class Sound(gymnasium.Env):
    """A valid environment with images of an odd size."""

    observation_space = gymnasium.spaces.Dict(
        image=BOX(0, 1, (3, 50, 40), np.float32),
        speed=BOX(-1, 1, (2,), np.float32),
        mission=gymnasium.spaces.Text(10),
    )
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), self.reward(), self.count == 5, False, {"speed": 1.0}

    def reward(self):
        return 1.0

    def observe(self):
        return {
            "image": self.np_random.random((3, 50, 40), np.float32),
            "speed": self.np_random.random(2, np.float32),
            "mission": "go",
        }


class Strange(Sound):
    """Can be trained on, but is odd in several ways."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=3)

    def step(self, action):
        self.count = 0
        obs, _, _, _, info = super().step(action)
        obs["speed"][0] = np.nan
        return obs, 0.0, False, False, info


class Late(Sound):
    """Returns an observation outside of its space after some steps."""

    def step(self, action):
        obs, *rest = super().step(action)
        if self.count == 4:
            obs["speed"] = np.zeros(3, np.float32)
        return obs, *rest


class Vanishing(Sound):
    """Has a discrete observation with too many classes."""

    observation_space = gymnasium.spaces.Dict(
        text=gymnasium.spaces.Discrete(2**20), reward2=BOX(0, 1, (2,), np.float32)
    )


class Other(Sound):
    """Has another action space for another seed."""

    def __init__(self, seed):
        self.action_space = gymnasium.spaces.Discrete(2 + seed % 50)


def check(capsys, name, *flags):
    code = main(["--script", "check", "--task", f"test_check:{name}", *flags])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_sound_environment(capsys):
    code, out, err = check(capsys, "Sound", "--configs", "size1m")
    assert (code, err) == (0, "")
    assert "environment's observations: Dict(" in out
    assert "image: image 64 x 64 x 3\n" in out
    assert "mission: 256 classes, 16\n" in out
    assert "action: 2 to 3 classes, 2\n" in out
    assert "speed: float32 2\n" in out
    assert " steps/s" in out
    assert "rewards from 0 to 1\n" in out
    assert "episodes of 5 steps on average" in out
    assert "The agent would have" in out
    assert "Note: 'mission' never changed." in out
    assert out.endswith("No problems found: it can be trained on.\n")


def test_the_first_step_does_not_count_for_the_rate():
    found = StepStatistics()
    step = {"is_first": False, "is_last": False, "reward": 1.0}
    for _ in range(3):
        found.add(step, worker=0)
    found.seconds = 0.5
    assert "3 random steps" in next(found.lines())
    assert next(found.lines()).endswith(": 4 steps/s")


def test_what_is_odd_is_noted(capsys):
    code, out, _ = check(capsys, "Strange", "--random_agent", "True")
    assert code == 0
    for note in (
        "no episode ended within",
        "all rewards were 0",
        "'speed' was not finite in",
        "environments of different seeds begin alike",
    ):
        assert f"Note: {note}" in out


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("Late", (), "'speed'"),
        ("Vanishing", (), "at most 65536"),
        ("Other", (), "expected equal spaces, but env 1 has others"),
        ("Sound", ("--replay.bytes", "1e5"), "The capacity is --replay.size"),
        ("Nobody", (), "got 'Nobody'"),
    ],
)
def test_what_would_stop_training_is_an_error(name, flags, message, capsys):
    code, out, err = check(capsys, name, "--configs", "size1m", *flags)
    assert code == 2
    assert message in err
    assert "No problems found" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env.gym.vector", "own"], "gym_Acrobot-v1, which has none"),
        (["--env.gym.kwargs.nope", "1"], "unexpected keyword argument 'nope'"),
    ],
)
def test_what_a_registered_environment_has_not_is_told_in_a_line(
    flags, message, capsys
):
    argv = ["--script", "check", "--task", "gym_Acrobot-v1", "--random_agent", "True"]
    assert main([*argv, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_environments_that_step_together_are_tried(capsys):
    argv = ["--script", "check", "--task", "gym_CartPole-v1", "--random_agent", "True"]
    argv += ["--run.envs_per_worker", "3", "--env.gym.vector", "sync"]
    assert main(argv) == 0
    assert "3 environments of a worker step together" in capsys.readouterr().out


def test_a_size_that_the_networks_cannot_take_is_refused(capsys):
    argv = ["--script", "check", "--task", f"{__name__}:Sound"]
    assert main([*argv, "--env.gym.size", "97", "97"]) == 2
    assert "env.gym.size: expected multiples of 16" in capsys.readouterr().err
