"""Gymnasium's vector environments as a BatchEnv, in the process that steps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from embodied.base import Array, BatchEnv, Env, Spaces
from embodied.envs.from_gym import make_registered, without_factory_options
from embodied.envs.gym_spaces import GymAdapter
from embodied.envs.keys import UnusableEnv

MODES = {"sync": "sync", "async": "async", "own": "vector_entry_point"}


class VectorGym(GymAdapter, BatchEnv):
    """A vector environment of Gymnasium, or a pool of EnvPool.

    Values are converted as by `FromGym`. The vector environment itself resets those
    that have ended in the following step, which Gymnasium calls NEXT_STEP.

    Args:
      env: the vector environment.
      seed: of the first reset, for all or one for each; None if the vector environment
        has been given one.
      options: options of `GymAdapter`.
    """

    def __init__(self, env: Any, seed: int | list[int] | None = None, **options: Any):
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
        if mode not in (None, gymnasium.vector.AutoresetMode.NEXT_STEP):
            raise UnusableEnv(
                f"Expected a vector environment whose autoreset_mode is NEXT_STEP, got "
                f"{mode} of {env}. Make it with autoreset_mode NEXT_STEP."
            )
        # The spaces of one environment, which are the only ones that EnvPool has.
        obs_space = getattr(env, "single_observation_space", env.observation_space)
        act_space = getattr(env, "single_action_space", env.action_space)
        super().__init__(env, str(env), obs_space, act_space, **options)
        self.gym_env = env
        self._seed = seed
        self._rows = int(env.num_envs)
        self._done = np.ones(self._rows, bool)
        self._begun = False

    def __len__(self) -> int:
        return self._rows

    def step(self, actions: dict[str, Array]) -> dict[str, Array]:
        """Steps all environments, or resets all of them."""
        asked = np.asarray(actions["reset"], bool)
        if not self._begun or np.any(asked & ~self._done):
            options = {} if self._seed is None else {"seed": self._seed}
            obs, info = self.gym_env.reset(**options)
            self._seed, self._begun = None, True
            self._done = np.zeros(self._rows, bool)
            first, zeros = np.ones(self._rows, bool), np.zeros(self._rows)
            return self._observe(obs, info, zeros, first, self._done, self._done)
        obs, reward, terminated, truncated, info = self.gym_env.step(
            self._decode(actions)
        )
        first = self._done
        # A step that resets an environment is not part of the episode before.
        reward = np.where(first, 0, reward)
        terminated = np.asarray(terminated, bool) & ~first
        self._done = (terminated | np.asarray(truncated, bool)) & ~first
        return self._observe(obs, info, reward, first, self._done, terminated)


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
        # A step that resets needs no other action, but a vector takes all of them.
        missing = self.act_space.keys() - action.keys() if action["reset"] else ()
        zeros = {key: np.zeros_like(self.act_space[key].low) for key in missing}
        rows = {key: np.asarray(x)[None] for key, x in {**zeros, **action}.items()}
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
    seed = list(seeds) if len(seeds) > 1 else int(seeds[0])
    return VectorGym(env, seed, **without_factory_options(options))
