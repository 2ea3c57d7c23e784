"""An environment and its spaces, for the tests of the Gymnasium adapter."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

BINARY = spaces.Discrete(2)


class Echo(gymnasium.Env):
    """Returns samples of its observation space, and records seeds and actions."""

    def __init__(self, observation_space, action_space=BINARY, seed=0):
        self.observation_space = observation_space
        self.action_space = action_space
        self.observation_space.seed(seed)
        self.action_space.seed(seed)
        self.seeds = []
        self.actions = []
        self.outcome = (1.0, False, False, {})
        self.observation = None
        self.closes = 0

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.observation = self.observation_space.sample()
        return self.observation, {}

    def step(self, action):
        self.actions.append(action)
        self.observation = self.observation_space.sample()
        return (self.observation, *self.outcome)

    def close(self):
        self.closes += 1


def box(shape, dtype=np.uint8, low=0, high=255):
    return spaces.Box(low, high, shape, dtype)
