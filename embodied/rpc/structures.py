"""Nested data as structure, arrays and plain values, and its checks. Any process.

A structure is a nested tuple: ('a', dtype, shape) for an array, ('v',) for a plain
value, ('d', keys, children), ('l', children) and ('t', children). One that came from
another process is checked before anything is made of it: counts, depth, dtypes (an
allow-list) and shapes.

A `Spec` adds where the arrays lie in the payload of a message: at multiples of 64
bytes, whether in a frame or in shared memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np

MAX_LEAVES = 4096
MAX_DEPTH = 16
MAX_ARRAY_BYTES = 1 << 48
ALIGN = 64

_VALUE = ("v",)
_PLAIN_DTYPE = re.compile(
    r"[<>|=]?(\?|[biufc]\d{1,2}|[SU][1-9]\d{0,8}|[mM]8(\[\d*\w+\])?)"
)
_EXTENDED_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int4",
        "uint4",
    )
}
_EXTENDED_NAMES = {dtype: name for name, dtype in _EXTENDED_DTYPES.items()}


class WireError(ValueError):
    """A message that cannot be sent, or one that came and cannot be understood."""


def flatten(tree: Any) -> tuple[tuple, list[np.ndarray], list]:
    """Splits nested data into structure, arrays and plain values, in one order."""
    arrays: list[np.ndarray] = []
    values: list = []
    structure = _flatten(tree, arrays, values, 0)
    return structure, arrays, values


def unflatten(structure: tuple, arrays: list, values: Sequence[Any]) -> Any:
    """Puts together what `flatten` took apart."""
    remaining = iter(values)
    try:
        tree = _unflatten(structure, iter(arrays), remaining)
    except StopIteration:
        raise WireError("fewer values came than the structure has") from None
    if next(remaining, _VALUE) is not _VALUE:
        raise WireError("more values came than the structure has")
    return tree


def check_schema(schema: dict, structure: tuple, rows: int) -> None:
    """Checks the first argument of a call against {key: (dtype, shape)}.

    Raises:
      WireError: which key, what was expected, what came.
    """
    children: tuple = structure[1] if structure[0] == "t" else ()
    if len(children) != 1 or children[0][0] != "d":
        raise WireError("expected one argument, a dict")
    _, keys, leaves = children[0]
    if set(keys) != set(schema):
        missing = sorted(set(schema) - set(keys))
        surplus = sorted(set(keys) - set(schema))
        raise WireError(f"missing keys {missing}, surplus keys {surplus}")
    for key, leaf in zip(keys, leaves):
        dtype, shape = schema[key]
        expected = (rows, *shape) if rows else tuple(shape)
        came = (leaf[1], tuple(leaf[2])) if leaf[0] == "a" else ("a plain value", ())
        if came != (dtype_name(np.dtype(dtype)), expected):
            raise WireError(
                f"key '{key}': expected {np.dtype(dtype).name} of shape {expected}, "
                f"got {came[0]} of shape {came[1]}"
            )


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype on the wire."""
    if dtype in _EXTENDED_NAMES:
        return _EXTENDED_NAMES[dtype]
    if dtype.kind in "biufcSUmM":
        return dtype.str
    raise WireError(
        f"dtype {dtype} cannot be sent; numbers, fixed-size strings and times can"
    )


def array_leaves(structure: tuple) -> Iterator[tuple[np.dtype, tuple[int, ...]]]:
    """The dtypes and shapes of the arrays of a structure, in their order."""
    if structure[0] == "a":
        yield _parse_dtype(structure[1]), structure[2]
    elif structure[0] != "v":
        for child in structure[-1]:
            yield from array_leaves(child)


def check_structure(node: Any, depth: int, budget: list[int]) -> tuple:
    """Returns a structure that came out of msgpack, if it is one.

    Args:
      node: the structure.
      depth: how deep it is nested.
      budget: how many nodes it may have; they are taken off.
    """
    budget[0] -= 1
    if budget[0] < 0:
        raise WireError(f"the structure has more than {MAX_LEAVES} nodes")
    if depth > MAX_DEPTH:
        raise WireError(f"the structure is nested deeper than {MAX_DEPTH} levels")
    match node:
        case ["v"]:
            return _VALUE
        case ["a", str() as name, list() as shape]:
            if len(shape) > 32 or any(type(x) is not int or x < 0 for x in shape):
                raise WireError("a shape is not a list of at most 32 sizes")
            # NumPy refuses some empty arrays for their other dimensions.
            whole = math.prod(max(1, size) for size in shape)
            if whole * _parse_dtype(name).itemsize > MAX_ARRAY_BYTES:
                raise WireError(f"an array of shape {tuple(shape)} is too large")
            return ("a", name, tuple(shape))
        case ["d", list() as keys, list() as children]:
            if len(keys) != len(children) or not all(type(x) is str for x in keys):
                raise WireError("a dict's keys are not strings, one for each child")
            if len(set(keys)) != len(keys):
                raise WireError("a dict has the same key twice")
            checked = [check_structure(x, depth + 1, budget) for x in children]
            return ("d", tuple(keys), tuple(checked))
        case ["l" | "t" as kind, list() as children]:
            checked = [check_structure(x, depth + 1, budget) for x in children]
            return (kind, tuple(checked))
    raise WireError("the structure has a node of no known kind")


def as_lists(structure: Any) -> Any:
    """A structure as it comes out of msgpack."""
    if isinstance(structure, tuple):
        return [as_lists(node) for node in structure]
    return structure


def pack(data: Any) -> bytes:
    """Encodes plain data."""
    try:
        return msgpack.packb(data)
    except UnicodeEncodeError as error:
        raise WireError(f"a string cannot be sent: {error}") from None


def unpack(data: Any) -> Any:
    """Decodes plain data of an unknown sender."""
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_ext_len=0, use_list=True
        )
    except Exception as error:
        # msgpack raises a dozen types for bad bytes, and each means the same here.
        raise WireError(f"the header is not valid: {type(error).__name__}") from None


def _flatten(tree: Any, arrays: list, values: list, depth: int) -> tuple:
    if isinstance(tree, np.ndarray):
        arrays.append(tree)
        return ("a", dtype_name(tree.dtype), tree.shape)
    if isinstance(tree, np.generic):
        arrays.append(np.asarray(tree))
        return ("a", dtype_name(tree.dtype), ())
    if depth > MAX_DEPTH:
        raise WireError(f"data is nested deeper than {MAX_DEPTH} levels")
    if isinstance(tree, dict):
        for key in tree:
            if type(key) is not str:
                raise WireError(f"dict keys must be strings, got {list(tree)[:5]}")
        children = [_flatten(x, arrays, values, depth + 1) for x in tree.values()]
        return ("d", tuple(tree), tuple(children))
    if isinstance(tree, tuple | list):
        children = [_flatten(x, arrays, values, depth + 1) for x in tree]
        return ("t" if isinstance(tree, tuple) else "l", tuple(children))
    if tree is None or isinstance(tree, bool | int | float | str | bytes):
        if isinstance(tree, int) and not -(1 << 63) <= tree < 1 << 64:
            raise WireError(f"integer {tree} does not fit 64 bits")
        values.append(tree)
        return _VALUE
    raise WireError(
        f"values of type {type(tree).__name__} cannot be sent; NumPy arrays, numbers, "
        "strings, bytes, None and dicts, lists and tuples of them can"
    )


def _unflatten(structure: tuple, arrays: Iterator, values: Iterator) -> Any:
    kind = structure[0]
    if kind == "a":
        return next(arrays)
    if kind == "v":
        return next(values)
    children = [_unflatten(child, arrays, values) for child in structure[-1]]
    if kind == "d":
        return dict(zip(structure[1], children))
    return tuple(children) if kind == "t" else children


def _parse_dtype(name: str) -> np.dtype:
    if name in _EXTENDED_DTYPES:
        return _EXTENDED_DTYPES[name]
    if not _PLAIN_DTYPE.fullmatch(name):
        raise WireError(f"dtype {name[:40]!r} is not allowed")
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        raise WireError(f"dtype {name[:40]!r} is not known") from None


class Leaf(NamedTuple):
    """Where one array of a message lies."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # From the start of the payload.
    nbytes: int


class Spec:
    """Method, structure, dtypes and shapes of a message, and its payload's layout.

    The structure is one of those above.
    """

    __slots__ = (
        "_named",
        "encoded",
        "leaves",
        "method",
        "nbytes",
        "room",
        "row",
        "structure",
    )

    def __init__(self, method: str, structure: tuple, encoded: bytes):
        self.method = method
        self.structure = structure
        self.encoded = encoded
        self.row: tuple | None = None  # Of a stack, once it was asked for.
        self.leaves: list[Leaf] = []
        offset = 0
        for dtype, shape in array_leaves(structure):
            nbytes = math.prod(shape) * dtype.itemsize
            self.leaves.append(Leaf(dtype, shape, offset, nbytes))
            offset += -(-nbytes // ALIGN) * ALIGN
        self.nbytes = offset  # Of the payload, each array padded.
        self.room = block_bytes(offset)
        # Of the commonest structure, a dict of arrays, which is quick to build.
        self._named: list[tuple] | None = None
        flat = structure[0] == "d" and all(child[0] == "a" for child in structure[2])
        if flat and all(leaf.nbytes for leaf in self.leaves):
            self._named = list(zip(structure[1], self.leaves))

    def build(self, buffer: Any, start: int, values: Sequence[Any]) -> Any:
        """Puts the arrays of a payload and plain values together again."""
        if self._named is None or values:
            arrays = payload_arrays(self, buffer, start)
            return unflatten(self.structure, arrays, values)
        return {
            key: np.ndarray(shape, dtype, buffer, start + offset)
            for key, (dtype, shape, offset, _) in self._named
        }


def block_bytes(nbytes: int) -> int:
    """The size of a block of memory that so many bytes fit in: a power of two."""
    return 1 << max(12, (nbytes - 1).bit_length())


def payload_arrays(spec: Spec, buffer: Any, start: int = 0) -> list[np.ndarray]:
    """Returns the arrays of a payload as views of `buffer`, which they keep alive."""
    return [
        np.ndarray(shape, dtype, buffer, start + offset)
        if nbytes
        else np.empty(shape, dtype)
        for dtype, shape, offset, nbytes in spec.leaves
    ]


def payload_slices(spec: Spec, buffer: Any, start: int = 0) -> list[memoryview]:
    """Returns the bytes of each array of a payload, empty ones left out."""
    view = memoryview(buffer)
    return [
        view[start + leaf.offset : start + leaf.offset + leaf.nbytes]
        for leaf in spec.leaves
        if leaf.nbytes
    ]


def as_bytes(array: np.ndarray) -> Any:
    """Returns an array's bytes, without a copy if it is large and contiguous."""
    if array.nbytes < 1024:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def row_structure(spec: Spec, rows: int) -> tuple:
    """The structure of one row of a stack; of the call itself if it is no stack."""
    if not rows:
        return spec.structure
    if spec.row is None:
        spec.row = _map_shapes(spec.structure, lambda shape: shape[1:])
    return spec.row


def stack_structure(structure: tuple, rows: int) -> tuple:
    """The structure of a stack of rows."""
    return _map_shapes(structure, lambda shape: (rows, *shape))


def read_group(group: str, spec: Spec, source: Any, start: int) -> Any:
    """Returns the value of a key, on which all rows of a stack must agree.

    Args:
      group: key of the call's dict.
      spec: of the call.
      source: buffer of its payload.
      start: where the payload begins there.
    """
    match spec.structure:
        case ("t", (("d", keys, children),)) if group in keys:
            index = keys.index(group)
            if all(child[0] == "a" for child in children[: index + 1]):
                leaf = spec.leaves[index]
                count = leaf.nbytes // leaf.dtype.itemsize
                begin = start + leaf.offset
                values = np.frombuffer(source, leaf.dtype, count, begin).tolist()
                if values and values.count(values[0]) == count:
                    return values[0]
                raise WireError(f"the rows of a stack differ in '{group}'")
    raise WireError(f"expected one dict of arrays with the key '{group}'")


def _map_shapes(structure: tuple, function: Callable[[tuple], tuple]) -> tuple:
    if structure[0] == "a":
        return ("a", structure[1], function(structure[2]))
    children = tuple(_map_shapes(child, function) for child in structure[-1])
    return (*structure[:-1], children)
