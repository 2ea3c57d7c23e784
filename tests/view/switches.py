"""An environment whose action has several variables, for the dream."""

import numpy as np

import embodied


class Switches(embodied.Env):
    """A switch with two positions and one with three; the positions are observed."""

    @property
    def obs_space(self):
        return {
            "positions": embodied.Space(np.float32, (2,)),
            "reward": embodied.Space(np.float32),
            "is_first": embodied.Space(bool),
            "is_last": embodied.Space(bool),
            "is_terminal": embodied.Space(bool),
        }

    @property
    def act_space(self):
        return {
            "switch": embodied.Space(np.int32, (2,), 0, (2, 3)),
            "reset": embodied.Space(bool),
        }

    def __init__(self):
        self.count = 0

    def step(self, action):
        self.count = 0 if action["reset"] else self.count + 1
        return {
            "positions": np.asarray(action["switch"], np.float32),
            "reward": np.float32(0),
            "is_first": np.bool_(self.count == 0),
            "is_last": np.bool_(self.count == 50),
            "is_terminal": np.bool_(False),
        }
