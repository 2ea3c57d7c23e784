"""A slow environment, so that a live run leaves processor time for the view."""

import time

from embodied.envs.grid import Grid

STEP_SECONDS = 0.01


class Reach(Grid):
    """The task `grid_reach`, at no more than a hundred steps per second."""

    def __init__(self):
        super().__init__("reach")

    def step(self, action):
        time.sleep(STEP_SECONDS)
        return super().step(action)
