"""Crafter, an open world of survival and crafting; in the process that steps it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import crafter
import numpy as np
from crafter import constants

from embodied.base import Array, Spaces
from embodied.envs.game import Game
from embodied.envs.keys import SIGNALS
from embodied.envs.registry import check_task
from embodied.space import Space

TASKS = ("reward", "noreward")


class Crafter(Game):
    """Crafter, with its achievements for the logger.

    Args:
      task: 'reward', or 'noreward' for rewards of zero.
      size: height and width of images.
      logs: whether to return how often each achievement was reached in this episode,
        as `log/achievement_NAME`, and the reward for any task, as `log/reward`.
      length: steps after which an episode is cut.
      seed: decides the worlds and the events in them.
    """

    def __init__(
        self,
        task: str = "reward",
        size: tuple[int, int] = (64, 64),
        logs: bool = False,
        length: int = 10_000,
        seed: int = 0,
    ):
        check_task("crafter task", task, TASKS)
        super().__init__(len(constants.actions))
        height, width = size
        self._env = _Ordered(
            size=(int(width), int(height)), length=length, seed=int(seed)
        )
        self._shape = (int(height), int(width), 3)
        self._rewarded = task == "reward"
        self._achievements = tuple(constants.achievements) if logs else ()
        self._logs = logs

    @property
    def obs_space(self) -> Spaces:
        """An image, and `log/` keys."""
        logs = [f"log/achievement_{name}" for name in self._achievements]
        return {
            "image": Space(np.uint8, self._shape),
            **SIGNALS,
            **{key: Space(np.float32) for key in logs},
            **({"log/reward": Space(np.float32)} if self._logs else {}),
        }

    def _start(self) -> dict[str, Array]:
        return self._observe(self._env.reset(), 0.0, {})

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        image, reward, done, info = self._env.step(action)
        obs = self._observe(image, reward, info["achievements"])
        return obs, reward * self._rewarded, bool(done), info["discount"] == 0

    def _observe(
        self, image: np.ndarray, reward: float, achievements: dict[str, int]
    ) -> dict[str, Array]:
        logs = {
            f"log/achievement_{name}": np.float32(achievements.get(name, 0))
            for name in self._achievements
        }
        if self._logs:
            logs["log/reward"] = np.float32(reward)
        return {"image": image, **logs}


class _Ordered(crafter.Env):
    """Crafter that goes through creatures in the order of their positions.

    Crafter keeps creatures in sets, whose order depends on addresses in memory, and
    draws from these at random. Unordered, the same seed leads to different episodes.
    """

    def _balance_object(self, chunk: Any, objs: Iterable[Any], *args: Any) -> None:
        ordered = sorted(objs, key=lambda creature: tuple(creature.pos))
        super()._balance_object(chunk, ordered, *args)
