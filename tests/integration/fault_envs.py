"""Environments that observe their position, and some that fail. Env processes."""

from __future__ import annotations

import os
import pathlib
import threading
import time

import numpy as np
from loop_testing import Task

LENGTH = 7  # Number of the last step of an episode.
FAULTY_STEP = 20  # Step of an environment at which it looks for a fault to make.


class Counting(Task):
    """Environment whose observations hold incarnation, episode and step.

    The incarnation is a random number of each instance, unique across processes.
    """

    def __init__(self):
        incarnation = int.from_bytes(os.urandom(4), "little") >> 1
        super().__init__(incarnation, length=LENGTH)


class Slow(Counting):
    """Takes a twentieth of a second for a step."""

    def step(self, action):
        time.sleep(0.05)
        return super().step(action)


class Faulty(Counting):
    """Makes each fault once that a file in the folder $FAULTS names.

    If the variable FAULT=KIND is set, every instance makes that fault instead.
    """

    def __init__(self):
        super().__init__()
        self._steps = 0

    def step(self, action):
        obs = super().step(action)
        self._steps += 1
        if self._steps == FAULTY_STEP and (kind := self._take()):
            return getattr(self, f"_{kind}")(obs)
        return obs

    def _take(self):
        if kind := os.environ.get("FAULT"):
            return kind
        for path in sorted(pathlib.Path(os.environ["FAULTS"]).iterdir()):
            try:
                path.unlink()
            except FileNotFoundError:
                continue  # Another instance was quicker.
            return path.name
        return None

    def _raise(self, obs):
        raise ZeroDivisionError("the environment is broken")

    def _shape(self, obs):
        return {**obs, "where": np.zeros(4, np.int32)}

    def _sleep(self, obs):
        threading.Event().wait()
