"""Made-up observations of every kind, cheap enough to benchmark everything else.

Runs in the process that steps it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.base import Env, Spaces
from embodied.envs.keys import SIGNALS, check_at_least, signals
from embodied.envs.registry import check_task
from embodied.space import Space

TASKS = ("disc", "cont", "both")
_FRAMES = 16


class Dummy(Env):
    """Observations that change at every step and depend on nothing but the seed.

    Episodes end after `length` steps; every other one in a terminal state. The reward
    is 1 at the last step and 0 before.

    Args:
      task: 'disc' has the action `act_disc` (5 classes), 'cont' has `act_cont` (6
        values in -1..1), 'both' has both.
      size: height and width of the image.
      length: number of steps after the first observation of an episode.
      seed: decides the content of the observations.
    """

    def __init__(
        self,
        task: str = "disc",
        size: tuple[int, int] = (64, 64),
        length: int = 100,
        seed: int = 0,
    ):
        check_task("dummy task", task, TASKS)
        check_at_least(1, length=length)
        self._task = task
        self._size = (int(size[0]), int(size[1]))
        self._length = length
        self._count = 0
        self._episode = -1
        self._done = True
        # A step only looks up one of a few frames: drawing one would cost as much as
        # everything that is measured with this environment.
        rng = np.random.default_rng(seed)
        shape = (_FRAMES, *self._size, 3)
        self._images = rng.integers(0, 256, shape, np.uint8)
        self._vectors = rng.standard_normal((_FRAMES, 7)).astype(np.float32)
        self._tokens = rng.integers(0, 256, _FRAMES, np.int32)
        self._float2d = rng.standard_normal((_FRAMES, 4, 5)).astype(np.float32)
        self._int2d = rng.integers(0, 4, (_FRAMES, 2, 3), np.int32)
        for array in (self._images, self._vectors, self._float2d, self._int2d):
            array.flags.writeable = False

    @property
    def obs_space(self) -> Spaces:
        """One key of every kind that agents take."""
        return {
            "image": Space(np.uint8, (*self._size, 3)),
            "vector": Space(np.float32, (7,)),
            "token": Space(np.int32, (), 0, 256),
            "count": Space(np.float32, (), 0, self._length),
            "float2d": Space(np.float32, (4, 5)),
            "int2d": Space(np.int32, (2, 3), 0, 4),
            **SIGNALS,
        }

    @property
    def act_space(self) -> Spaces:
        """`act_disc`, `act_cont` or both, by task."""
        spaces = {"reset": Space(bool)}
        if self._task in ("disc", "both"):
            spaces["act_disc"] = Space(np.int32, (), 0, 5)
        if self._task in ("cont", "both"):
            spaces["act_cont"] = Space(np.float32, (6,), -1, 1)
        return spaces

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Counts one step, whatever the action."""
        first = self._done or bool(action["reset"])
        if first:
            self._count = 0
            self._episode += 1
        else:
            self._count += 1
        self._done = self._count >= self._length
        # An odd stride over the frames, so that episodes differ from each other.
        frame = (self._count + 5 * self._episode) % _FRAMES
        terminal = self._done and self._episode % 2 == 1
        return {
            "image": self._images[frame],
            "vector": self._vectors[frame],
            "token": self._tokens[frame],
            "count": np.float32(self._count),
            "float2d": self._float2d[frame],
            "int2d": self._int2d[frame],
            **signals(self._done, first, self._done, terminal),
        }
