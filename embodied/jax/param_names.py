"""Flat names of the arrays of a tree, and which arrays to load. Agent process.

Checkpoints store arrays by flat name, such as `enc/cnn0/kernel`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embodied.jax.nets import Array, Tree

logger = logging.getLogger(__name__)

OPT = "opt/"  # Prefix of the flat names of the optimiser's state.
SHOWN = 8  # Names in a message; the others are counted.
_HIDDEN_FIELDS = ("model", "parts")  # Fields that are left out of flat names.


def flat_params(tree: Tree) -> dict[str, Array]:
    """Returns the arrays of a tree by flat name, such as `enc/cnn0/kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {flat_name(path): leaf for path, leaf in leaves}


def with_flat_params(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """Returns the tree with the named arrays replaced; others stay as they are.

    Raises:
      ValueError: the tree does not have a name, or has another shape for it.
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


def apart(tree: Tree, dtype: str) -> Tree:
    """Casts kernels, and hides from compilers that they are used elsewhere, too.

    Compilers join products with the same kernel, for which they copy the inputs of both
    into one array.
    """

    def hide(path: tuple[Any, ...], leaf: Array) -> Array:
        kernel = flat_name(path).endswith("/kernel")
        return jax.lax.optimization_barrier(leaf.astype(dtype)) if kernel else leaf

    return jax.tree_util.tree_map_with_path(hide, tree)


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


def choose_arrays(
    given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], regex: str | None
) -> dict[str, Any]:
    """Returns the arrays to load, by flat name.

    Args:
      given: arrays of the checkpoint, by flat name.
      shapes: shapes of the agent's arrays, by flat name.
      regex: which names to load; see `name_matches`. With a regex, names that only the
        checkpoint or only the agent has are logged; without one they are an error.

    Raises:
      ValueError: shapes differ, names differ, or nothing matches.
    """
    chosen = {name: value for name, value in given.items() if name_matches(regex, name)}
    known = {name: value for name, value in chosen.items() if name in shapes}
    wanted = {name for name in shapes if name_matches(regex, name)}
    absent, unknown = sorted(wanted - set(chosen)), sorted(set(chosen) - set(shapes))
    wrong = [
        f"{name} (expected {shapes[name]}, got {np.shape(value)})"
        for name, value in sorted(known.items())
        if np.shape(value) != shapes[name]
    ]
    problems = _listing(" Other shapes: {}.", wrong)
    if regex is None:
        problems += _listing(" Missing: {}.", absent)
        problems += _listing(" Not in this agent: {}.", unknown)
    if problems:
        # Without a regex, as for a run that continues, the caller adds its own advice.
        advice = (
            " Use the same task and sizes, or leave these names out with "
            "run.from_checkpoint_regex."
        )
        raise ValueError(
            "The arrays to load do not fit this agent."
            f"{problems}{'' if regex is None else advice}"
        )
    if not known:
        raise ValueError(
            "run.from_checkpoint_regex: expected to match names such as "
            f"{min(shapes)!r}, got {regex!r}, which matches none."
        )
    logger.info(
        "Loaded %d of the agent's %d arrays.%s%s%s",
        len(known),
        len(shapes),
        _listing(" Not in what was loaded: {}.", absent),
        _listing(" Not in this agent: {}.", unknown),
        _listing(" Left out: {}.", sorted(set(given) - set(chosen))),
    )
    return known


def name_matches(regex: str | None, name: str) -> bool:
    """Tells whether a regex matches the beginning of a name; None matches all."""
    return regex is None or re.match(regex, name) is not None


def _listing(text: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return text.format(", ".join(names[:SHOWN]) + more)
