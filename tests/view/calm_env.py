"""An environment that takes its time, so that a live run leaves room for the view."""

import time

from embodied.envs.grid import Grid

STEP_SECONDS = 0.01


class Reach(Grid):
    """The task `grid_reach`, at a hundred steps a second."""

    def __init__(self):
        super().__init__("reach")

    def step(self, action):
        time.sleep(STEP_SECONDS)
        return super().step(action)
