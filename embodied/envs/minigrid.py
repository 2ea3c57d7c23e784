"""MiniGrid's rooms seen as images, in the process that steps them."""

from __future__ import annotations

import re

import gymnasium
from gymnasium.error import DependencyNotInstalled
from gymnasium.wrappers import FilterObservation
from minigrid.wrappers import RGBImgObsWrapper, RGBImgPartialObsWrapper

from embodied.envs.from_gym import FromGym
from embodied.envs.registry import MissingExtra, UnknownTask

_PREFIX = "MiniGrid-"
_VERSION = re.compile(r"-v\d$")


def make_minigrid(
    task: str, size: tuple[int, int] = (64, 64), full: bool = False, seed: int = 0
) -> FromGym:
    """Makes a MiniGrid task, with an image instead of its table of object types.

    The mission, a sentence, is not observed: tasks whose mission varies cannot be
    solved by more than chance.

    Args:
      task: its id, such as 'DoorKey-5x5' or 'MiniGrid-DoorKey-5x5-v0'. Without a
        version, the newest one is used.
      size: height and width of images.
      full: whether to show the whole grid instead of the agent's view.
      seed: decides the grids.
    """
    env = _make(_find_id(task))
    grid = env.unwrapped
    cells = grid.width if full else grid.agent_view_size  # type: ignore[attr-defined]
    # Drawn at least as large as the image.
    tile = max(4, -(-max(size) // cells))
    seen = (RGBImgObsWrapper if full else RGBImgPartialObsWrapper)(env, tile)
    return FromGym(
        FilterObservation(seen, ("image", "direction")), seed=seed, size=size
    )


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
