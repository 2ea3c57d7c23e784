"""Gymnasium's vector environments as a BatchEnv, in the process that steps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from embodied.base import Array, BatchEnv, Env, Spaces
from embodied.envs.from_gym import check_info, make_registered, without_factory_options
from embodied.envs.gym_spaces import act_leaf, image_layout, obs_leaf
from embodied.envs.keys import SIGNALS, UnusableEnv, check_keys, flatten, unflatten
from embodied.space import Space

MODES = {"sync": "sync", "async": "async", "own": "vector_entry_point"}


class VectorGym(BatchEnv):
    """A vector environment of Gymnasium, or a pool of EnvPool.

    Values are converted as by `FromGym`. The vector environment itself resets those
    that have ended in the following step, which Gymnasium calls NEXT_STEP.

    Args:
      env: the vector environment.
      reset: resets all environments; returns observations and info.
      obs_key: see `FromGym`.
      act_key: see `FromGym`.
      info_keys: see `FromGym`.
      size: see `FromGym`.
    """

    def __init__(
        self,
        env: Any,
        reset: Callable[[], tuple[Any, Mapping[str, Any]]],
        obs_key: str | None = None,
        act_key: str = "action",
        info_keys: Sequence[str] = (),
        size: Sequence[int] = (0, 0),
    ):
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
        if mode not in (None, gymnasium.vector.AutoresetMode.NEXT_STEP):
            raise UnusableEnv(
                f"Expected a vector environment whose autoreset_mode is NEXT_STEP, got "
                f"{mode} of {env}. Make it with autoreset_mode NEXT_STEP."
            )
        self.gym_env = env
        self._reset = reset
        self._rows = int(env.num_envs)
        self._info_keys = tuple(key for key in info_keys if key != "none")
        # The spaces of one environment, which are the only ones that EnvPool has.
        obs_space = getattr(env, "single_observation_space", env.observation_space)
        act_space = getattr(env, "single_action_space", env.action_space)
        if obs_key is None:
            obs_key = "obs" if image_layout(obs_space) is None else "image"
        height, width = (int(side) for side in size)
        self._obs_leaves = [
            obs_leaf(*leaf, (height, width)) for leaf in flatten(obs_space, obs_key)
        ]
        self._act_leaves = [act_leaf(*leaf) for leaf in flatten(act_space, act_key)]
        self._gym_act_space = act_space
        check_keys(
            str(env),
            [leaf.key for leaf in self._obs_leaves],
            [leaf.key for leaf in self._act_leaves],
            "Choose another obs_key or act_key.",
        )
        self._done = np.ones(self._rows, bool)
        self._begun = self._closed = False

    @property
    def obs_space(self) -> Spaces:
        """The flattened observation space of one environment, and `log/` keys."""
        return {
            **{leaf.key: leaf.space for leaf in self._obs_leaves},
            **{f"log/{key}": Space(np.float32) for key in self._info_keys},
            **SIGNALS,
        }

    @property
    def act_space(self) -> Spaces:
        """The flattened action space of one environment, and `reset`."""
        leaves = {leaf.key: leaf.space for leaf in self._act_leaves}
        return {"reset": Space(bool), **leaves}

    def __len__(self) -> int:
        return self._rows

    def step(self, actions: dict[str, Array]) -> dict[str, Array]:
        """Steps all environments, or resets all of them."""
        asked = np.asarray(actions["reset"], bool)
        if not self._begun or np.any(asked & ~self._done):
            obs, info = self._reset()
            self._begun = True
            self._done = np.zeros(self._rows, bool)
            first, zeros = np.ones(self._rows, bool), np.zeros(self._rows, np.float32)
            return self._observe(obs, info, zeros, first, self._done)
        values = (leaf.decode(actions[leaf.key]) for leaf in self._act_leaves)
        nested = unflatten(self._gym_act_space, values)
        obs, reward, terminated, truncated, info = self.gym_env.step(nested)
        first = self._done
        # A step that resets an environment is not part of the episode before.
        reward = np.where(first, 0, reward).astype(np.float32)
        terminated = np.asarray(terminated, bool) & ~first
        self._done = (terminated | np.asarray(truncated, bool)) & ~first
        return self._observe(obs, info, reward, first, terminated)

    def close(self) -> None:
        """Closes the vector environment."""
        if not self._closed:
            self._closed = True
            self.gym_env.close()

    def _observe(
        self,
        obs: Any,
        info: Mapping[str, Any],
        reward: np.ndarray,
        first: np.ndarray,
        terminal: np.ndarray,
    ) -> dict[str, Array]:
        logs = {}
        for key in self._info_keys:
            found = info.get(key, np.zeros(self._rows))
            logs[f"log/{key}"] = np.array([check_info(key, x) for x in found])
        return {
            **{leaf.key: leaf.encode(leaf.find(obs)) for leaf in self._obs_leaves},
            **logs,
            "reward": reward,
            "is_first": first,
            "is_last": self._done,
            "is_terminal": terminal,
        }


class SingleEnv(Env):
    """A batch of one environment as an Env."""

    def __init__(self, envs: BatchEnv):
        if len(envs) != 1:
            raise ValueError(f"SingleEnv expected one environment, got {len(envs)}.")
        self.envs = envs

    @property
    def obs_space(self) -> Spaces:
        """Spaces of the environment."""
        return self.envs.obs_space

    @property
    def act_space(self) -> Spaces:
        """Spaces of the environment."""
        return self.envs.act_space

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Steps the environment."""
        rows = {key: np.asarray(value)[None] for key, value in action.items()}
        return {key: value[0] for key, value in self.envs.step(rows).items()}

    def close(self) -> None:
        """Closes the environment."""
        self.envs.close()


def make_vector(
    task: str,
    seeds: Sequence[int],
    vector: str = "none",
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> VectorGym | None:
    """Makes several environments of a registered id; None if `vector` is `none`.

    Args:
      task: the id.
      seeds: one per environment.
      vector: `none`; `sync` or `async` for Gymnasium's vectors of single environments;
        `own` for the vector environment that is registered with the id.
      kwargs: arguments of the environments.
      **options: options of `VectorGym`.
    """
    if vector == "none":
        return None
    with make_registered(task):
        try:
            env = gymnasium.make_vec(
                task, len(seeds), vectorization_mode=MODES[vector], **(kwargs or {})
            )
        except gymnasium.error.Error as error:
            if vector != "own" or "vector entry point" not in str(error):
                raise
            raise UnusableEnv(
                "Expected an id with a vector environment of its own for "
                f"env.gym.vector own, got gym_{task}, which has none. Use sync or "
                "async."
            ) from error
    return from_vector(env, seeds if vector != "own" else seeds[:1], options)


def make_vector_of(
    factories: Sequence[Callable[[], Any]],
    seeds: Sequence[int],
    vector: str,
    options: Mapping[str, Any],
) -> VectorGym:
    """Makes several Gymnasium environments of a user, which step together.

    Args:
      factories: one per environment.
      seeds: one per environment.
      vector: `sync` or `async`.
      options: options of `VectorGym`.
    """
    if vector == "own":
        raise UnusableEnv(
            "Expected sync or async for env.gym.vector, got 'own', which is for ids "
            "that are registered with a vector environment. A function with a "
            "parameter num_envs can return one of its own."
        )
    kinds = {
        "sync": gymnasium.vector.SyncVectorEnv,
        "async": gymnasium.vector.AsyncVectorEnv,
    }
    first = factories[0]()
    try:
        if not isinstance(first, gymnasium.Env):
            raise UnusableEnv(
                f"Expected Gymnasium environments for env.gym.vector {vector}, got "
                f"{first!r}. Set env.gym.vector to none."
            )
    finally:
        first.close()
    return from_vector(kinds[vector](factories), seeds, options)


def from_vector(
    env: Any, seeds: Sequence[int], options: Mapping[str, Any]
) -> VectorGym:
    """Adapts a `gymnasium.vector.VectorEnv`; a single seed is for all of it."""
    if not isinstance(env, gymnasium.vector.VectorEnv):
        raise UnusableEnv(
            "Expected a function with a parameter num_envs to return a "
            f"gymnasium.vector.VectorEnv or an embodied.BatchEnv, got {env!r}."
        )
    waiting = [list(seeds) if len(seeds) > 1 else int(seeds[0])]

    def reset() -> tuple[Any, Mapping[str, Any]]:
        seed: Any = waiting.pop() if waiting else None
        return env.reset(seed=seed)

    return VectorGym(env, reset, **without_factory_options(options))
