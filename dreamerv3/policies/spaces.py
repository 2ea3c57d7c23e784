"""Spaces as plain values, for checkpoints. Any process.

Checkpoints carry the spaces of their agent, so that it can be used where the
environments that it was trained in are not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied.base import Spaces, Tree
from embodied.space import Space


def spaces_to_tree(obs_space: Mapping[str, Any], act_space: Mapping[str, Any]) -> Tree:
    """Describes an agent's spaces as plain values, which a checkpoint can hold."""
    return {"obs": _describe(obs_space), "act": _describe(act_space)}


def spaces_from_tree(tree: Tree) -> tuple[Spaces, Spaces]:
    """Returns the spaces that `spaces_to_tree` described; also takes them from JSON."""
    obs, act = (
        {key: _make(**description) for key, description in tree[part].items()}
        for part in ("obs", "act")
    )
    return obs, act


def _describe(spaces: Mapping[str, Any]) -> Tree:
    tree = {}
    for key, space in spaces.items():
        space = Space.of(space)
        tree[key] = {
            "dtype": space.dtype.name,
            "shape": space.shape,
            "low": _short(space.low),
            "high": _short(space.high),
        }
    return tree


def _make(dtype: str, shape: Any, low: Any, high: Any) -> Space:
    if np.dtype(dtype).kind == "f":  # Infinities are text in JSON.
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    return Space(dtype, tuple(shape), low, high)


def _short(bound: np.ndarray | None) -> np.ndarray | None:
    """Returns one number if all elements are the same, as in images; else the bound."""
    if bound is None or not np.all(bound == bound.flat[0]):
        return bound
    return np.asarray(bound.flat[0])
