"""Converts Gymnasium's spaces and values, in the process that steps the env."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied.base import Array
from embodied.envs.keys import (
    WORD_CLASSES,
    WORDS,
    Path,
    UnsupportedSpace,
    UnusableEnv,
    hash_words,
)
from embodied.envs.rendering import resize_planes
from embodied.space import Space

MOST_CHANNELS = 16  # Of images with channels first; also most images of a stack.
CHANNELS = (1, 3, 4)  # Of images in a stack.
SMALLEST_SIDE = 8  # Of images, unless they are uint8 [H, W, C].


@dataclasses.dataclass(frozen=True)
class GymLeaf:
    """One array among the elements of a nested Gymnasium space.

    Attributes:
      key: key in `obs_space` or `act_space`.
      path: where the array is in a nested Gymnasium value.
      space: space of the key.
      gym_space: the corresponding space of Gymnasium.
      start: Gymnasium value that is 0 in `space`, for all elements or for each; None
        for 0.
      convert: converts Gymnasium values [..., *shape] to values of `space`; None for
        texts, and where no more than the dtype and `start` differ.
    """

    key: str
    path: Path
    space: Space
    gym_space: gymnasium.Space
    start: int | np.ndarray | None = None
    convert: Callable[[Any], np.ndarray] | None = None

    def find(self, value: Any) -> Any:
        """Returns this leaf's element of a nested value."""
        element = value
        for part in self.path:
            try:
                element = element[part]
            except (KeyError, IndexError, TypeError) as error:
                raise UnusableEnv(
                    f"Expected {self.gym_space} at {self.key!r} of an observation, as "
                    f"its space declares, got no {part!r} in {element!r}."
                ) from error
        return element

    def encode(self, value: Any) -> np.ndarray:
        """Converts Gymnasium values [..., *shape] to values of `space`.

        Returns a copy, since the value may be the environment's buffer. A value that
        does not fit is returned unconverted, for CheckSpaces to report.
        """
        if isinstance(self.gym_space, spaces.Text):
            return _words(value)
        array = np.array(value)
        kinds = "biuf" if self.start is None else "biu"
        if array.dtype.kind not in kinds:
            return array
        if self.convert is not None:
            shape = self.gym_space.shape or ()
            fits = array.shape[array.ndim - len(shape) :] == shape
            return self.convert(array) if fits else array
        if self.start is not None:
            array = array.astype(np.int64) - self.start
        if array.dtype == self.space.dtype:
            return array
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(self.space.dtype)
        lossy = self.space.discrete and not np.array_equal(cast, array)
        return array if lossy else cast

    def decode(self, value: Array) -> Any:
        """Converts a value of `space` to one of Gymnasium."""
        array = np.asarray(value)
        if self.start is not None:
            array = array.astype(np.int64) + self.start
        array = np.asarray(array, self.gym_space.dtype)
        return array[()] if isinstance(self.gym_space, spaces.Discrete) else array


def obs_leaf(
    key: str, path: Path, space: gymnasium.Space, size: tuple[int, int]
) -> GymLeaf:
    """Makes the leaf of an observation.

    Args:
      key: key in `obs_space`.
      path: where the array is in a nested Gymnasium value.
      space: the space of Gymnasium.
      size: height and width to resize images to; zeros to keep their own.
    """
    if isinstance(space, spaces.Text):
        return GymLeaf(key, path, Space(np.int32, (WORDS,), 0, WORD_CLASSES), space)
    layout = image_layout(space)
    if layout is not None:
        height, width, channels = layout.shape
        size = size if all(size) else (height, width)
        image = Space(np.uint8, (*size, channels))
        resized = dataclasses.replace(layout, size=size)
        return GymLeaf(key, path, image, space, convert=resized)
    leaf = _leaf(key, path, space, acts=False)
    if len(leaf.space.shape) < 3 and not _is_board(leaf.space):
        return leaf
    dtype, shape = leaf.space.dtype, leaf.space.shape
    low, high = np.asarray(leaf.space.low), np.asarray(leaf.space.high)
    if _is_board(leaf.space):
        dtype = np.dtype(np.int32)
    if len(shape) > 2:  # Networks take at most two dimensions, except images.
        shape, low, high = (-1,), low.ravel(), high.ravel()
    flat = Space(dtype, low.shape, low, high)
    convert = _Reshape(leaf, len(leaf.space.shape), shape, dtype)
    return GymLeaf(key, path, flat, space, convert=convert)


def act_leaf(key: str, path: Path, space: gymnasium.Space) -> GymLeaf:
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
            resized = np.stack([resize_planes(image, self.size) for image in images])
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


@dataclasses.dataclass(frozen=True)
class _Reshape:
    """Gives values [..., *shape] of a leaf another shape and dtype."""

    leaf: GymLeaf
    dims: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __call__(self, value: np.ndarray) -> np.ndarray:
        array = self.leaf.encode(value)
        lead = array.shape[: array.ndim - self.dims]
        return array.reshape((*lead, *self.shape)).astype(self.dtype)


def _is_board(space: Space) -> bool:
    """Detects fields of classes [H, W] uint8, which agents would take for images."""
    return len(space.shape) == 2 and space.dtype == np.uint8


def _words(value: Any) -> np.ndarray:
    """Returns the hashed words [..., WORDS] of one text or of several."""
    if isinstance(value, str | bytes):
        return hash_words(value)
    return np.stack([hash_words(text) for text in value])


def _leaf(key: str, path: Path, space: gymnasium.Space, acts: bool) -> GymLeaf:
    try:
        if isinstance(space, spaces.Discrete):
            classes = _classes(int(space.n))
            return GymLeaf(key, path, classes, space, int(space.start) or None)
        if isinstance(space, spaces.MultiDiscrete):
            classes = _classes(space.nvec)
            start = space.start.astype(np.int64) if np.any(space.start) else None
            return GymLeaf(key, path, classes, space, start)
        if isinstance(space, spaces.MultiBinary):
            return GymLeaf(key, path, Space(np.int32, space.shape, 0, 2), space)
        if isinstance(space, spaces.Box):
            return _box_leaf(key, path, space, acts)
    except ValueError as error:
        raise UnsupportedSpace(f"Gymnasium space {space} at {key!r}: {error}") from None
    raise UnsupportedSpace(
        f"Expected a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple at "
        f"{key!r}, got {space}, whose values have no fixed shape. Convert it with a "
        "gymnasium.ObservationWrapper or ActionWrapper."
    )


def _box_leaf(key: str, path: Path, space: spaces.Box, acts: bool) -> GymLeaf:
    dtype = np.dtype(space.dtype)
    if dtype.kind == "f":
        bounds = (space.low, space.high) if acts else (None, None)
        return GymLeaf(key, path, Space(dtype, space.shape, *bounds), space)
    if dtype.kind == "b":
        return GymLeaf(key, path, Space(dtype, space.shape), space)
    wide = np.uint64 if dtype == np.uint64 else np.int64
    low, high = space.low.astype(wide), space.high.astype(wide)
    spread = high.astype(object) - low.astype(object)
    # Actions are classes, and an observation of -1 would mean that it is missing.
    shift = np.any(low) and (acts or dtype.kind == "i")
    if shift and np.all(spread < np.iinfo(np.int32).max):
        return GymLeaf(key, path, _classes(spread + 1), space, low.astype(np.int64))
    # Highs are inclusive in Gymnasium and exclusive in Space, where a 64-bit maximum
    # admits itself.
    high = np.minimum(high, np.iinfo(wide).max - 1) + wide(1)
    return GymLeaf(key, path, Space(dtype, space.shape, low, high), space)


def _classes(number: int | np.ndarray) -> Space:
    """Returns the space of integers from 0 to below `number`, per element."""
    number = np.asarray(number).astype(np.int64)
    if np.any(number > np.iinfo(np.int32).max):
        raise ValueError(f"expected classes that fit int32, got {number.max()}.")
    return Space(np.int32, number.shape, 0, number)
