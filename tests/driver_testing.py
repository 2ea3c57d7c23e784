"""Environments and a policy that count, shared by the tests of the driver."""

from __future__ import annotations

import os

import numpy as np
import psutil

from embodied import Space


def env_factory(length=3, fail=None, closed=None, size=2):
    """Returns a function that makes an env of episodes of `length` steps.

    The class is local, so that children get it by value and need not import this file.

    Args:
      length: steps per episode, including the reset.
      fail: function that is called with the env before each step, or None.
      closed: path of a file that is made when the env is closed, or None.
      size: length of the observed vector.
    """

    class CountEnv:
        def __init__(self):
            self.count = 0
            self.episode = -1
            self.buffer = np.zeros(size, np.float32)
            self.actions = []

        @property
        def obs_space(self):
            return {
                "vector": Space(np.float32, size),
                "pid": Space(np.int64),
                "log/episode": Space(np.int32),
                "reward": Space(np.float32),
                "is_first": Space(bool),
                "is_last": Space(bool),
                "is_terminal": Space(bool),
            }

        @property
        def act_space(self):
            return {"reset": Space(bool), "move": Space(np.int32, (), 0, 5)}

        def step(self, action):
            if fail:
                fail(self)
            if action["reset"]:
                self.count = 0
                self.episode += 1
            else:
                self.count += 1
            self.buffer[:] = self.count  # The same array at each step.
            return {
                "vector": self.buffer,
                "pid": np.int64(os.getpid()),
                "log/episode": np.int32(self.episode),
                "reward": np.float32(0 if action["reset"] else action["move"]),
                "is_first": np.bool_(action["reset"]),
                "is_last": np.bool_(self.count == length - 1),
                "is_terminal": np.bool_(False),
            }

        def close(self):
            if closed:
                with open(closed, "a") as file:
                    file.write("closed\n")

    return CountEnv


class Moves:
    """A policy that counts its calls in the carry and plays them as actions."""

    def __init__(self):
        self.seen = []

    def init(self, batch_size):
        return np.zeros(batch_size, np.int32)

    def __call__(self, carry, obs, **kwargs):
        self.seen.append((obs, kwargs))
        carry = carry + 1
        return carry, {"move": carry % 5}, {"calls": carry * 10}


def collect(driver):
    transitions = {}
    driver.on_step(lambda tran, worker: transitions.setdefault(worker, []).append(tran))
    return transitions


def children():
    return [child.pid for child in psutil.Process().children()]
