"""Any Gymnasium environment as an Env, in the process that steps it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied.base import Array, Env, Spaces
from embodied.envs.keys import (
    SIGNALS,
    Path,
    UnsupportedSpace,
    UnusableEnv,
    check_keys,
    flatten,
    is_image,
    signals,
    unflatten,
)
from embodied.envs.registry import MissingExtra, UnknownTask
from embodied.space import Space

# Packages that register ids when they are imported: prefix, package, extra.
_PROVIDERS = (
    ("ALE/", "ale_py", "atari"),
    ("MiniGrid-", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid"),
)


# Values that these methods return.
_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")


class FromGym(Env):
    """A Gymnasium environment.

    Spaces are flattened: the elements of a Dict or Tuple, at any depth, become keys
    that are joined with slashes, such as `hand/0/joints`. Discrete, MultiDiscrete and
    MultiBinary become int32 that count from 0, with a number of classes per element;
    so do integer Boxes that start below (an action's: anywhere else) and whose range
    fits. Other Boxes keep their dtype. Float observations are declared without bounds,
    since agents do not need them and many environments step over theirs. At the end of
    an episode, `terminated` sets `is_last` and `is_terminal`, `truncated` only the
    first.

    Args:
      env: a registered id, or an environment.
      obs_key: key of an observation that is not a Dict. Default: 'image' for an image
        (3-dimensional uint8), else 'obs'.
      act_key: key of an action that is not a Dict.
      seed: seed of the first reset. Later ones go on from there.
      info_keys: numbers in `info` that are returned as `log/NAME`, 0 where absent.
      **kwargs: passed to `gymnasium.make`.
    """

    def __init__(
        self,
        env: str | gymnasium.Env,
        obs_key: str | None = None,
        act_key: str = "action",
        seed: int = 0,
        info_keys: Sequence[str] = (),
        **kwargs: Any,
    ):
        if isinstance(env, str):
            env = _make(env, kwargs)
        elif kwargs:
            raise TypeError(
                f"Expected options {sorted(kwargs)} only with an environment's "
                "id, got an environment that is made already."
            )
        self.gym_env = env
        for key in ("observation_space", "action_space"):
            space = getattr(env, key, None)
            if not isinstance(space, spaces.Space):
                raise UnusableEnv(
                    f"Env {self.name}: expected {key} to be a gymnasium.Space, got "
                    f"{'nothing' if space is None else repr(space)}. Set it in the "
                    "class or in __init__."
                )
        _check_reset(self.name, env)
        self._seed: int | None = seed
        self._info_keys = tuple(info_keys)
        self._done = True
        self._closed = False
        if obs_key is None:
            obs_key = "image" if is_image(env.observation_space) else "obs"
        self._obs_leaves = [
            _leaf(*leaf, acts=False) for leaf in flatten(env.observation_space, obs_key)
        ]
        self._act_leaves = [
            _leaf(*leaf, acts=True) for leaf in flatten(env.action_space, act_key)
        ]
        check_keys(
            self.name,
            [leaf.key for leaf in self._obs_leaves],
            [leaf.key for leaf in self._act_leaves],
            "Choose another obs_key or act_key, or rename it with a "
            "gymnasium.ObservationWrapper or ActionWrapper.",
        )

    @property
    def name(self) -> str:
        """The task's name."""
        spec = self.gym_env.spec
        return f"gym_{spec.id}" if spec else type(self.gym_env.unwrapped).__name__

    @property
    def obs_space(self) -> Spaces:
        """The flattened observation space, and `log/` keys."""
        return {
            **{leaf.key: leaf.space for leaf in self._obs_leaves},
            **{f"log/{key}": Space(np.float32) for key in self._info_keys},
            **SIGNALS,
        }

    @property
    def act_space(self) -> Spaces:
        """The flattened action space."""
        return {
            "reset": Space(bool),
            **{leaf.key: leaf.space for leaf in self._act_leaves},
        }

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Steps, or resets."""
        if self._done or action["reset"]:
            obs, info = self._check(_RESET, self.gym_env.reset(seed=self._seed))
            self._seed = None
            self._done = False
            return self._observe(obs, info, is_first=True)
        values = (leaf.decode(action[leaf.key]) for leaf in self._act_leaves)
        nested = unflatten(self.gym_env.action_space, values)
        obs, reward, terminated, truncated, info = self._check(
            _STEP, self.gym_env.step(nested)
        )
        self._done = bool(terminated or truncated)
        return self._observe(obs, info, reward, is_terminal=bool(terminated))

    def close(self) -> None:
        """Closes the environment."""
        if not self._closed:
            self._closed = True
            self.gym_env.close()

    def _check(self, names: tuple[str, ...], result: Any) -> Any:
        if isinstance(result, tuple) and len(result) == len(names):
            return result
        method = "step" if names == _STEP else "reset"
        got, hint = type(result).__name__, ""
        if isinstance(result, tuple):
            got = f"{len(result)} values"
        if method == "step" and got == "4 values":
            hint = " The older API had one flag `done` in place of the two."
        raise UnusableEnv(
            f"Env {self.name}: expected {method} to return a tuple of {len(names)} "
            f"values ({', '.join(names)}), as Gymnasium's API has it, got {got}.{hint}"
        )

    def _observe(
        self,
        obs: Any,
        info: dict[str, Any],
        reward: Any = 0.0,
        is_first: bool = False,
        is_terminal: bool = False,
    ) -> dict[str, Array]:
        return {
            **{leaf.key: leaf.encode(leaf.find(obs)) for leaf in self._obs_leaves},
            **{f"log/{key}": np.float32(info.get(key, 0.0)) for key in self._info_keys},
            **signals(reward, is_first, self._done, is_terminal),
        }


def _check_reset(name: str, env: gymnasium.Env) -> None:
    """Raises an error if `reset` does not take a seed."""
    for method in (env.reset, env.unwrapped.reset):
        try:
            signature = inspect.signature(method)
        except ValueError:  # Some that are written in C have none.
            continue
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        if "seed" not in signature.parameters and not takes_any:
            raise UnusableEnv(
                f"Env {name}: expected reset to take a seed, as Gymnasium's API has "
                f"it, got reset{signature}. Write: def reset(self, *, seed=None, "
                "options=None)"
            )


def is_gym_env(env: Any) -> bool:
    """Returns whether `FromGym` can take this object."""
    return isinstance(env, gymnasium.Env)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One array among the elements of a nested Gymnasium space.

    Attributes:
      key: ours.
      path: where it lies in a Gymnasium value.
      space: ours.
      gym_space: Gymnasium's.
      start: the Gymnasium value of our 0, for all elements or for each; None for 0.
    """

    key: str
    path: Path
    space: Space
    gym_space: gymnasium.Space
    start: int | np.ndarray | None = None

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
        """Converts an element to ours, in a copy: it may be the environment's buffer.

        A value that does not fit is returned as it is, for CheckSpaces to report.
        """
        array = np.array(value)
        kinds = "biuf" if self.start is None else "biu"
        if array.dtype.kind not in kinds:
            return array
        if self.start is not None:
            array = array.astype(np.int64) - self.start
        if array.dtype == self.space.dtype:
            return array
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(self.space.dtype)
        lossy = self.space.discrete and not np.array_equal(cast, array)
        return array if lossy else cast

    def decode(self, value: Array) -> Any:
        """Converts an array of ours to an element."""
        array = np.asarray(value)
        if self.start is not None:
            array = array.astype(np.int64) + self.start
        array = np.asarray(array, self.gym_space.dtype)
        return array[()] if isinstance(self.gym_space, spaces.Discrete) else array


def _leaf(key: str, path: Path, space: gymnasium.Space, acts: bool) -> _Leaf:
    try:
        if isinstance(space, spaces.Discrete):
            classes = _classes(int(space.n))
            return _Leaf(key, path, classes, space, int(space.start) or None)
        if isinstance(space, spaces.MultiDiscrete):
            classes = _classes(space.nvec)
            start = space.start.astype(np.int64) if np.any(space.start) else None
            return _Leaf(key, path, classes, space, start)
        if isinstance(space, spaces.MultiBinary):
            return _Leaf(key, path, Space(np.int32, space.shape, 0, 2), space)
        if isinstance(space, spaces.Box):
            return _box_leaf(key, path, space, acts)
    except ValueError as error:
        raise UnsupportedSpace(f"Gymnasium space {space} at {key!r}: {error}") from None
    raise UnsupportedSpace(
        f"Expected a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple at "
        f"{key!r}, got {space}, whose values have no fixed shape. Convert it with a "
        "gymnasium.ObservationWrapper or ActionWrapper."
    )


def _box_leaf(key: str, path: Path, space: spaces.Box, acts: bool) -> _Leaf:
    dtype = np.dtype(space.dtype)
    if dtype.kind == "f":
        bounds = (space.low, space.high) if acts else (None, None)
        return _Leaf(key, path, Space(dtype, space.shape, *bounds), space)
    if dtype.kind == "b":
        return _Leaf(key, path, Space(dtype, space.shape), space)
    wide = np.uint64 if dtype == np.uint64 else np.int64
    low, high = space.low.astype(wide), space.high.astype(wide)
    spread = high.astype(object) - low.astype(object)
    # Actions are classes, and an observation of -1 would mean that it is missing.
    shift = np.any(low) and (acts or dtype.kind == "i")
    if shift and np.all(spread < np.iinfo(np.int32).max):
        return _Leaf(key, path, _classes(spread + 1), space, low.astype(np.int64))
    # Highs are inclusive there and exclusive here; a 64-bit maximum admits itself.
    high = np.minimum(high, np.iinfo(wide).max - 1) + wide(1)
    return _Leaf(key, path, Space(dtype, space.shape, low, high), space)


def _classes(number: int | np.ndarray) -> Space:
    """Returns the space of integers from 0 to below `number`, per element."""
    number = np.asarray(number).astype(np.int64)
    if np.any(number > np.iinfo(np.int32).max):
        raise ValueError(f"expected classes that fit int32, got {number.max()}.")
    return Space(np.int32, number.shape, 0, number)


def _make(task: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    for prefix, package, extra in _PROVIDERS:
        if task.startswith(prefix) and task not in gymnasium.registry:
            try:
                importlib.import_module(package)
            except ModuleNotFoundError as error:
                missing = error.name or package
                raise MissingExtra.named(f"gym_{task}", missing, extra) from error
    try:
        # Its checker only warns; CheckSpaces raises.
        return gymnasium.make(task, disable_env_checker=True, **kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownTask(
            f"Expected an id that is registered with Gymnasium, got {task!r}. {error} "
            "The package that registers it can be named: gym_package:Name-v0."
        ) from error
    except gymnasium.error.DependencyNotInstalled as error:
        if "mujoco" not in str(error).lower():
            raise MissingExtra(f"Task 'gym_{task}': {error}") from error
        raise MissingExtra.named(f"gym_{task}", "mujoco", "mujoco") from error
    except ImportError as error:
        name, _, version = task.rpartition("-v")
        newest = f"{name}-v5"
        if version not in ("2", "3") or newest not in gymnasium.registry:
            raise
        raise UnknownTask(
            f"Expected an id that Gymnasium still has, got {task!r}. Use gym_{newest}."
        ) from error
