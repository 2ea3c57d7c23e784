"""Flat names of the arrays in a tree, as checkpoints use them. Agent process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embodied.jax.nets import Array, Tree

_HIDDEN_FIELDS = ("model", "parts")  # Fields that are no part of flat names.


def flat_params(tree: Tree) -> dict[str, Array]:
    """Returns the arrays of a tree by flat name, such as `enc/cnn0/kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {flat_name(path): leaf for path, leaf in leaves}


def with_flat_params(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """Returns the tree with the named arrays replaced; others stay as they are.

    Raises:
      ValueError: a name that the tree does not have, or another shape than it has.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [flat_name(path) for path, _ in leaves]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(
            f"Expected names of parameters such as {names[0]!r}, got {len(unknown)} "
            f"that do not exist here: {', '.join(unknown[:5])}. The networks or spaces "
            "differ from those of the values."
        )
    wrong = [
        f"{name}: expected shape {leaf.shape}, got {np.shape(values[name])}"
        for name, (_, leaf) in zip(names, leaves)
        if name in values and np.shape(values[name]) != leaf.shape
    ]
    if wrong:
        raise ValueError(
            f"Shapes of {len(wrong)} parameters differ ({'; '.join(wrong[:5])}). "
            "Use the sizes that the values were made with."
        )
    new = [
        jnp.asarray(values[name], leaf.dtype) if name in values else leaf
        for name, (_, leaf) in zip(names, leaves)
    ]
    return jax.tree_util.tree_unflatten(treedef, new)


def cast_matrices(tree: Tree, dtype: str) -> Tree:
    """Casts kernels and biases, as layers do in each step; norms stay float32."""

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        matrix = flat_name(path).endswith(("/kernel", "/bias"))
        return leaf.astype(dtype) if matrix else leaf

    return jax.tree_util.tree_map_with_path(cast, tree)


def flat_name(path: tuple[Any, ...]) -> str:
    """Turns the path of a leaf into its flat name."""
    parts = []
    for entry in path:
        if isinstance(entry, jax.tree_util.GetAttrKey):
            if entry.name not in _HIDDEN_FIELDS:
                parts.append(entry.name)
        elif isinstance(entry, jax.tree_util.DictKey):
            parts.append(str(entry.key))
        elif isinstance(entry, jax.tree_util.SequenceKey):
            parts.append(str(entry.idx))
        else:
            raise TypeError(f"Expected attributes, dicts and tuples, got {entry!r}.")
    return "/".join(parts)
