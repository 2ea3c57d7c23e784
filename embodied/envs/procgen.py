"""Games of Procgen, in the process that steps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import procgen

from embodied.base import Array, Spaces
from embodied.envs.game import Game
from embodied.envs.keys import SIGNALS, check_choice
from embodied.envs.registry import check_task
from embodied.images import resize_image
from embodied.space import Space

GAMES = (
    *("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun"),
    *("dodgeball", "fruitbot", "heist", "jumper", "leaper", "maze", "miner"),
    *("ninja", "plunder", "starpilot"),
)
ACTIONS = 15
NATIVE = (64, 64)  # Size of images that the games draw for agents.
RESIZERS = ("pillow",)


class ProcGen(Game):
    """A game with a new level in every episode, out of all levels of the hard mode.

    The game starts its next level by itself and does not show the end of the last one,
    so the last observation of an episode repeats the image before it.

    Args:
      task: the game, such as 'coinrun'.
      size: height and width of images. Sizes other than 64 x 64 are resized from the
        large images that the game draws for people, which takes longer.
      resize: library that resizes images; 'pillow'.
      seed: decides the levels.
    """

    def __init__(
        self,
        task: str,
        size: tuple[int, int] = (96, 96),
        resize: str = "pillow",
        seed: int = 0,
    ):
        check_task("procgen game", task, GAMES)
        check_choice("resize", resize, RESIZERS)
        super().__init__(ACTIONS)
        self._task = task
        self._size = (int(size[0]), int(size[1]))
        self._large = self._size != NATIVE
        self._rng = np.random.default_rng(seed)
        self._env = self._make()
        self._fresh = True  # Whether the game shows the start of a level.
        self._image = np.zeros((*self._size, 3), np.uint8)

    @property
    def obs_space(self) -> Spaces:
        """An image."""
        return {"image": Space(np.uint8, (*self._size, 3)), **SIGNALS}

    def close(self) -> None:
        """Closes the game."""
        self._env.close()

    def _start(self) -> dict[str, Array]:
        if not self._fresh:
            # Games cannot be told to start over.
            self._env.close()
            self._env = self._make()
        self._fresh = False
        _, obs, _ = self._env.observe()
        self._image = self._draw(obs)
        return {"image": self._image}

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        self._env.act(np.array([action], np.int32))
        rewards, obs, firsts = self._env.observe()
        self._fresh = bool(firsts[0])
        if not self._fresh:
            self._image = self._draw(obs)
        return {"image": self._image}, float(rewards[0]), self._fresh, self._fresh

    def _make(self) -> Any:
        return procgen.ProcgenGym3Env(
            num=1,
            env_name=self._task,
            rand_seed=int(self._rng.integers(0, 2**31 - 1)),
            num_threads=0,
            distribution_mode="hard",
            render_mode="rgb_array" if self._large else None,
        )

    def _draw(self, obs: dict[str, Array]) -> np.ndarray:
        if not self._large:
            return np.array(obs["rgb"][0])
        return resize_image(self._env.get_info()[0]["rgb"], self._size)
