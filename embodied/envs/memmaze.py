"""Memory Maze: objects in a 3D maze to find again; in the process that steps it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from embodied.envs import rendering
from embodied.envs.from_dm import FromDM
from embodied.envs.registry import check_task

TASKS = ("9x9", "11x11", "13x13", "15x15")
_PACKAGE = "memory_maze"


def make_memmaze(
    task: str = "9x9", size: tuple[int, int] = (64, 64), seed: int = 0
) -> FromDM:
    """Makes a maze, new in every episode, seen from inside.

    The border of the image has the colour of the object to be found next, which is
    rewarded with 1.

    Args:
      task: number of cells, '9x9', '11x11', '13x13' or '15x15'.
      size: height and width of images, which must be equal.
      seed: decides the mazes.
    """
    check_task("memmaze task", task, TASKS)
    if size[0] != size[1]:
        raise ValueError(f"Expected a size of equal sides, got {tuple(size)}.")
    rendering.choose_backend(images=True)
    try:
        make = getattr(_import_tasks(), f"memory_maze_{task}")
        env = make(seed=seed, image_only_obs=True, camera_resolution=int(size[0]))
    except (AttributeError, RuntimeError) as error:
        raise rendering.failure(error) from error
    return FromDM(env)


def _import_tasks() -> ModuleType:
    """Imports the package's tasks without its `__init__`, which needs the old gym."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {_PACKAGE!r}", name=_PACKAGE)
    loaded = _PACKAGE in sys.modules
    if not loaded:
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(f"{_PACKAGE}.tasks")
    finally:
        if not loaded:
            del sys.modules[_PACKAGE]
