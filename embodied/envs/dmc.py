"""The DeepMind Control Suite, in the process that steps it."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.base import Array, Spaces
from embodied.envs import rendering
from embodied.envs.from_dm import FromDM
from embodied.envs.keys import SIGNALS
from embodied.envs.registry import check_task
from embodied.space import Space

# Cameras of domains that the first camera does not show well.
_CAMERAS = {"quadruped": 2}
_ALIASES = {"cup": "ball_in_cup"}


FRAME_SIZE = (240, 320)  # Height and width of what `render` draws.


class DMC(FromDM):
    """A task of the suite, observed as its state, as images, or as both.

    Args:
      task: domain and task, such as 'walker_walk', 'ball_in_cup_catch'.
      size: height and width of images.
      repeat: number of steps that each action is repeated for.
      proprio: whether to observe positions, velocities and the like, one key each.
      image: whether to observe an image.
      camera: index of the camera; -1 for the usual one of the task.
      seed: decides the start of episodes, and the bodies in domains where they vary.
    """

    def __init__(
        self,
        task: str,
        size: tuple[int, int] = (64, 64),
        repeat: int = 1,
        proprio: bool = True,
        image: bool = True,
        camera: int = -1,
        seed: int = 0,
    ):
        if not proprio and not image:
            raise ValueError("Expected proprio, image or both to be True, got neither.")
        rendering.choose_backend(image)
        domain, env = _load(task, seed)
        super().__init__(env, repeat=repeat)
        self._physics = env.physics
        self._size = (int(size[0]), int(size[1]))
        self._camera = _CAMERAS.get(domain, 0) if camera == -1 else camera
        self._image = image
        self._proprio = proprio

    @property
    def obs_space(self) -> Spaces:
        """The task's own observations, an image, or both."""
        spaces = super().obs_space
        if not self._proprio:
            spaces = dict(SIGNALS)
        if self._image:
            spaces["image"] = Space(np.uint8, (*self._size, 3))
        return spaces

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Steps, or resets."""
        obs = super().step(action)
        if not self._proprio:
            obs = {key: obs[key] for key in SIGNALS}
        if self._image:
            obs["image"] = rendering.render(self._physics, self._size, self._camera)
        return obs

    def render(self) -> np.ndarray:
        """Draws the scene for people to watch, [H, W, 3] uint8."""
        return rendering.render(self._physics, FRAME_SIZE, self._camera)


def _load(task: str, seed: int) -> tuple[str, Any]:
    """Returns the domain's name and the environment of dm_control."""
    # Imported here, because it must come after the choice of the backend.
    try:
        from dm_control import suite
    except (AttributeError, RuntimeError) as error:  # OpenGL cannot be loaded.
        raise rendering.failure(error) from error

    names = {f"{domain}_{name}": (domain, name) for domain, name in suite.ALL_TASKS}
    for alias, domain in _ALIASES.items():
        if task.startswith(f"{alias}_"):
            task = task.replace(alias, domain, 1)
    check_task("dmc task", task, names)
    domain, name = names[task]
    return domain, suite.load(domain, name, task_kwargs={"random": seed})
