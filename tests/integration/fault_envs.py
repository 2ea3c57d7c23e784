"""Environments that observe their position, and some that fail. Env processes."""

from __future__ import annotations

import os
import pathlib
import threading
import time

import numpy as np

import embodied

LENGTH = 7  # Number of the last step of an episode.
FAULTY_STEP = 20  # Step of an environment at which it looks for a fault to make.


class Counting(embodied.Env):
    """Environment whose observations hold incarnation, episode and step.

    The incarnation is a random number of each instance, unique across processes.
    """

    def __init__(self):
        self._incarnation = int.from_bytes(os.urandom(4), "little") >> 1
        self._episode = -1
        self._step = LENGTH

    @property
    def obs_space(self):
        return {
            "where": embodied.Space(np.int32, 3),
            "reward": embodied.Space(np.float32),
            "is_first": embodied.Space(bool),
            "is_last": embodied.Space(bool),
            "is_terminal": embodied.Space(bool),
        }

    @property
    def act_space(self):
        return {
            "action": embodied.Space(np.int32, (), 0, 5),
            "reset": embodied.Space(bool),
        }

    def step(self, action):
        if action["reset"] or self._step == LENGTH:
            self._episode += 1
            self._step = 0
        else:
            self._step += 1
        done = self._step == LENGTH
        where = [self._incarnation, self._episode, self._step]
        return {
            "where": np.array(where, np.int32),
            "reward": np.float32(1),
            "is_first": np.bool_(self._step == 0),
            "is_last": np.bool_(done),
            "is_terminal": np.bool_(done),
        }


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
        self._count = 0

    def step(self, action):
        obs = super().step(action)
        self._count += 1
        if self._count == FAULTY_STEP and (kind := self._take()):
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
