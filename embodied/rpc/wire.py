"""The wire format: one frame a message, arrays without a copy, no pickle. Any process.

    | prelude 24 B | spec | extra | padding | array | padding | array | ...

The prelude says what kind of message it is and how long its parts are. The spec
holds the method's name and the structure, dtypes and shapes of its data. It is the
same bytes for every call of the same shape, so both sides look it up instead of
building or parsing it again. The extra part holds what differs from call to call:
plain values, where in shared memory the arrays lie when they are not in the frame,
and which other calls are open. Arrays start at multiples of 64 bytes.

Nothing here trusts the other side: counts, depth, dtypes, shapes and lengths are
checked before anything is allocated, and a frame that does not fit raises WireError.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np

PRELUDE = struct.Struct("<4sBBHIIQ")
MAGIC = b"EMB1"
ALIGN = 64

# Kinds of messages.
HELLO, WELCOME, HEARTBEAT, BYE, CALL, REPLY, ERROR, STRANGER = range(8)

# Flags.
BULK = 1  # The arrays lie in shared memory.
NO_CALL = (1 << 64) - 1  # The number of messages that belong to no call.

MAX_LEAVES = 4096
MAX_DEPTH = 16
MAX_SPEC_BYTES = 1 << 20
MAX_ARRAY_BYTES = 1 << 48
MAX_CACHED_SPECS = 512

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


class Leaf(NamedTuple):
    """Where one array of a message lies."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # From the start of the payload.
    nbytes: int


class Spec:
    """Method, structure, dtypes and shapes of a message, and its payload's layout.

    The structure is a nested tuple: ('a', dtype, shape) for an array, ('v',) for a
    plain value, ('d', keys, children), ('l', children) and ('t', children).
    """

    __slots__ = ("encoded", "leaves", "method", "nbytes", "row", "structure")

    def __init__(self, method: str, structure: tuple, encoded: bytes):
        self.method = method
        self.structure = structure
        self.encoded = encoded
        self.row: tuple | None = None  # Of a stack, once it was asked for.
        self.leaves: list[Leaf] = []
        offset = 0
        for dtype, shape in _array_leaves(structure):
            nbytes = math.prod(shape) * dtype.itemsize
            self.leaves.append(Leaf(dtype, shape, offset, nbytes))
            offset += -(-nbytes // ALIGN) * ALIGN
        self.nbytes = offset  # Of the payload, each array padded.


class Message(NamedTuple):
    """A frame whose lengths and structure were checked; arrays not yet looked at."""

    kind: int
    flags: int
    rows: int  # 0: one unstacked call; n: a stack of n.
    seq: int
    spec: Spec
    values: list
    bulk: Any
    open: list[int]  # Numbers of the sender's other calls that have no reply yet.
    frame: Any  # Owner of the bytes: arrays in the frame keep it alive.
    start: int  # Where the payload begins in the frame.


class Codec:
    """Encodes and decodes frames, with a bounded table of the specs it has seen.

    Each table belongs to one client or server. Several threads may use it: lookups
    and insertions are single dict operations.
    """

    def __init__(self, max_bytes: int = 1 << 30):
        self.max_bytes = max_bytes
        self._by_structure: dict[tuple, Spec] = {}
        self._by_bytes: dict[bytes, Spec] = {}

    def spec(self, method: str, structure: tuple) -> Spec:
        """Returns the spec of a structure that `flatten` made."""
        key = (method, structure)
        spec = self._by_structure.get(key)
        if spec is None:
            encoded = _pack([method, structure])
            if len(encoded) > MAX_SPEC_BYTES:
                raise WireError(f"keys and shapes take {len(encoded)} bytes, too many")
            _check_structure(_as_lists(structure), 0, [MAX_LEAVES])
            spec = Spec(method, structure, encoded)
            if len(self._by_structure) >= MAX_CACHED_SPECS:
                self._by_structure.clear()
            self._by_structure[key] = spec
        return spec

    def encode(
        self,
        kind: int,
        seq: int,
        spec: Spec,
        values: list,
        arrays: list[np.ndarray],
        rows: int = 0,
        bulk: Any = None,
        open: list[int] | None = None,
        in_memory: bool = False,
    ) -> bytes:
        """Builds a frame; with `in_memory` the arrays are already elsewhere."""
        extra = b""
        if values or bulk or open:
            extra = _pack((values, bulk, open or ()))
        if not 0 <= rows < 1 << 16:
            raise WireError(f"a stack has 0 to 65535 rows, not {rows}")
        flags = BULK if in_memory else 0
        sizes = len(spec.encoded), len(extra)
        head = PRELUDE.pack(MAGIC, kind, flags, rows, *sizes, seq)
        if in_memory or not arrays:
            return b"".join((head, spec.encoded, extra))
        length = PRELUDE.size + sum(sizes)
        parts: list[Any] = [head, spec.encoded, extra, _PADDING[-length % ALIGN]]
        for array, leaf in zip(arrays, spec.leaves):
            parts.append(as_bytes(array))
            parts.append(_PADDING[-leaf.nbytes % ALIGN])
        return b"".join(parts)

    def decode(self, frame: Any) -> Message:
        """Checks a frame and returns what it says, without touching its arrays."""
        view = memoryview(frame)
        size = len(view)
        if size < PRELUDE.size:
            raise WireError(f"expected at least {PRELUDE.size} bytes, got {size}")
        magic, kind, flags, rows, spec_size, extra_size, seq = PRELUDE.unpack_from(view)
        if magic != MAGIC:
            raise WireError(f"expected a message that starts with {MAGIC!r}")
        length = PRELUDE.size + spec_size + extra_size
        if kind > STRANGER or spec_size > MAX_SPEC_BYTES or length > size:
            raise WireError(
                f"kind {kind} with a header of {spec_size} and {extra_size} bytes does "
                f"not fit a message of {size} bytes"
            )
        encoded = bytes(view[PRELUDE.size : PRELUDE.size + spec_size])
        spec = self._by_bytes.get(encoded)
        if spec is None:
            spec = self._parse(encoded)
        values: list = []
        bulk, open_calls = None, values
        if extra_size:
            extra = _unpack(view[PRELUDE.size + spec_size : length])
            match extra:
                case [list() as values, bulk, list() as open_calls]:
                    pass
                case _:
                    raise WireError("the part after the header is not as expected")
            if any(type(x) is not int for x in open_calls):
                raise WireError("the open calls are not numbers")
        start = -(-length // ALIGN) * ALIGN
        if spec.nbytes > self.max_bytes:
            raise WireError(
                f"arrays of {spec.nbytes} bytes are more than the limit of "
                f"{self.max_bytes}"
            )
        if not flags & BULK and spec.nbytes and size != start + spec.nbytes:
            raise WireError(
                f"dtypes and shapes say {spec.nbytes} bytes of arrays, "
                f"{max(0, size - start)} came"
            )
        return Message(
            kind, flags, rows, seq, spec, values, bulk, open_calls, frame, start
        )

    def _parse(self, encoded: bytes) -> Spec:
        data = _unpack(encoded)
        if not isinstance(data, list) or len(data) != 2 or not isinstance(data[0], str):
            raise WireError("the header is not a method name and a structure")
        budget = [MAX_LEAVES]
        structure = _check_structure(data[1], 0, budget)
        spec = Spec(data[0], structure, encoded)
        if len(self._by_bytes) >= MAX_CACHED_SPECS:
            self._by_bytes.clear()
        self._by_bytes[encoded] = spec
        return spec


def flatten(tree: Any) -> tuple[tuple, list[np.ndarray], list]:
    """Splits nested data into structure, arrays and plain values, in one order."""
    arrays: list[np.ndarray] = []
    values: list = []
    structure = _flatten(tree, arrays, values, 0)
    return structure, arrays, values


def check(tree: Any) -> None:
    """Raises WireError if a tree cannot be sent."""
    structure, _, values = flatten(tree)
    _check_structure(_as_lists(structure), 0, [MAX_LEAVES])
    _pack((structure, values))


def unflatten(structure: tuple, arrays: list, values: list) -> Any:
    """Puts together what `flatten` took apart."""
    remaining = iter(values)
    try:
        tree = _unflatten(structure, iter(arrays), remaining)
    except StopIteration:
        raise WireError("fewer values came than the structure has") from None
    if next(remaining, _VALUE) is not _VALUE:
        raise WireError("more values came than the structure has")
    return tree


def payload_arrays(spec: Spec, buffer: Any, start: int = 0) -> list[np.ndarray]:
    """Returns the arrays of a payload as views of `buffer`, which they keep alive."""
    arrays = []
    for dtype, shape, offset, nbytes in spec.leaves:
        if nbytes:
            count = nbytes // dtype.itemsize
            array = np.frombuffer(buffer, dtype, count, start + offset)
            arrays.append(array.reshape(shape))
        else:
            arrays.append(np.empty(shape, dtype))
    return arrays


def message_tree(message: Message) -> Any:
    """Returns the data of a message whose arrays are in its frame."""
    if message.flags & BULK:
        raise WireError("arrays in shared memory, where only a call may have them")
    arrays = payload_arrays(message.spec, message.frame, message.start)
    return unflatten(message.spec.structure, arrays, message.values)


def as_bytes(array: np.ndarray) -> Any:
    """Returns an array's bytes, without a copy if it is large and contiguous."""
    if array.nbytes < 1024:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


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


_PADDING = [bytes(size) for size in range(ALIGN)]
_VALUE = ("v",)


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


def _array_leaves(structure: tuple) -> Iterator[tuple[np.dtype, tuple[int, ...]]]:
    if structure[0] == "a":
        yield _parse_dtype(structure[1]), structure[2]
    elif structure[0] != "v":
        for child in structure[-1]:
            yield from _array_leaves(child)


def _parse_dtype(name: str) -> np.dtype:
    if name in _EXTENDED_DTYPES:
        return _EXTENDED_DTYPES[name]
    if not _PLAIN_DTYPE.fullmatch(name):
        raise WireError(f"dtype {name[:40]!r} is not allowed")
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        raise WireError(f"dtype {name[:40]!r} is not known") from None


def _check_structure(node: Any, depth: int, budget: list[int]) -> tuple:
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
            checked = [_check_structure(x, depth + 1, budget) for x in children]
            return ("d", tuple(keys), tuple(checked))
        case ["l" | "t" as kind, list() as children]:
            checked = [_check_structure(x, depth + 1, budget) for x in children]
            return (kind, tuple(checked))
    raise WireError("the structure has a node of no known kind")


def _as_lists(structure: Any) -> Any:
    """A structure as it comes out of msgpack."""
    if isinstance(structure, tuple):
        return [_as_lists(node) for node in structure]
    return structure


def _pack(data: Any) -> bytes:
    try:
        return msgpack.packb(data)
    except UnicodeEncodeError as error:
        raise WireError(f"a string cannot be sent: {error}") from None


def _unpack(data: Any) -> Any:
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_ext_len=0, use_list=True
        )
    except Exception as error:
        # msgpack raises a dozen types for bad bytes, and each means the same here.
        raise WireError(f"the header is not valid: {type(error).__name__}") from None
