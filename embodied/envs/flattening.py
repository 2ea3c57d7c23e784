"""The base of adapters of environments whose spaces are nested, and their arrays.

In the process that steps the environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from embodied.base import Array, Spaces
from embodied.envs.keys import (
    RESERVED,
    RESERVED_PREFIXES,
    SIGNALS,
    UnsupportedSpace,
    UnusableEnv,
)
from embodied.space import Space

Path = tuple[Any, ...]  # Keys and indices that lead to an element of a nested value.


@dataclasses.dataclass(frozen=True)
class SpaceLeaf:
    """One array among the elements of a nested space or spec.

    Attributes:
      key: key in `obs_space` or `act_space`.
      path: where the array is in a nested value.
      space: space of the key.
      source: the corresponding space or spec of the environment.
      start: value of the environment that is 0 in `space`, for all elements or for
        each; None for 0.
      convert: converts values [..., *shape] of the environment to values of `space`;
        None where no more than the shape, the dtype and `start` differ.
      kinds: kinds of dtypes that the environment's values may have.
      plain: whether a single action is a number, by which environments may look things
        up, and not an array of shape ().
    """

    key: str
    path: Path
    space: Space
    source: Any
    start: np.int64 | np.ndarray | None = None
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    kinds: str = "biuf"
    plain: bool = False

    def encode(self, nested: Any) -> np.ndarray:
        """Converts this leaf's element [..., *shape] of a nested observation.

        Returns a copy, since the element may be the environment's buffer. A value that
        does not fit is returned unconverted, for CheckSpaces to report.
        """
        array = np.array(self._find(nested))
        shape = self.source.shape or ()
        dims = array.ndim - len(shape)
        if array.dtype.kind not in self.kinds or array.shape[dims:] != shape:
            return array
        if self.convert is not None:
            return self.convert(array)
        value = array if self.start is None else array - self.start
        if value.dtype != self.space.dtype:
            with np.errstate(over="ignore", invalid="ignore"):
                cast = value.astype(self.space.dtype)
            if self.space.discrete and not np.array_equal(cast, value):
                return array
            value = cast
        if shape != self.space.shape:
            value = value.reshape((*value.shape[:dims], *self.space.shape))
        return value

    def decode(self, value: Array) -> Any:
        """Converts a value of `space` to one of the environment."""
        array = np.asarray(value)
        if self.start is not None:
            array = array.astype(np.int64) + self.start
        array = np.asarray(array, self.source.dtype)
        return array[()] if self.plain else array

    def _find(self, nested: Any) -> Any:
        element = nested
        for part in self.path:
            try:
                element = element[part]
            except (KeyError, IndexError, TypeError) as error:
                raise UnusableEnv(
                    f"Expected {self.source} at {self.key!r} of an observation, as "
                    f"its space declares, got no {part!r} in {element!r}."
                ) from error
        return element


class Flattened:
    """An environment whose nested spaces become spaces by key; a base of adapters.

    Args:
      env: the environment, which `close` closes, if it can be closed.
      name: its name, for messages.
      obs_leaves: leaves of its observations.
      act_leaves: leaves of its actions, in the order of `flatten`.
      act_space: nested space of its actions.
    """

    def __init__(
        self,
        env: Any,
        name: str,
        obs_leaves: Sequence[SpaceLeaf],
        act_leaves: Sequence[SpaceLeaf],
        act_space: Any,
    ):
        _check_keys(name, obs_leaves, act_leaves)
        self._obs_leaves = obs_leaves
        self._act_leaves = act_leaves
        self._nested_act_space = act_space
        self._open: Any = env

    @property
    def obs_space(self) -> Spaces:
        """The flattened observations."""
        return {**{leaf.key: leaf.space for leaf in self._obs_leaves}, **SIGNALS}

    @property
    def act_space(self) -> Spaces:
        """The flattened actions."""
        leaves = {leaf.key: leaf.space for leaf in self._act_leaves}
        return {"reset": Space(bool), **leaves}

    def close(self) -> None:
        """Closes the environment."""
        env, self._open = self._open, None
        close = getattr(env, "close", None)
        if close is not None:
            close()

    def _encode(self, nested: Any) -> dict[str, Array]:
        """Converts a nested observation, or one of several environments."""
        return {leaf.key: leaf.encode(nested) for leaf in self._obs_leaves}

    def _decode(self, action: dict[str, Array]) -> Any:
        """Returns the nested action of the environment."""
        values = (leaf.decode(action[leaf.key]) for leaf in self._act_leaves)
        return _unflatten(self._nested_act_space, values)


def array_leaf(
    key: str,
    path: Path,
    source: Any,
    low: Any,
    high: Any,
    acts: bool,
    plain: bool = False,
    classes: bool = False,
) -> SpaceLeaf:
    """Makes the leaf of an array of numbers.

    Args:
      key: see `SpaceLeaf`, as for `path` and `source`.
      path: as there.
      source: as there.
      low: lowest values; of floats, None if they have no bounds.
      high: highest values, inclusive.
      acts: whether it is an action.
      plain: see `SpaceLeaf`.
      classes: whether all actions but floats become classes from 0 on, in int32.
    """
    dtype, shape = np.dtype(source.dtype), source.shape
    if dtype.kind == "f":
        bounds = (low, high) if acts else (None, None)
        return SpaceLeaf(key, path, Space(dtype, shape, *bounds), source)
    if dtype.kind == "b" and not classes:
        return SpaceLeaf(key, path, Space(dtype, shape), source, plain=plain)
    wide = np.uint64 if dtype == np.uint64 else np.int64
    low, high = (np.broadcast_to(x, shape).astype(wide) for x in (low, high))
    spread = high.astype(object) - low.astype(object)
    # Actions are classes, and an observation of -1 would mean that it is missing.
    shift = classes or (np.any(low) and (acts or dtype.kind == "i"))
    if shift and np.all(spread < np.iinfo(np.int32).max):
        start = low.astype(np.int64)
        return SpaceLeaf(key, path, class_space(spread + 1), source, start, plain=plain)
    # Highs are inclusive here and exclusive in Space, where a 64-bit maximum admits
    # itself.
    high = np.minimum(high, np.iinfo(wide).max - 1) + wide(1)
    return SpaceLeaf(key, path, Space(dtype, shape, low, high), source, plain=plain)


def class_space(number: Any) -> Space:
    """Returns the space of integers from 0 to below `number`, per element."""
    number = np.asarray(number).astype(np.int64)
    if np.any(number > np.iinfo(np.int32).max):
        raise ValueError(f"expected classes that fit int32, got {number.max()}.")
    return Space(np.int32, number.shape, 0, number)


def flatten(space: Any, key: str) -> Iterator[tuple[str, Path, Any]]:
    """Yields key, path and leaf of every element of a nested space or spec.

    Keys are the parts of the path, joined with slashes; `key` comes first where the
    outermost space is not a mapping.
    """
    root = () if isinstance(space, Mapping) else (key,)
    for path, leaf in _walk(space, ()):
        yield "/".join((*root, *map(str, path))), path, leaf


def _walk(space: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(space, Mapping):
        children: Iterable[tuple[Any, Any]] = space.items()
    elif isinstance(space, Sequence):
        children = enumerate(space)
    else:
        yield path, space
        return
    for part, child in children:
        yield from _walk(child, (*path, part))


def _unflatten(space: Any, values: Iterator[Any]) -> Any:
    """Builds a nested value of `space` from its leaves, in the order of `flatten`."""
    if isinstance(space, Mapping):
        return {part: _unflatten(child, values) for part, child in space.items()}
    if isinstance(space, Sequence):
        children = [_unflatten(child, values) for child in space]
        return children if isinstance(space, list) else tuple(children)
    return next(values)


def _check_keys(
    name: str, obs_leaves: Iterable[SpaceLeaf], act_leaves: Iterable[SpaceLeaf]
) -> None:
    """Raises UnsupportedSpace unless all keys are free and unique."""
    taken: set[str] = set()
    for kind, leaves in (("observation", obs_leaves), ("action", act_leaves)):
        for leaf in leaves:
            key = leaf.key
            if key in RESERVED or key.startswith(RESERVED_PREFIXES):
                problem = "is reserved"
            elif key in taken:
                problem = "occurs twice"
            else:
                taken.add(key)
                continue
            raise UnsupportedSpace(
                f"Expected {kind} keys of env {name} that are free and unique, got "
                f"{key!r}, which {problem}. Choose another obs_key or act_key, or "
                "rename it in the environment or with a wrapper."
            )
