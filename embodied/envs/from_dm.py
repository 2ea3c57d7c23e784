"""Any dm_env environment as an Env, in the process that steps it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from embodied.base import Array, Env
from embodied.envs.flattening import Flattened, Path, SpaceLeaf, array_leaf, flatten
from embodied.envs.keys import UnsupportedSpace, check_at_least, signals
from embodied.envs.registry import UnknownTask, find_factory

_SEEDS = ("seed", "random_state", "random_seed")  # Names that factories give the seed.


class FromDM(Flattened, Env):
    """An environment with dm_env's interface.

    Specs are flattened: the elements of nested dicts, lists and tuples become keys
    that are joined with slashes. Integers are converted as those of a Box by `FromGym`.
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
        obs_spec, act_spec = env.observation_spec(), env.action_spec()
        if obs_key is None:
            obs_key = "image" if _is_image(obs_spec) else "obs"
        super().__init__(
            env,
            type(env).__name__,
            [
                _leaf(key, path, spec, acts=False)
                for key, path, spec in flatten(obs_spec, obs_key)
                if 0 not in spec.shape
            ],
            [_leaf(*found, acts=True) for found in flatten(act_spec, act_key)],
            act_spec,
        )
        self.dm_env = env
        self._repeat = repeat
        self._done = True

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Steps, or resets."""
        if self._done or action["reset"]:
            self._done = False
            time_step = self.dm_env.reset()
            return self._observe(time_step, 0.0, is_terminal=False)
        nested, reward = self._decode(action), 0.0
        for _ in range(self._repeat):
            time_step = self.dm_env.step(nested)
            if not time_step.first():
                reward += 0.0 if time_step.reward is None else time_step.reward
            if time_step.first() or time_step.last():
                break
        self._done = bool(time_step.last())
        terminal = not time_step.first() and time_step.discount == 0
        return self._observe(time_step, reward, terminal)

    def _observe(
        self, time_step: Any, reward: float, is_terminal: bool
    ) -> dict[str, Array]:
        return {
            **self._encode(time_step.observation),
            **signals(reward, time_step.first(), self._done, is_terminal),
        }


def is_dm_env(env: Any) -> bool:
    """Returns whether `FromDM` can take this object."""
    names = ("reset", "step", "action_spec", "observation_spec")
    return all(callable(getattr(env, name, None)) for name in names)


def _leaf(key: str, path: Path, spec: Any, acts: bool) -> SpaceLeaf:
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in "biuf":
        raise UnsupportedSpace(
            f"Expected a numeric spec at {key!r}, got {spec}. "
            "Leave it out of the environment's specs."
        )
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    if dtype.kind in "iu" and (low is None or high is None):
        if acts:
            raise UnsupportedSpace(
                f"Expected integer actions {key!r} to have bounds, got {spec}. "
                "Use dm_env.specs.BoundedArray or DiscreteArray."
            )
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if dtype.kind == "b":
        low, high = 0, 1
    # Replays of runs have actions as classes, whatever their dtype is.
    return array_leaf(key, path, spec, low, high, acts, plain=True, classes=acts)


def _is_image(spec: Any) -> bool:
    return len(getattr(spec, "shape", ())) == 3 and spec.dtype == np.uint8


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
