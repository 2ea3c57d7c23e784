"""Fits batches of environments to agents; in the process that steps them."""

from __future__ import annotations

import numpy as np

from embodied.base import Array, BatchEnv, Env, Spaces
from embodied.images import resize_image
from embodied.space import Space
from embodied.wrappers.checking import Step, ValueCheck, check_keys, check_numeric
from embodied.wrappers.value_wrappers import (
    ClipAction,
    NormalizeAction,
    is_image,
    resized_space,
    unified_space,
)


class FitBatch(BatchEnv):
    """Does for a batch what `wrap` does for an environment.

    Continuous actions are clipped to [-1, 1] and scaled to their bounds, dtypes are
    unified, and values are checked as by `CheckSpaces`, all rows at once.

    Args:
      envs: the batch.
      size: height and width to resize images to; None to keep their own.
      nonfinite: 'raise' or 'pass', see `CheckSpaces`.
    """

    def __init__(
        self,
        envs: BatchEnv,
        size: tuple[int, int] | None = None,
        nonfinite: str = "raise",
    ):
        self._envs = envs
        self._size = size
        self._inner_obs = check_numeric(envs.obs_space, "observation", envs)
        self._inner_act = check_numeric(envs.act_space, "action", envs)
        one: Env = ActionSpaces(self._inner_act)
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
            key: resized_space(space, size)
            if size is not None and is_image(space)
            else unified_space(space, "observation", key, one)
            for key, space in self._inner_obs.items()
        }
        passes = nonfinite == "pass"
        self._checks = {
            key: ValueCheck("observation", key, self._rows(space), envs, passes)
            for key, space in self._obs_space.items()
        }
        self._act_checks = {
            key: ValueCheck("action", key, self._rows(space), envs, passes=False)
            for key, space in self._act_space.items()
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
        """Checks and converts actions [n, ...], steps, and does so for observations."""
        check_keys("action", actions, self._act_space, self._envs)
        resets = np.asarray(actions["reset"], bool)
        converted = {}
        for key, value in actions.items():
            array = np.asarray(value)
            if key in self._converters:
                array = self._converters[key][0].convert(array)
            array = self._check_action(key, array, resets)
            if key in self._converters:
                array = self._converters[key][1].convert(array)
            converted[key] = array.astype(self._inner_act[key].dtype)
        obs = self._envs.step(converted)
        check_keys("observation", obs, self._obs_space, self._envs)
        return {key: self._convert(key, obs[key]) for key in self._obs_space}

    def close(self) -> None:
        """Closes the batch."""
        self._envs.close()

    def _rows(self, space: Space) -> Space:
        """Returns the space of all rows of a batch."""
        return Space(space.dtype, (len(self), *space.shape), space.low, space.high)

    def _check_action(self, key: str, array: np.ndarray, resets: np.ndarray) -> Array:
        """Checks the values of all rows but those that reset, which need no action."""
        space = self._act_space[key]
        if resets.any() and array.shape == (len(self), *space.shape):
            where = resets.reshape((-1,) + (1,) * len(space.shape))
            harmless = np.clip(0, *space.limits).astype(array.dtype)
            array = array if key == "reset" else np.where(where, harmless, array)
        return self._act_checks[key](_cast(array, space))

    def _convert(self, key: str, value: Array) -> Array:
        array, space = np.asarray(value), self._obs_space[key]
        if self._size is not None and is_image(space):
            array = np.stack([resize_image(image, self._size) for image in array])
        return self._checks[key](_cast(array, space))


def _cast(array: np.ndarray, space: Space) -> np.ndarray:
    """Casts to the dtype of a space, but for integers that it cannot hold."""
    if array.dtype == space.dtype or array.dtype.kind not in "biuf":
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(space.dtype)
    # Others are left for the check to report.
    return cast if space.dtype.kind == "f" or np.array_equal(cast, array) else array


class ActionSpaces(Env):
    """An Env of action spaces alone, for the wrappers that convert actions."""

    def __init__(self, act_space: Spaces):
        self._act_space = act_space

    @property
    def obs_space(self) -> Spaces:
        """Empty, since only actions are converted."""
        return {}

    @property
    def act_space(self) -> Spaces:
        """The spaces that were passed in."""
        return dict(self._act_space)
