"""Observations and actions as network inputs, missing ones included. Agent process."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from embodied.jax.nets import Array, f32
from embodied.space import Space

MOST_CLASSES = 2**16  # Beyond this an integer is a number, not a category.


def classes(space: Space, key: str) -> int:
    """Number of classes of a discrete space: the most that one of its elements has."""
    most = int(np.max(space.classes))
    if most > MOST_CLASSES:
        raise ValueError(
            f"{key!r} expected at most {MOST_CLASSES} classes for each element, got "
            f"{space}. Give the space its bounds, or convert it to float32."
        )
    return most


def class_counts(space: Space) -> np.ndarray | None:
    """Number of classes of each element, in the space's shape; None if all agree."""
    counts = np.asarray(space.classes)
    return None if np.all(counts == counts.flat[0]) else counts


def vector_size(space: Space, key: str) -> int:
    """Length of the vector that `encode` makes of a value."""
    size = math.prod(space.shape)
    return size * classes(space, key) if space.discrete else size


def present(space: Space, value: Array) -> Array:
    """Mask of values without a missing element: [..., *space.shape] to [...] bool.

    An element is missing if it is a float that is not finite (-inf by convention; NaN
    would otherwise spoil the weights), or -1 in signed integers whose space does not
    contain it.
    """
    lead = value.shape[: value.ndim - len(space.shape)]
    axes = tuple(range(len(lead), value.ndim))
    if space.dtype.kind == "f":
        return jnp.isfinite(value).all(axes)
    if space.dtype.kind == "i" and np.all(np.asarray(space.low) > -1):
        return (value != -1).all(axes)
    return jnp.ones(lead, bool)


def class_index(space: Space, value: Array) -> Array:
    """Turns discrete values into indices that start at 0, int32."""
    index = value.astype(jnp.int32)
    if space.dtype.kind == "b":
        return index
    return index - jnp.asarray(space.low, jnp.int32)


def class_value(space: Space, index: Array) -> Array:
    """Inverse of `class_index`, in the dtype of the space."""
    if space.dtype.kind == "b":
        return index.astype(bool)
    return (index + jnp.asarray(space.low, jnp.int32)).astype(jax_dtype(space))


def jax_dtype(space: Space) -> np.dtype:
    """The dtype of values in JAX, which by default has no 64-bit types."""
    return np.dtype(jax.dtypes.canonicalize_dtype(space.dtype))


def encode(space: Space, key: str, value: Array) -> Array:
    """Flattens a value to a float32 vector; discrete ones become one-hots.

    Missing values become zeros.

    Args:
      value: [..., *space.shape], of the dtype of the space.

    Returns:
      [..., vector_size] float32.
    """
    there = present(space, value)
    lead = there.shape
    if space.discrete:
        index = class_index(space, value)
        vector = jax.nn.one_hot(index, classes(space, key), dtype=jnp.float32)
    else:
        vector = f32(value)
    vector = vector.reshape((*lead, -1))
    # Selected, not multiplied, since zero times infinity is not zero.
    return jnp.where(there[..., None], vector, 0)
