"""Wrappers that change one continuous action; where the env is stepped."""

from __future__ import annotations

import numpy as np

from embodied.base import Array, Env, Spaces
from embodied.space import Space
from embodied.wrappers.base import SpaceError, Step, Wrapper, bounds


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
        self._inner = spaces[key]
        if self._inner.dtype.kind != "f":
            raise SpaceError.of(
                "action",
                key,
                env,
                f"a continuous space for {type(self).__name__}",
                str(self._inner),
                "Leave discrete actions as they are.",
            )
        self._key = key
        self._outer = self._replace(self._inner)

    @property
    def act_space(self) -> Spaces:
        """Spaces of the wrapped environment, but for the one of the action."""
        return {**super().act_space, self._key: self._outer}

    def step(self, action: Step) -> Step:
        """Converts the action, unless the environment ignores it, and steps."""
        # A missing action is left for the environment, or CheckSpaces, to report.
        if self._key in action and not action.get("reset"):
            value = np.asarray(action[self._key])
            if value.shape != self._outer.shape or value.dtype.kind not in "biuf":
                raise SpaceError.of(
                    "action",
                    self._key,
                    self,
                    self._outer,
                    value,
                    "Pass an array of that shape and dtype.",
                )
            action = {**action, self._key: self._convert(value)}
        return self.env.step(action)

    def _replace(self, space: Space) -> Space:
        raise NotImplementedError(f"{type(self).__name__}._replace")

    def _convert(self, value: np.ndarray) -> Array:
        raise NotImplementedError(f"{type(self).__name__}._convert")


class ClipAction(_ActionWrapper):
    """Clips a continuous action to [low, high], and to its space."""

    def __init__(self, env: Env, key: str, low: float = -1, high: float = 1):
        self._clip = (low, high)
        super().__init__(env, key)

    def _replace(self, space: Space) -> Space:
        inner_low, inner_high = bounds(space)
        low = np.maximum(inner_low, self._clip[0])
        high = np.minimum(inner_high, self._clip[1])
        if np.any(low > high):
            raise SpaceError.of(
                "action",
                self._key,
                self,
                f"bounds that have something in common with {list(self._clip)}",
                str(space),
                "Declare finite bounds, which can be scaled, or clip elsewhere.",
            )
        return Space(space.dtype, space.shape, low, high)

    def _convert(self, value: np.ndarray) -> Array:
        return np.clip(value, self._outer.low, self._outer.high)


class NormalizeAction(_ActionWrapper):
    """Scales [-1, 1] to the finite bounds of a continuous action.

    Elements that are not bounded on both sides pass as they are.
    """

    def _replace(self, space: Space) -> Space:
        # A bound at the end of float32's range is how some say that there is none.
        limit = np.finfo(np.float32).max
        low, high = bounds(space)
        self._finite = (np.abs(low) < limit) & (np.abs(high) < limit)
        self._low = np.where(self._finite, low, -1).astype(np.float64)
        self._high = np.where(self._finite, high, 1).astype(np.float64)
        low, high = np.where(self._finite, -1, low), np.where(self._finite, 1, high)
        return Space(space.dtype, space.shape, low, high)

    def _convert(self, value: np.ndarray) -> Array:
        share = (value.astype(np.float64) + 1) / 2
        scaled = self._low * (1 - share) + self._high * share
        scaled = np.where(self._finite, scaled, value).astype(self._inner.dtype)
        # Rounding must not step over a bound, but what is out of range stays so.
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
        low, high = bounds(space)
        if not np.all(np.isfinite(low) & np.isfinite(high)):
            raise SpaceError.of(
                "action",
                self._key,
                self,
                f"finite bounds to place {self._bins} bins between",
                str(space),
                "Clip the action first.",
            )
        self._values = np.linspace(low, high, self._bins).astype(space.dtype)
        return Space(np.int32, space.shape, 0, self._bins)

    def _convert(self, value: np.ndarray) -> Array:
        if value.astype(np.int32) not in self._outer:
            raise SpaceError.of(
                "action",
                self._key,
                self,
                self._outer,
                value,
                f"Pass the index of one of the {self._bins} bins.",
            )
        return np.take_along_axis(self._values, value[None].astype(np.int64), 0)[0]
