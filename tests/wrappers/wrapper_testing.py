"""An environment that plays back values, for the tests of wrappers."""

from __future__ import annotations

import numpy as np

import embodied
from embodied import Space

RESET = {"reset": True}
STANDARD = {
    "reward": Space(np.float32),
    "is_first": Space(bool),
    "is_last": Space(bool),
    "is_terminal": Space(bool),
}


class Script(embodied.Env):
    """Plays back observations: each step returns the next of the `values`."""

    def __init__(self, obs_space=None, values=(), act_space=None, length=1000):
        self.obs_space = {**STANDARD, **(obs_space or {})}
        self.act_space = {"reset": Space(bool), **(act_space or {})}
        self.values = list(values)
        self.length = length
        self.actions = []
        self.steps = 0
        self.count = 0
        self.closes = 0

    obs_space = act_space = None  # Plain attributes, as users' environments may have.

    def step(self, action):
        self.actions.append(action)
        self.count = 0 if action["reset"] else self.count + 1
        obs = {
            "reward": np.float32(self.count),
            "is_first": np.bool_(self.count == 0),
            "is_last": np.bool_(self.count >= self.length),
            "is_terminal": np.bool_(self.count >= self.length),
        }
        if self.values:
            obs.update(self.values[self.steps % len(self.values)])
        self.steps += 1
        return obs

    def close(self):
        self.closes += 1


def returning(space, value):
    return Script({"x": space}, [{"x": value}])


def taking(space):
    return Script(act_space={"act": space})


def act(value):
    return {"reset": False, "act": value}
