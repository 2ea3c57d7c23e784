"""Fits batches of environments to agents; in the process that steps them."""

from __future__ import annotations

import numpy as np

from embodied.base import Array, BatchEnv, Env, Spaces
from embodied.space import Space
from embodied.wrappers.checking import SpaceError, Step, refuse_strings
from embodied.wrappers.value_wrappers import (
    ClipAction,
    NormalizeAction,
    is_image,
    resize_image,
    unified_space,
)


class FitBatch(BatchEnv):
    """Does for a batch what `wrap` does for an environment.

    Continuous actions are clipped to [-1, 1] and scaled to their bounds, dtypes are
    unified, and values checked, all rows at once.

    Args:
      envs: the batch.
      size: height and width that images get; None for their own.
    """

    def __init__(self, envs: BatchEnv, size: tuple[int, int] | None = None):
        self._envs = envs
        self._size = size
        self._inner_obs = refuse_strings(envs.obs_space, "observation", envs)
        self._inner_act = refuse_strings(envs.act_space, "action", envs)
        one: Env = _Spaces(self._inner_act)
        self._converters: dict[str, tuple[ClipAction, NormalizeAction]] = {}
        self._act_space = dict(self._inner_act)
        for key, space in self._inner_act.items():
            if space.dtype.kind == "f":
                scale = NormalizeAction(one, key)
                clip = ClipAction(scale, key)
                self._converters[key] = (clip, scale)
                space = clip.act_space[key]
            self._act_space[key] = unified_space(space, "action", key, one)
        self._obs_space = {
            key: unified_space(self._resized(space), "observation", key, one)
            for key, space in self._inner_obs.items()
        }

    @property
    def obs_space(self) -> Spaces:
        """Spaces of one environment, in dtypes that agents take."""
        return dict(self._obs_space)

    @property
    def act_space(self) -> Spaces:
        """Spaces of one environment, continuous ones within [-1, 1]."""
        return dict(self._act_space)

    def __len__(self) -> int:
        return len(self._envs)

    def step(self, actions: Step) -> Step:
        """Converts actions [n, ...], steps, and converts and checks observations."""
        converted = {}
        for key, value in actions.items():
            if key in self._converters:
                clip, scale = self._converters[key]
                value = scale.convert(clip.convert(np.asarray(value)))
            converted[key] = np.asarray(value).astype(self._inner_act[key].dtype)
        obs = self._envs.step(converted)
        return {key: self._convert(key, obs[key]) for key in self._obs_space}

    def close(self) -> None:
        """Closes the batch."""
        self._envs.close()

    def _resized(self, space: Space) -> Space:
        if self._size is None or not is_image(space):
            return space
        return Space(np.uint8, (*self._size, space.shape[2]))

    def _convert(self, key: str, value: Array) -> np.ndarray:
        array, space = np.asarray(value), self._obs_space[key]
        if self._size is not None and is_image(space):
            array = np.stack([resize_image(image, self._size) for image in array])
        expected = (len(self), *space.shape)
        fits = array.shape == expected and array.dtype.kind in "biuf"
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(space.dtype) if fits else array
        if fits and space.dtype.kind in "iu" and not key.startswith("log/"):
            low, high = space.limits
            inside = (cast >= low) & (cast <= high)
            if space.dtype.kind == "i":
                inside |= cast == -1  # Missing.
            fits = bool(np.all(inside)) and np.array_equal(cast, array)
        if not fits:
            raise SpaceError.of(
                *("observation", key, self._envs, f"{len(self)} times {space}", array),
                "Return what the environment declares.",
            )
        return cast


class _Spaces(Env):
    """Has action spaces, and cannot be stepped."""

    def __init__(self, act_space: Spaces):
        self._act_space = act_space

    @property
    def obs_space(self) -> Spaces:
        """None."""
        return {}

    @property
    def act_space(self) -> Spaces:
        """As given."""
        return dict(self._act_space)
