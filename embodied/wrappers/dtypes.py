"""The wrapper that unifies dtypes; where the env is stepped."""

from __future__ import annotations

import numpy as np

from embodied.base import Array, Env, Spaces
from embodied.space import Space
from embodied.wrappers.base import SpaceError, Step, Wrapper, bounds, refuse_strings

_INT32 = np.iinfo(np.int32)


class UnifyDtypes(Wrapper):
    """Shows the agent float32, int32, uint8 and bool only.

    Actions are converted back to what the environment declares. Integers that do not
    fit int32 are an error; floats that do not fit float32 become infinite.
    """

    def __init__(self, env: Env):
        super().__init__(env)
        obs_space = refuse_strings(super().obs_space, "observation", env)
        self._env_act_space = refuse_strings(super().act_space, "action", env)
        self._obs_space = {
            key: _unify(space, "observation", key, env)
            for key, space in obs_space.items()
        }
        self._act_space = {
            key: _unify(space, "action", key, env)
            for key, space in self._env_act_space.items()
        }
        self._obs_keys = _changed(obs_space, self._obs_space)
        self._act_keys = _changed(self._env_act_space, self._act_space)

    @property
    def obs_space(self) -> Spaces:
        """The same values in the unified dtypes."""
        return dict(self._obs_space)

    @property
    def act_space(self) -> Spaces:
        """The same values in the unified dtypes."""
        return dict(self._act_space)

    def step(self, action: Step) -> Step:
        """Converts the action, steps, and converts the observation."""
        if not action.get("reset"):
            action = dict(action)
            for key in self._act_keys & action.keys():
                action[key] = self._cast_action(key, action[key])
        obs = dict(self.env.step(action))
        for key in self._obs_keys & obs.keys():
            space = self._obs_space[key]
            obs[key] = self._cast("observation", key, obs[key], space)
        return obs

    def _cast_action(self, key: str, value: Array) -> np.ndarray:
        inner = self._env_act_space[key]
        cast = self._cast("action", key, value, inner)
        if inner.dtype.kind == "f" and value in self._act_space[key]:
            # What float32 rounded up to a bound may be above it in a wider dtype.
            cast = np.clip(cast, *bounds(inner))
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


def _unify(space: Space, kind: str, key: str, env: Env) -> Space:
    """Returns the space of the same values in the dtype that agents take."""
    if space.dtype in (np.float32, np.int32, np.uint8, np.bool_):
        return space
    if space.dtype.kind == "f":
        with np.errstate(over="ignore"):
            low, high = (bound.astype(np.float32) for bound in bounds(space))
        return Space(np.float32, space.shape, low, high)
    low, high = (bound.astype(object) for bound in bounds(space))
    low, high = np.maximum(low, _INT32.min), np.minimum(high, _INT32.max)
    if np.any(low > high):
        raise SpaceError.of(
            kind,
            key,
            env,
            "bounds that leave some values of int32",
            str(space),
            "Count from zero instead.",
        )
    low, high = np.asarray(low, np.int64), np.asarray(high, np.int64)
    return Space(np.int32, space.shape, low, high + 1)


def _changed(before: Spaces, after: Spaces) -> set[str]:
    return {key for key, space in after.items() if space.dtype != before[key].dtype}
