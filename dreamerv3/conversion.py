"""Converts actions for environments without our wrappers. Any process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied import wrappers
from embodied.base import Array, Env, Spaces
from embodied.space import Space


class ActionConverter:
    """Converts actions as our wrappers of environments do.

    Args:
      inner: spaces of the agent.
      outer: spaces of the environment without wrappers. Discrete ones, and those of
        other keys, are ignored.

    Raises:
      ValueError: a continuous action has no space, or one that does not fit.
    """

    def __init__(self, inner: Spaces, outer: Mapping[str, Any]):
        self._keys = [key for key, space in inner.items() if not space.discrete]
        missing = [key for key in self._keys if key not in outer]
        if missing:
            raise ValueError(
                f"act_space expected the spaces of {', '.join(self._keys)}, got "
                f"{', '.join(outer) or 'none'}: {', '.join(missing)} is missing."
            )
        spaces = {key: Space.of(outer[key]) for key in self._keys}
        env: Env = _Echo(spaces)
        for key in self._keys:
            env = wrappers.NormalizeAction(env, key)
        env = wrappers.UnifyDtypes(env)
        for key in self._keys:
            env = wrappers.ClipAction(env, key)
            if env.act_space[key].shape != inner[key].shape:
                raise ValueError(
                    f"act_space expected {key!r} of shape {inner[key].shape}, as the "
                    f"agent was trained with, got {spaces[key]}."
                )
        self.spaces = {**inner, **spaces}
        self._env = env

    def __call__(self, actions: Mapping[str, Array]) -> dict[str, Array]:
        """Converts actions [B, ...]."""
        rows = len(next(iter(actions.values())))
        converted = [
            self._env.step({key: actions[key][row] for key in self._keys})
            for row in range(rows)
        ]
        changed = {key: np.stack([row[key] for row in converted]) for key in self._keys}
        return {**actions, **changed}


class _Echo(Env):
    """Returns actions as observations, to see what wrappers make of them."""

    def __init__(self, act_space: Spaces):
        self._act_space = act_space

    @property
    def obs_space(self) -> Spaces:
        """None, so that nothing is done to what is returned."""
        return {}

    @property
    def act_space(self) -> Spaces:
        """As given."""
        return dict(self._act_space)

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Returns the action."""
        return action
