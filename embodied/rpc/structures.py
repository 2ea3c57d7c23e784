"""Nested data as a header and arrays, and where arrays lie in a message. Any process.

A header is msgpack of a method's name and the data. In place of an array it has the
array's dtype and shape; tuples are marked, to be told from lists. Whatever comes from
another process is checked before anything is made of it: depth, number of arrays,
dtypes (an allow-list) and shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np

MAX_ARRAYS = 4096
MAX_DEPTH = 16
MAX_ARRAY_BYTES = 1 << 48
ALIGN = 64

_ARRAY_OF: Any = np.ndarray
_ARRAY, _TUPLE = 1, 2  # Extension types of msgpack.
_BASES: tuple[Any, ...] = (dict, list, int, float, str, bytes)
_PLAIN_TYPES = {type(None), bool, int, float, str, bytes}
_PLAIN_DTYPE = re.compile(
    r"[<>|=]?(\?|[biufc]\d{1,2}|[SU][1-9]\d{0,8}|[mM]8(\[\d*\w+\])?)"
)
_EXTENDED_DTYPES = {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_EXTENDED_NAMES = {dtype: name for name, dtype in _EXTENDED_DTYPES.items()}


class WireError(ValueError):
    """A message that cannot be sent, or one that came and cannot be understood."""


class ArrayType(NamedTuple):
    """Dtype and shape of an array, which stand for it in nested data."""

    dtype: np.dtype
    shape: tuple[int, ...]


class Leaf(NamedTuple):
    """One array of a message, and where it lies."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # From the start of the payload, a multiple of 64.
    nbytes: int


class Spec:
    """A checked header: the method's name, the data, and the layout of its arrays.

    The data are the arguments of a call, or one result.

    Attributes:
      method: name of the method; empty for replies.
      tree: the list of the data, with an `ArrayType` for each array.
      encoded: the header in bytes.
      leaves: the arrays, in their order.
      nbytes: of the payload, each array padded.
      room: size of a block of memory for the payload.
      plain: whether there are values beside arrays.
    """

    def __init__(self, encoded: bytes):
        match _unpack(encoded, 0):
            case [str() as method, *tree]:
                self.method, self.tree = method, tree
            case _:
                raise WireError("a header is not a method's name and its data")
        self.encoded = encoded
        self.leaves: list[Leaf] = []
        self.plain = False
        self.nbytes = 0
        for node in _terminal_nodes(tree, 0):
            if type(node) is not ArrayType:
                self.plain = True
                continue
            nbytes = math.prod(node.shape) * node.dtype.itemsize
            self.leaves.append(Leaf(*node, self.nbytes, nbytes))
            self.nbytes += -(-nbytes // ALIGN) * ALIGN
            if len(self.leaves) > MAX_ARRAYS:
                raise WireError(f"there are more than {MAX_ARRAYS} arrays")
        self.room = block_bytes(self.nbytes)
        self._dtypes = [leaf.dtype for leaf in self.leaves]
        self._shapes = [leaf.shape for leaf in self.leaves]
        self._offsets: tuple[int, list[int]] = (-1, [])  # From a start on.
        # Of the commonest data, one dict of arrays, which is quick to put together.
        self._names: list[str] | None = None
        match tree:
            case [dict() as only] if all(type(x) is ArrayType for x in only.values()):
                self._names = list(only)

    def build(self, buffer: Any, start: int = 0) -> list:
        """Returns the data, its arrays as views of a payload, which they keep alive."""
        return self.combine(self.views(buffer, start))

    def views(self, buffer: Any, start: int = 0) -> list[np.ndarray]:
        """Returns the arrays of a payload as views of a buffer.

        Args:
          buffer: which they keep alive.
          start: first byte of the payload.
        """
        before, offsets = self._offsets
        if start != before:  # It mostly is the same.
            offsets = [start + x.offset if x.nbytes else 0 for x in self.leaves]
            self._offsets = start, offsets
        # A loop in C: this runs for every call.
        buffers = itertools.repeat(buffer)
        return list(map(_ARRAY_OF, self._shapes, self._dtypes, buffers, offsets))

    def combine(self, arrays: list[np.ndarray]) -> list:
        """Returns the data with these arrays."""
        if self._names is not None:
            return [dict(zip(self._names, arrays))]
        remaining = iter(arrays)
        return map_arrays(lambda _: next(remaining), self.tree)


def flatten(method: str, tree: Iterable) -> tuple[bytes, list[np.ndarray]]:
    """Returns the header of a list of data, not checked yet, and its arrays.

    Raises:
      WireError: the data cannot be sent.
    """
    arrays: list[np.ndarray] = []
    return _pack([method, *tree], arrays), arrays


def check_schema(schema: dict, spec: Spec, rows: int) -> None:
    """Checks the only argument of a call, a dict, against {key: (dtype, shape)}.

    Raises:
      WireError: which key, what was expected, what came.
    """
    match spec.tree:
        case [dict() as data]:
            pass
        case _:
            raise WireError("expected one argument, a dict")
    missing, surplus = sorted(set(schema) - set(data)), sorted(set(data) - set(schema))
    if missing or surplus:
        raise WireError(f"missing keys {missing}, surplus keys {surplus}")
    for key, (dtype, shape) in schema.items():
        expected = ArrayType(np.dtype(dtype), (rows, *shape) if rows else tuple(shape))
        if data[key] != expected:
            texts = [
                f"{x.dtype.name} of shape {x.shape}"
                if type(x) is ArrayType
                else "no array"
                for x in (expected, data[key])
            ]
            raise WireError(f"key '{key}': expected {texts[0]}, got {texts[1]}")


def map_arrays(function: Callable[[ArrayType], Any], tree: Any) -> Any:
    """Replaces the `ArrayType`s of nested data by what a function returns for them."""
    kind = type(tree)
    if kind is ArrayType:
        return function(tree)
    if kind is dict:
        return {key: map_arrays(function, child) for key, child in tree.items()}
    if kind is list or kind is tuple:
        return kind(map_arrays(function, child) for child in tree)
    return tree


def block_bytes(nbytes: int) -> int:
    """Returns the size of a block of memory for so many bytes: a power of two."""
    return 1 << max(12, (nbytes - 1).bit_length())


def as_bytes(array: np.ndarray) -> Any:
    """Returns an array's bytes, without a copy if it is large and contiguous."""
    if array.nbytes < 1024:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _pack(tree: Any, arrays: list[np.ndarray]) -> bytes:
    def extend(node: Any) -> Any:
        """Encodes what msgpack does not know."""
        if isinstance(node, np.ndarray | np.generic):
            arrays.append(np.asarray(node))
            return _array_type(node.dtype, node.shape)
        if type(node) is ArrayType:
            return _array_type(*node)
        if isinstance(node, tuple):
            return msgpack.ExtType(_TUPLE, _pack(list(node), arrays))
        for kind in _BASES:
            if isinstance(node, kind):
                return kind(node)
        raise WireError(
            f"values of type {type(node).__name__} cannot be sent; NumPy arrays, "
            "numbers, strings, bytes, None and dicts, lists and tuples of them can"
        )

    try:
        return msgpack.packb(tree, default=extend, strict_types=True)
    except WireError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        # Integers above 64 bits, strings that are not Unicode, lists without end.
        raise WireError(f"a value cannot be sent: {error}") from None


def _unpack(data: bytes, depth: int) -> Any:
    def extend(code: int, content: bytes) -> Any:
        if code == _TUPLE and depth < MAX_DEPTH:
            return tuple(_unpack(content, depth + 1))
        if code == _ARRAY:
            return _check_array(*msgpack.unpackb(content))
        raise WireError(f"nested deeper than {MAX_DEPTH} levels, or of no known type")

    try:
        return msgpack.unpackb(data, ext_hook=extend, strict_map_key=False)
    except WireError:
        raise
    except Exception as error:
        # msgpack raises a dozen types for bad bytes, and each means the same here.
        raise WireError(f"the header is not valid: {type(error).__name__}") from None


def _terminal_nodes(tree: Any, depth: int) -> Iterator[Any]:
    """Returns the arrays and plain values of nested data, which it checks."""
    kind = type(tree)
    if kind is ArrayType or kind in _PLAIN_TYPES:
        yield tree
    elif depth > MAX_DEPTH:
        raise WireError(f"data is nested deeper than {MAX_DEPTH} levels")
    elif kind is dict:
        for key, child in tree.items():
            if type(key) is not str:
                raise WireError(f"dict keys must be strings, got {list(tree)[:5]}")
            yield from _terminal_nodes(child, depth + 1)
    elif kind is list or kind is tuple:
        for child in tree:
            yield from _terminal_nodes(child, depth + 1)
    else:
        raise WireError(f"a value of type {kind.__name__} is not allowed")


@functools.lru_cache(1024)
def _array_type(dtype: np.dtype, shape: tuple[int, ...]) -> msgpack.ExtType:
    name = _EXTENDED_NAMES.get(dtype, dtype.str)
    if name == dtype.str and dtype.kind not in "biufcSUmM":
        raise WireError(
            f"dtype {dtype} cannot be sent; numbers, fixed-size strings and times can"
        )
    return msgpack.ExtType(_ARRAY, msgpack.packb((name, shape)))


def _check_array(name: Any, shape: Any) -> ArrayType:
    if type(name) is not str or type(shape) is not list or len(shape) > 32:
        raise WireError("an array is not a dtype and a shape of at most 32 sizes")
    if any(type(size) is not int or size < 0 for size in shape):
        raise WireError("a shape is not a list of sizes")
    dtype = _EXTENDED_DTYPES.get(name)
    try:
        if dtype is None and _PLAIN_DTYPE.fullmatch(name):
            dtype = np.dtype(name)
    except (TypeError, ValueError):
        pass
    if dtype is None:
        raise WireError(f"dtype {name[:40]!r} is not allowed")
    # NumPy refuses some empty arrays for their other dimensions.
    if math.prod(max(1, size) for size in shape) * dtype.itemsize > MAX_ARRAY_BYTES:
        raise WireError(f"an array of shape {tuple(shape)} is too large")
    return ArrayType(dtype, tuple(shape))
