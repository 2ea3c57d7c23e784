"""Converts actions for environments without our wrappers. Any process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import elements
import numpy as np

from embodied import wrappers
from embodied.base import Array, Env, Spaces
from embodied.space import Space


class ActionConverter:
    """Converts actions as our wrappers of environments do.

    Args:
      inner: spaces of the agent.
      outer: spaces of the environment without wrappers. Those of discrete actions may
        be left out.

    Raises:
      ValueError: a continuous action has no space, or a space does not fit.
    """

    def __init__(self, inner: Spaces, outer: Mapping[str, Any]):
        _check(inner, outer)
        self._keys = [key for key, space in inner.items() if not space.discrete]
        missing = [key for key in self._keys if key not in outer]
        if missing:
            raise ValueError(
                f"act_space expected the spaces of {', '.join(self._keys)}, got "
                f"{', '.join(outer) or 'none'}: {', '.join(missing)} is missing."
            )
        spaces = {key: _continuous(key, outer[key]) for key in self._keys}
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


def _check(inner: Spaces, outer: Mapping[str, Any]) -> None:
    """Raises an error if spaces are not those of the actions of an agent."""
    if not isinstance(outer, Mapping):
        example = f"{{{next(iter(inner))!r}: env.action_space}}"
        raise ValueError(
            f"act_space expected a dict of spaces by key, such as {example}, got "
            f"{outer!r}."
        )
    unknown = [key for key in outer if key not in inner and key != "reset"]
    if unknown:
        raise ValueError(
            f"act_space expected keys of the agent's actions, {', '.join(inner)}, got "
            f"{', '.join(map(repr, unknown))}."
        )
    for key, space in inner.items():
        if space.discrete and key in outer:
            found = _classes(outer[key])
            if not np.array_equal(found, space.classes):
                raise ValueError(
                    f"act_space expected {key!r} with {space.classes} classes, as the "
                    f"agent was trained with, got {outer[key]!r}."
                )


def _classes(space: Any) -> Any:
    """Returns numbers of classes like `Space.classes`; None where there are none."""
    shape = getattr(space, "shape", None)
    if isinstance(space, Space | elements.Space):
        return space.classes if space.discrete else None
    if hasattr(space, "nvec"):  # Gymnasium's MultiDiscrete.
        return space.nvec
    if hasattr(space, "n"):  # Its Discrete and, with any shape, MultiBinary.
        return np.full(shape, 2) if shape else int(space.n)
    if hasattr(space, "high") and np.dtype(space.dtype).kind in "iu":  # Its Box.
        return space.high.astype(object) - space.low.astype(object) + 1
    return None


def _continuous(key: str, space: Any) -> Space:
    try:
        found = Space.of(space)
    except (TypeError, ValueError):
        found = None
    if found is None or found.discrete:
        raise ValueError(
            f"act_space expected {key!r} as a space of floats, such as a Box of "
            f"Gymnasium, got {space!r}."
        )
    return found


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
