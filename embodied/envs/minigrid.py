"""MiniGrid's rooms seen as images, in the process that steps them."""

from __future__ import annotations

import re

import gymnasium
import minigrid  # noqa: F401  (registers its ids)
import numpy as np
from gymnasium.error import DependencyNotInstalled

from embodied.base import Array, Spaces
from embodied.envs import rendering
from embodied.envs.game import Game
from embodied.envs.keys import SIGNALS
from embodied.envs.registry import MissingExtra, UnknownTask
from embodied.space import Space

_PREFIX = "MiniGrid-"
_VERSION = re.compile(r"-v\d$")


class MiniGrid(Game):
    """A MiniGrid task, with an image instead of its table of object types.

    The mission, a sentence, is not observed: tasks whose mission varies cannot be
    solved by more than chance.

    Args:
      task: its id, such as 'DoorKey-5x5' or 'MiniGrid-DoorKey-5x5-v0'. Without a
        version, the newest one is used.
      size: height and width of images.
      full: whether to show the whole grid instead of the agent's view.
      seed: decides the grids.
    """

    def __init__(
        self,
        task: str,
        size: tuple[int, int] = (64, 64),
        full: bool = False,
        seed: int = 0,
    ):
        self.name = _find_id(task)
        self._env = _make(self.name)
        # Turn left or right, go forward, pick up, drop, toggle, done.
        super().__init__(int(self._env.action_space.n))  # type: ignore[attr-defined]
        self._seed: int | None = seed
        self._size = (int(size[0]), int(size[1]))
        self._full = full
        grid = self._env.unwrapped
        cells = grid.width if full else grid.agent_view_size  # type: ignore[attr-defined]
        # Drawn at least as large as the image.
        self._tile = max(4, -(-max(self._size) // cells))

    @property
    def obs_space(self) -> Spaces:
        """An image, and where the agent looks: right, down, left or up."""
        return {
            "image": Space(np.uint8, (*self._size, 3)),
            "direction": Space(np.int32, (), 0, 4),
            **SIGNALS,
        }

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _start(self) -> dict[str, Array]:
        obs, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return self._observe(obs)

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        obs, reward, terminated, truncated, _ = self._env.step(action)
        done = bool(terminated or truncated)
        return self._observe(obs), float(reward), done, bool(terminated)

    def _observe(self, obs: dict[str, Array]) -> dict[str, Array]:
        grid = self._env.unwrapped
        frame = grid.get_frame(  # type: ignore[attr-defined]
            highlight=self._full, tile_size=self._tile, agent_pov=not self._full
        )
        return {
            "image": rendering.resize(frame, self._size),
            "direction": np.int32(obs["direction"]),
        }


def _make(name: str) -> gymnasium.Env:
    try:
        return gymnasium.make(name, disable_env_checker=True)
    except DependencyNotInstalled as error:
        task = f"minigrid_{name.removeprefix(_PREFIX)}"
        raise MissingExtra.named(
            task, "minigrid[wfc]", "", install="Run: pip install 'minigrid[wfc]'"
        ) from error


def _find_id(task: str) -> str:
    """Returns the id of a task, of its newest version if none is given."""
    ids = sorted(name for name in gymnasium.registry if name.startswith(_PREFIX))
    by_name = {_VERSION.sub("", name): name for name in ids}  # The newest wins.
    for name in (task, f"{_PREFIX}{task}"):
        if name in ids:
            return name
        if name in by_name:
            return by_name[name]
    short = [name.removeprefix(_PREFIX) for name in by_name]
    raise UnknownTask.named("minigrid task", task, short)
