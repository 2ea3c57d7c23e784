"""An environment that numbers its steps, and leaves a trace of them. Env processes.

The observation `where` is (env, life, episode, step, counter): the number of the
environment, a random number of each instance, and the position within its life. They
identify every stored transition and its successor. Networks take no integers of that
size, so each number is two halves of 16 bits, which float32 holds exactly.

The trace is the independent witness of what was collected: a file per life in the
folder CHAOS_TRACES, with the time of each step as a float64.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import embodied

TRACES = "CHAOS_TRACES"
SLOW = "slow"  # While a file of this name is among the traces, steps are slow.
PACE, SLOW_PACE = 0.004, 0.4  # Seconds that a step takes.
MAX_LENGTH = 40


def episode_length(life: int, episode: int) -> int:
    """Returns the number of the last step of an episode."""
    mixed = (life * 2654435761 + episode * 40503) & 0xFFFFFFFF
    return 1 + (mixed >> 7) % MAX_LENGTH


def pack(numbers: Sequence[int]) -> np.ndarray:
    """Returns n numbers below 2 ** 31 as [2n] float32."""
    values = np.array(numbers, "<u4")
    return values.view("<u2").astype(np.float32)


def unpack(halves: np.ndarray) -> np.ndarray:
    """Returns the numbers [..., n] int64 of [..., 2n] float32."""
    pairs = np.asarray(halves, np.int64).reshape(*halves.shape[:-1], -1, 2)
    return pairs[..., 0] + (pairs[..., 1] << 16)


def reward_of(life: int, counter: int) -> float:
    """Returns the reward of a step, which differs so that mixed-up steps show."""
    return float((life + counter) % 97) / 97


class Numbered(embodied.Env):
    """Episodes of random lengths whose observations identify their steps.

    Args:
      seed: number of this environment, which is the same in all of its lives.
    """

    def __init__(self, seed: int = 0):
        self._env = seed
        self._life = int.from_bytes(os.urandom(4), "little") >> 1
        self._episode = -1
        self._step = 0
        self._counter = -1
        self._done = True
        self._folder = pathlib.Path(os.environ[TRACES])
        self._trace: Any = None

    @property
    def obs_space(self) -> dict[str, embodied.Space]:
        """The number of the step, and the signals that all environments have."""
        return {
            "where": embodied.Space(np.float32, 10),
            "reward": embodied.Space(np.float32),
            "is_first": embodied.Space(bool),
            "is_last": embodied.Space(bool),
            "is_terminal": embodied.Space(bool),
        }

    @property
    def act_space(self) -> dict[str, embodied.Space]:
        """An action without an effect."""
        return {
            "action": embodied.Space(np.int32, (), 0, 5),
            "reset": embodied.Space(bool),
        }

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Goes on to the next step, or to the next episode."""
        time.sleep(SLOW_PACE if (self._folder / SLOW).exists() else PACE)
        if self._done or action["reset"]:
            self._episode += 1
            self._step = 0
        else:
            self._step += 1
        self._counter += 1
        self._done = self._step >= episode_length(self._life, self._episode)
        self._leave_trace()
        where = [self._env, self._life, self._episode, self._step, self._counter]
        return {
            "where": pack(where),
            "reward": np.float32(reward_of(self._life, self._counter)),
            "is_first": np.bool_(self._step == 0),
            "is_last": np.bool_(self._done),
            "is_terminal": np.bool_(self._done and self._episode % 2 == 0),
        }

    def close(self) -> None:
        """Closes the trace."""
        if self._trace is not None:
            self._trace.close()

    def _leave_trace(self) -> None:
        if self._trace is None:  # Instances that only show their spaces leave none.
            path = self._folder / f"{self._env}-{self._life}.trace"
            self._trace = path.open("wb", buffering=0)
        self._trace.write(np.float64(time.time()).tobytes())
