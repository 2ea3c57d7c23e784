"""Converts Gymnasium's spaces and values, in the process that steps the env."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied.base import Array, Spaces
from embodied.envs.flattening import (
    Flattened,
    Path,
    SpaceLeaf,
    array_leaf,
    class_space,
    flatten,
)
from embodied.envs.keys import (
    WORD_CLASSES,
    WORDS,
    UnsupportedSpace,
    UnusableEnv,
    hash_words,
    signals,
)
from embodied.images import resize_image
from embodied.space import Space

MOST_CHANNELS = 16  # Of images with channels first; also most images of a stack.
CHANNELS = (1, 3, 4)  # Of images in a stack.
SMALLEST_SIDE = 8  # Of images, unless they are uint8 [H, W, C].


class GymAdapter(Flattened):
    """A Gymnasium environment, or a vector of them; a base of adapters.

    Args:
      env: the environment.
      name: its name, for messages.
      obs_space: observation space of one environment.
      act_space: action space of one environment.
      obs_key: see `FromGym`, as for the others.
      act_key: as there.
      info_keys: as there.
      size: as there.
    """

    def __init__(
        self,
        env: Any,
        name: str,
        obs_space: gymnasium.Space,
        act_space: gymnasium.Space,
        obs_key: str | None = None,
        act_key: str = "action",
        info_keys: Sequence[str] = (),
        size: Sequence[int] = (0, 0),
    ):
        if obs_key is None:
            obs_key = "obs" if image_layout(obs_space) is None else "image"
        height, width = (int(side) for side in size)
        super().__init__(
            env,
            name,
            [obs_leaf(*leaf, (height, width)) for leaf in flatten(obs_space, obs_key)],
            [act_leaf(*leaf) for leaf in flatten(act_space, act_key)],
            act_space,
        )
        self._info_keys = tuple(key for key in info_keys if key != "none")

    @property
    def obs_space(self) -> Spaces:
        """The flattened observation space, and `log/` keys."""
        logs = {f"log/{key}": Space(np.float32) for key in self._info_keys}
        return {**super().obs_space, **logs}

    def _observe(
        self,
        obs: Any,
        info: Mapping[str, Any],
        reward: Any,
        first: Any,
        last: Any,
        terminal: Any,
    ) -> dict[str, Array]:
        """Converts what a step has returned for one environment, or for each."""
        logs = {
            f"log/{key}": _info_number(key, info.get(key, np.zeros(np.shape(first))))
            for key in self._info_keys
        }
        encoded = self._encode(obs)
        return {**encoded, **logs, **signals(reward, first, last, terminal)}


def _info_number(key: str, value: Any) -> Array:
    try:
        return np.float32(value)
    except (TypeError, ValueError):
        raise UnusableEnv(
            f"Expected info[{key!r}] as a number, to log it as log/{key}, got "
            f"{value!r}. Leave it out of info_keys."
        ) from None


def obs_leaf(
    key: str, path: Path, space: gymnasium.Space, size: tuple[int, int]
) -> SpaceLeaf:
    """Makes the leaf of an observation.

    Args:
      key: key in `obs_space`.
      path: where the array is in a nested Gymnasium value.
      space: the space of Gymnasium.
      size: height and width to resize images to; zeros to keep their own.
    """
    if isinstance(space, spaces.Text):
        words = Space(np.int32, (WORDS,), 0, WORD_CLASSES)
        return SpaceLeaf(key, path, words, space, convert=_words, kinds="OSU")
    layout = image_layout(space)
    if layout is not None:
        height, width, channels = layout.shape
        size = size if all(size) else (height, width)
        image = Space(np.uint8, (*size, channels))
        resized = dataclasses.replace(layout, size=size)
        return SpaceLeaf(key, path, image, space, convert=resized)
    leaf = _leaf(key, path, space, acts=False)
    dtype, shape = leaf.space.dtype, leaf.space.shape
    low, high = np.asarray(leaf.space.low), np.asarray(leaf.space.high)
    if len(shape) == 2 and dtype == np.uint8:
        dtype = np.dtype(np.int32)  # A board of classes, not an image.
    elif len(shape) > 2:  # Networks take at most two dimensions, except images.
        low, high = low.ravel(), high.ravel()
    else:
        return leaf
    return dataclasses.replace(leaf, space=Space(dtype, low.shape, low, high))


def act_leaf(key: str, path: Path, space: gymnasium.Space) -> SpaceLeaf:
    """Makes the leaf of an action."""
    return _leaf(key, path, space, acts=True)


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """Converts images of one layout to [..., H, W, C] uint8.

    Attributes:
      shape: height, width and channels before resizing.
      axes: `hwc`, `chw`, `hw`, or `shwc` for a stack of images, which becomes channels.
      scale: factor that float values are multiplied with.
      size: height and width to resize to; None for those of `shape`.
    """

    shape: tuple[int, int, int]
    axes: str
    scale: float = 1.0
    size: tuple[int, int] | None = None

    def __call__(self, value: np.ndarray) -> np.ndarray:
        """Converts images [..., *shape of their space]."""
        if value.dtype.kind == "f":
            with np.errstate(invalid="ignore", over="ignore"):
                value = np.clip(np.rint(value * self.scale), 0, 255).astype(np.uint8)
        if self.axes == "chw":
            value = np.moveaxis(value, -3, -1)
        elif self.axes == "hw":
            value = value[..., None]
        elif self.axes == "shwc":
            value = np.moveaxis(value, -4, -2)
            value = value.reshape((*value.shape[:-2], -1))
        if self.size is not None and value.shape[-3:-1] != self.size:
            images = value.reshape((-1, *value.shape[-3:]))
            resized = np.stack([resize_image(image, self.size) for image in images])
            value = resized.reshape((*value.shape[:-3], *resized.shape[1:]))
        return np.ascontiguousarray(value)


def image_layout(space: Any) -> ImageLayout | None:
    """Returns the layout of images of a space; None if its values are not images.

    Images are uint8, or floats from 0 to 1 or to 255. They have three dimensions, with
    channels first or last; four if several images are stacked; or two if they are
    uint8 up to 255. All but uint8 [H, W, C] have sides of at least `SMALLEST_SIDE`.
    """
    shape = tuple(getattr(space, "shape", None) or ())
    if not isinstance(space, spaces.Box) or len(shape) not in (2, 3, 4):
        return None
    dtype, scale = np.dtype(space.dtype), 1.0
    low, high = float(space.low.min()), float(space.high.max())
    if dtype.kind == "f":
        if low < 0 or not 0 < high <= 255:
            return None
        scale = 255.0 if high <= 1 else 1.0
    elif dtype != np.uint8:
        return None
    first = shape[0] <= MOST_CHANNELS and shape[0] < min(shape[1:])
    if len(shape) == 3 and first and min(shape[1:]) >= SMALLEST_SIDE:
        return ImageLayout((shape[1], shape[2], shape[0]), "chw", scale)
    if len(shape) == 3 and (dtype == np.uint8 or min(shape[:2]) >= SMALLEST_SIDE):
        return ImageLayout(shape, "hwc", scale)
    if len(shape) == 2 and dtype == np.uint8 and high == 255:
        large = min(shape) >= SMALLEST_SIDE
        return ImageLayout((*shape, 1), "hw") if large else None
    if len(shape) == 4 and shape[0] <= MOST_CHANNELS and shape[-1] in CHANNELS:
        large = min(shape[1:3]) >= SMALLEST_SIDE
        merged = (shape[1], shape[2], shape[0] * shape[3])
        return ImageLayout(merged, "shwc", scale) if large else None
    return None


def _words(texts: np.ndarray) -> np.ndarray:
    """Returns the hashed words [..., WORDS] of one text or of several."""
    if texts.ndim == 0:
        return hash_words(texts)
    return np.stack([hash_words(text) for text in texts])


def _leaf(key: str, path: Path, space: gymnasium.Space, acts: bool) -> SpaceLeaf:
    try:
        if isinstance(space, spaces.Discrete):
            classes = class_space(int(space.n))
            # Not a Python integer, which would take the dtype of a narrow value.
            start = np.int64(space.start) if space.start else None
            return SpaceLeaf(key, path, classes, space, start, plain=True)
        if isinstance(space, spaces.MultiDiscrete):
            classes = class_space(space.nvec)
            starts = space.start.astype(np.int64) if np.any(space.start) else None
            return SpaceLeaf(key, path, classes, space, starts)
        if isinstance(space, spaces.MultiBinary):
            return SpaceLeaf(key, path, Space(np.int32, space.shape, 0, 2), space)
        if isinstance(space, spaces.Box):
            return array_leaf(key, path, space, space.low, space.high, acts)
    except ValueError as error:
        raise UnsupportedSpace(f"Gymnasium space {space} at {key!r}: {error}") from None
    raise UnsupportedSpace(
        f"Expected a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple at "
        f"{key!r}, got {space}, whose values have no fixed shape. Convert it with a "
        "gymnasium.ObservationWrapper or ActionWrapper."
    )
