"""Any dm_env environment as an Env, in the process that steps it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np

from embodied.base import Array, Env, Spaces
from embodied.envs.keys import (
    SIGNALS,
    Path,
    UnsupportedSpace,
    check_at_least,
    check_keys,
    flatten,
    is_image,
    signals,
    unflatten,
)
from embodied.envs.registry import UnknownTask, find_factory
from embodied.space import Space

_ADVICE = "Choose another obs_key or act_key, or rename it in the environment's specs."
_SEEDS = ("seed", "random_state", "random_seed")  # Names that factories give the seed.


class FromDM(Env):
    """An environment with dm_env's interface.

    Specs are flattened: the elements of nested dicts, lists and tuples become keys
    that are joined with slashes. Integer actions become int32 that start at 0.
    Float observations are declared without bounds, and arrays without elements are
    left out. A discount of zero sets `is_terminal`.

    Args:
      env: an environment, or `package.module:Name` of its factory, which is called
        with `kwargs` and, if it has a parameter named seed, random_state or
        random_seed, the seed.
      obs_key: key of an observation that is a single array. Default: 'image' for an
        image (3-dimensional uint8), else 'obs'.
      act_key: key of an action that is a single array.
      repeat: number of steps that each action is repeated for, within an episode.
      seed: see `env`; ignored if `env` is an environment.
      **kwargs: arguments of the factory.
    """

    def __init__(
        self,
        env: Any,
        obs_key: str | None = None,
        act_key: str = "action",
        repeat: int = 1,
        seed: int = 0,
        **kwargs: Any,
    ):
        check_at_least(1, repeat=repeat)
        if isinstance(env, str):
            env = _make(env, seed, kwargs)
        elif kwargs:
            raise TypeError(
                f"Expected options {sorted(kwargs)} only with the name of an "
                "environment, got an existing one."
            )
        if not is_dm_env(env):
            raise TypeError(
                "Expected a dm_env.Environment (reset, step, action_spec, "
                f"observation_spec), got {type(env).__name__}."
            )
        self.dm_env = env
        self._repeat = repeat
        self._done = True
        self._closed = False
        self._act_spec = env.action_spec()
        obs_spec = env.observation_spec()
        if obs_key is None:
            obs_key = "image" if is_image(obs_spec) else "obs"
        self._obs_leaves = _obs_leaves(obs_spec, obs_key)
        self._act_leaves = _act_leaves(self._act_spec, act_key)
        check_keys(
            type(env).__name__,
            [leaf.key for leaf in self._obs_leaves],
            [leaf.key for leaf in self._act_leaves],
            _ADVICE,
        )

    @property
    def obs_space(self) -> Spaces:
        """The flattened observation spec."""
        return {**{leaf.key: leaf.space for leaf in self._obs_leaves}, **SIGNALS}

    @property
    def act_space(self) -> Spaces:
        """The flattened action spec."""
        return {
            "reset": Space(bool),
            **{leaf.key: leaf.space for leaf in self._act_leaves},
        }

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Steps, or resets."""
        if self._done or action["reset"]:
            self._done = False
            time_step = self.dm_env.reset()
            return self._observe(time_step, 0.0, is_terminal=False)
        values = (leaf.decode(action[leaf.key]) for leaf in self._act_leaves)
        nested = unflatten(self._act_spec, values)
        reward = 0.0
        for _ in range(self._repeat):
            time_step = self.dm_env.step(nested)
            if not time_step.first():
                reward += 0.0 if time_step.reward is None else time_step.reward
            if time_step.first() or time_step.last():
                break
        self._done = bool(time_step.last())
        terminal = not time_step.first() and time_step.discount == 0
        return self._observe(time_step, reward, terminal)

    def close(self) -> None:
        """Closes the environment, if it can be closed."""
        if not self._closed:
            self._closed = True
            close = getattr(self.dm_env, "close", None)
            if close is not None:
                close()

    def _observe(
        self, time_step: Any, reward: float, is_terminal: bool
    ) -> dict[str, Array]:
        obs = time_step.observation
        return {
            **{leaf.key: leaf.encode(obs) for leaf in self._obs_leaves},
            **signals(reward, time_step.first(), self._done, is_terminal),
        }


def is_dm_env(env: Any) -> bool:
    """Returns whether `FromDM` can take this object."""
    names = ("reset", "step", "action_spec", "observation_spec")
    return all(callable(getattr(env, name, None)) for name in names)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One array among the elements of a nested spec.

    Attributes:
      key: key in `obs_space` or `act_space`.
      path: where the array is in a nested observation or action.
      space: space of the key.
      dtype: dtype of the spec.
      start: value of the spec that is 0 in `space`; None for 0.
    """

    key: str
    path: Path
    space: Space
    dtype: np.dtype
    start: np.ndarray | None = None

    def encode(self, obs: Any) -> np.ndarray:
        """Returns the array of an observation; a copy, since it may be a buffer."""
        for part in self.path:
            obs = obs[part]
        array = np.array(obs)
        if array.dtype != self.dtype and array.dtype.kind == self.dtype.kind:
            array = array.astype(self.dtype)
        return array

    def decode(self, value: Array) -> np.ndarray:
        """Converts a value of `space` to one of the spec."""
        array = np.asarray(value)
        if self.start is not None:
            array = array.astype(np.int64) + self.start
        return np.asarray(array, self.dtype)


def _obs_leaves(spec: Any, key: str) -> list[_Leaf]:
    leaves = []
    for name, path, part in flatten(spec, key):
        if any(size == 0 for size in part.shape):
            continue
        dtype = _dtype(name, part)
        bounds: tuple[Any, Any] = (None, None)
        if dtype.kind in "iu" and hasattr(part, "minimum"):
            # Highs are inclusive in specs and exclusive in Space. As Python integers,
            # since adding 1 may overflow.
            low, high = (
                np.asarray(bound).astype(object)
                for bound in (part.minimum, part.maximum)
            )
            bounds = low, np.minimum(high + 1, np.iinfo(dtype).max)
        leaves.append(_Leaf(name, path, Space(dtype, part.shape, *bounds), dtype))
    return leaves


def _act_leaves(spec: Any, key: str) -> list[_Leaf]:
    leaves = []
    for name, path, part in flatten(spec, key):
        dtype = _dtype(name, part)
        low, high = getattr(part, "minimum", None), getattr(part, "maximum", None)
        if dtype.kind == "b":
            leaves.append(_Leaf(name, path, Space(np.int32, part.shape, 0, 2), dtype))
        elif dtype.kind == "f":
            leaves.append(_Leaf(name, path, Space(dtype, part.shape, low, high), dtype))
        elif low is None or high is None:
            raise UnsupportedSpace(
                f"Expected integer actions {name!r} to have bounds, got {part}. "
                "Use dm_env.specs.BoundedArray or DiscreteArray."
            )
        else:
            low = np.broadcast_to(np.asarray(low).astype(np.int64), part.shape)
            classes = np.broadcast_to(high, part.shape).astype(np.int64) - low + 1
            space = Space(np.int32, part.shape, 0, classes)
            leaves.append(_Leaf(name, path, space, dtype, low if low.any() else None))
    return leaves


def _dtype(name: str, spec: Any) -> np.dtype:
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in "biuf":
        raise UnsupportedSpace(
            f"Expected a numeric spec at {name!r}, got {spec}. "
            "Leave it out of the environment's specs."
        )
    return dtype


def _make(name: str, seed: int, kwargs: dict[str, Any]) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownTask(
            f"Expected a task of the form dm_package.module:Name, got 'dm_{name}'."
        )
    factory = find_factory(f"dm_{name}", module, attribute)
    parameters = inspect.signature(factory).parameters
    seeds = {key: seed for key in _SEEDS if key in parameters}
    return factory(**{**seeds, **kwargs})
