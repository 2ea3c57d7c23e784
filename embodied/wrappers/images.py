"""The wrapper that resizes images; where the env is stepped."""

from __future__ import annotations

import re

import numpy as np

from embodied.base import Env, Spaces
from embodied.space import Space
from embodied.wrappers.base import SpaceError, Step, Wrapper, bounds


class ResizeImage(Wrapper):
    """Resizes images, which are the 3-dimensional uint8 observations.

    Args:
      env: the environment.
      size: height and width.
      pattern: regular expression that the whole key must match.
    """

    def __init__(self, env: Env, size: tuple[int, int], pattern: str = ".*"):
        super().__init__(env)
        self._size = (int(size[0]), int(size[1]))
        if min(self._size) < 1:
            raise ValueError(f"Expected a positive height and width, got {size}.")
        spaces = super().obs_space
        images = [key for key, space in spaces.items() if _is_image(space)]
        matched = [key for key in images if re.fullmatch(pattern, key)]
        if not matched:
            raise SpaceError.of(
                "observation",
                pattern,
                env,
                "an image (3 dimensions, uint8) whose key matches",
                f"the images {images} among {sorted(spaces)}",
                "Change the pattern, or leave this wrapper out.",
            )
        self._keys = [key for key in matched if spaces[key].shape[:2] != self._size]

    @property
    def obs_space(self) -> Spaces:
        """Spaces of the wrapped environment, images in the new size."""
        spaces = super().obs_space
        for key in self._keys:
            low, high = bounds(spaces[key])
            shape = (*self._size, spaces[key].shape[2])
            spaces[key] = Space(np.uint8, shape, low.min(), int(high.max()) + 1)
        return spaces

    def step(self, action: Step) -> Step:
        """Steps and resizes."""
        obs = self.env.step(action)
        return {**obs, **{key: self._resize(obs[key]) for key in self._keys}}

    def _resize(self, image: np.ndarray) -> np.ndarray:
        # Here, because importing the framework should not import Pillow.
        from PIL import Image

        size = (self._size[1], self._size[0])
        # Pillow knows images of three channels, and single ones for all others.
        planes = [image] if image.shape[2] == 3 else list(np.moveaxis(image, 2, 0))
        resized = [
            np.asarray(Image.fromarray(plane).resize(size, Image.Resampling.BILINEAR))
            for plane in planes
        ]
        return resized[0] if image.shape[2] == 3 else np.stack(resized, axis=2)


def _is_image(space: Space) -> bool:
    return space.dtype == np.uint8 and len(space.shape) == 3
