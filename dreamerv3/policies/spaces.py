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


def spaces_to_tree(spaces: Mapping[str, Any]) -> Tree:
    """Describes spaces as plain values, which a checkpoint can hold."""
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


def spaces_from_tree(tree: Tree) -> Spaces:
    """Returns the spaces that `spaces_to_tree` described."""
    return {key: Space(**description) for key, description in tree.items()}


def _short(bound: np.ndarray | None) -> np.ndarray | None:
    """Returns one number if all elements are the same, as in images; else the bound."""
    if bound is None or not np.all(bound == bound.flat[0]):
        return bound
    return np.asarray(bound.flat[0])
