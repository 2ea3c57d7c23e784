"""Wrappers that convert actions and observations; where the env is stepped."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.base import Array, Env, Spaces
from embodied.images import resize_image
from embodied.space import Space
from embodied.wrappers.checking import SpaceError, Step, Wrapper, check_numeric

_INT32 = np.iinfo(np.int32)


class _ActionWrapper(Wrapper):
    """Replaces the space and the values of the continuous action `key`."""

    def __init__(self, env: Env, key: str):
        super().__init__(env)
        spaces = super().act_space
        if key not in spaces:
            raise KeyError(
                f"{type(self).__name__} expected one of the actions {sorted(spaces)}, "
                f"got {key!r}."
            )
        self._key = key
        self._inner = spaces[key]
        if self._inner.dtype.kind != "f":
            expected = f"a continuous space for {type(self).__name__}"
            advice = "Leave discrete actions as they are."
            raise self._error(expected, str(self._inner), advice)
        self._outer = self._replace(self._inner)

    @property
    def act_space(self) -> Spaces:
        """Spaces of the wrapped environment, with that of the action replaced."""
        return {**super().act_space, self._key: self._outer}

    def step(self, action: Step) -> Step:
        """Converts the action, unless a reset makes the env ignore it, and steps."""
        # A missing action is left for the environment, or CheckSpaces, to report.
        if self._key in action and not action.get("reset"):
            value = np.asarray(action[self._key])
            if value.shape != self._outer.shape or value.dtype.kind not in "biuf":
                advice = "Pass an array of that shape and dtype."
                raise self._error(self._outer, value, advice)
            action = {**action, self._key: self.convert(value)}
        return self.env.step(action)

    def _error(self, expected: Any, value: Any, advice: str) -> SpaceError:
        return SpaceError.of("action", self._key, self, expected, value, advice)

    def _replace(self, space: Space) -> Space:
        raise NotImplementedError(f"{type(self).__name__}._replace")

    def convert(self, value: np.ndarray) -> Array:
        """Converts values [..., *shape] of actions."""
        raise NotImplementedError(f"{type(self).__name__}.convert")


class ClipAction(_ActionWrapper):
    """Clips a continuous action to [low, high], and to its space."""

    def __init__(self, env: Env, key: str, low: float = -1, high: float = 1):
        self._clip = (low, high)
        super().__init__(env, key)

    def _replace(self, space: Space) -> Space:
        inner_low, inner_high = space.limits
        low = np.maximum(inner_low, self._clip[0])
        high = np.minimum(inner_high, self._clip[1])
        if np.any(low > high):
            raise self._error(
                f"bounds that overlap with {list(self._clip)}",
                str(space),
                "Declare finite bounds, which can be scaled, or clip elsewhere.",
            )
        return Space(space.dtype, space.shape, low, high)

    def convert(self, value: np.ndarray) -> Array:
        """Clips values [..., *shape]."""
        return np.clip(value, self._outer.low, self._outer.high)


class NormalizeAction(_ActionWrapper):
    """Scales [-1, 1] to the finite bounds of a continuous action.

    Elements without finite bounds on both sides are passed on unchanged.
    """

    def _replace(self, space: Space) -> Space:
        # Some environments declare the largest float32 to mean that there is no bound.
        limit = np.finfo(np.float32).max
        low, high = space.limits
        self._finite = (np.abs(low) < limit) & (np.abs(high) < limit)
        self._low = np.where(self._finite, low, -1).astype(np.float64)
        self._high = np.where(self._finite, high, 1).astype(np.float64)
        low, high = np.where(self._finite, -1, low), np.where(self._finite, 1, high)
        return Space(space.dtype, space.shape, low, high)

    def convert(self, value: np.ndarray) -> Array:
        """Scales values [..., *shape]."""
        share = (value.astype(np.float64) + 1) / 2
        scaled = self._low * (1 - share) + self._high * share
        scaled = np.where(self._finite, scaled, value).astype(self._inner.dtype)
        # Rounding must not exceed a bound, but values that were out of range stay so.
        rounded = self._finite & (share >= 0) & (share <= 1)
        inside = np.clip(scaled, self._inner.low, self._inner.high)
        return np.where(rounded, inside, scaled)


class DiscretizeAction(_ActionWrapper):
    """Offers `bins` evenly spaced values for every element of a continuous action."""

    def __init__(self, env: Env, key: str, bins: int):
        if bins < 2:
            raise ValueError(f"Expected at least 2 bins, got {bins}.")
        self._bins = bins
        super().__init__(env, key)

    def _replace(self, space: Space) -> Space:
        low, high = space.limits
        if not np.all(np.isfinite(low) & np.isfinite(high)):
            expected = f"finite bounds to place {self._bins} bins between"
            raise self._error(expected, str(space), "Clip the action first.")
        self._values = np.linspace(low, high, self._bins).astype(space.dtype)
        return Space(np.int32, space.shape, 0, self._bins)

    def convert(self, value: np.ndarray) -> Array:
        """Returns the values of the bins with these indices."""
        if value.astype(np.int32) not in self._outer:
            advice = f"Pass the index of one of the {self._bins} bins."
            raise self._error(self._outer, value, advice)
        return np.take_along_axis(self._values, value[None].astype(np.int64), 0)[0]


class UnifyDtypes(Wrapper):
    """Converts values to float32, int32, uint8 or bool, the dtypes that agents take.

    Actions are converted back to the environment's dtypes. Integers that do not
    fit int32 are an error; floats that do not fit float32 become infinite.
    """

    def __init__(self, env: Env):
        super().__init__(env)
        # Spaces before and after the conversion, where they differ.
        self._obs = _conversions(super().obs_space, "observation", env)
        self._act = _conversions(super().act_space, "action", env)

    @property
    def converts(self) -> bool:
        """Whether there is a dtype to convert."""
        return bool(self._obs or self._act)

    @property
    def obs_space(self) -> Spaces:
        """Spaces of the wrapped environment, in the unified dtypes."""
        return {**super().obs_space, **{key: x for key, (_, x) in self._obs.items()}}

    @property
    def act_space(self) -> Spaces:
        """Spaces of the wrapped environment, in the unified dtypes."""
        return {**super().act_space, **{key: x for key, (_, x) in self._act.items()}}

    def step(self, action: Step) -> Step:
        """Converts the action, steps, and converts the observation."""
        if not action.get("reset"):
            keys = self._act.keys() & action.keys()
            cast = {key: self._cast_action(key, action[key]) for key in keys}
            action = {**action, **cast}
        obs = self.env.step(action)
        if not (self._obs and isinstance(obs, dict)):
            return obs
        obs = dict(obs)
        for key in self._obs.keys() & obs.keys():
            inner, outer = self._obs[key]
            # Values that are not as declared are left for CheckSpaces to report.
            if np.asarray(obs[key]).dtype == inner.dtype:
                obs[key] = self._cast("observation", key, obs[key], outer)
        return obs

    def _cast_action(self, key: str, value: Array) -> np.ndarray:
        inner, outer = self._act[key]
        cast = self._cast("action", key, value, inner)
        if inner.dtype.kind == "f" and value in outer:
            # A value that float32 rounded to a bound may be beyond it in a wider dtype.
            cast = np.clip(cast, *inner.limits)
        return cast

    def _cast(self, kind: str, key: str, value: Array, space: Space) -> np.ndarray:
        value = np.asarray(value)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = value.astype(space.dtype)
        if space.dtype.kind in "iu" and not np.array_equal(cast, value):
            raise SpaceError.of(
                kind,
                key,
                self,
                f"integers that fit {space.dtype}",
                value,
                "Use smaller numbers, or split them over two keys.",
            )
        return cast


def unified_space(space: Space, kind: str, key: str, env: Env) -> Space:
    """Returns the space of the same values in the dtype that agents take."""
    if space.dtype in (np.float32, np.int32, np.uint8, np.bool_):
        return space
    if space.dtype.kind == "f":
        with np.errstate(over="ignore"):
            low, high = (bound.astype(np.float32) for bound in space.limits)
        return Space(np.float32, space.shape, low, high)
    low, high = (bound.astype(object) for bound in space.limits)
    low, high = np.maximum(low, _INT32.min), np.minimum(high, _INT32.max)
    if np.any(low > high):
        raise SpaceError.of(
            kind,
            key,
            env,
            "bounds that overlap with those of int32",
            str(space),
            "Shift the values to start at zero.",
        )
    low, high = np.asarray(low, np.int64), np.asarray(high, np.int64)
    return Space(np.int32, space.shape, low, high + 1)


def _conversions(spaces: Spaces, kind: str, env: Env) -> dict[str, tuple[Space, Space]]:
    """Returns the spaces that agents cannot take, and those to convert them to."""
    unified = {
        key: unified_space(space, kind, key, env)
        for key, space in check_numeric(spaces, kind, env).items()
    }
    return {
        key: (space, unified[key])
        for key, space in spaces.items()
        if space.dtype != unified[key].dtype
    }


class ResizeImage(Wrapper):
    """Resizes images, which are the 3-dimensional uint8 observations.

    Args:
      env: the environment.
      size: height and width.
    """

    def __init__(self, env: Env, size: tuple[int, int]):
        super().__init__(env)
        self._size = (int(size[0]), int(size[1]))
        if min(self._size) < 1:
            raise ValueError(f"Expected a positive height and width, got {size}.")
        self._keys = [
            key
            for key, space in super().obs_space.items()
            if is_image(space) and space.shape[:2] != self._size
        ]

    @property
    def obs_space(self) -> Spaces:
        """Spaces of the wrapped environment, images in the new size."""
        spaces = super().obs_space
        resized = {key: resized_space(spaces[key], self._size) for key in self._keys}
        return {**spaces, **resized}

    def step(self, action: Step) -> Step:
        """Steps, and resizes the images."""
        obs = self.env.step(action)
        return {
            **obs,
            **{key: resize_image(obs[key], self._size) for key in self._keys},
        }


def resized_space(space: Space, size: tuple[int, int]) -> Space:
    """Returns the space of images of another size."""
    low, high = space.limits
    shape = (*size, space.shape[2])
    return Space(np.uint8, shape, low.min(), int(high.max()) + 1)


def is_image(space: Space) -> bool:
    """Returns whether a space is 3-dimensional and uint8."""
    return space.dtype == np.uint8 and len(space.shape) == 3
