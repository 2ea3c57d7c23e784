"""The wire format: one frame per message, arrays as views, no pickle. Any process.

    | prelude 24 B | header | extra | padding | array | padding | array | ...

The prelude has the kind of the message, the lengths of its parts and the number of the
call. The header is msgpack of the method's name and its data, with a dtype and a shape
in place of each array; tuples are marked, to distinguish them from lists. For data of
arrays only, calls with the same names, dtypes and shapes have the same header bytes, so
both sides look the header up instead of building or parsing it again. The extra part
holds what else differs from call to call: where in shared memory the arrays lie when
they are not in the frame, and which other calls are open. Arrays start at multiples of
64 bytes.

Nothing here trusts the other side: a frame whose lengths, header or arrays do not fit
raises WireError before memory for arrays is allocated. The depth of data, the number of
arrays, dtypes (an allow-list) and shapes are checked.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np

PRELUDE = struct.Struct("<4sBBHIIQ")  # Its last field is the number of the call.
SEQ = struct.Struct("<Q")
MAGIC = b"EMB2"

# Kinds of messages.
HELLO, WELCOME, HEARTBEAT, BYE, CALL, REPLY, ERROR, STRANGER = range(8)

IN_MEMORY = 1  # A flag: the arrays lie in shared memory.
NO_BLOCK = 0  # Block number that stands for no shared memory.
NO_CALL = (1 << 64) - 1  # The number of messages that belong to no call.
ALIGN = 64
MAX_ARRAYS = 4096
MAX_VALUES = 1_000_000  # Of a message; checking them holds up others.
MAX_EXTRA = 8 * 1024  # Bytes of the numbers of blocks and of other open calls.
MAX_DEPTH = 16
MAX_ARRAY_BYTES = 1 << 48
MAX_CACHED_SPECS = 512

_TWO = struct.Struct("<QQ")
_PRELUDE_SIZE = PRELUDE.size
_HEAD_SIZE = PRELUDE.size - SEQ.size
_LOOKS = operator.attrgetter("__class__", "dtype", "shape")
_PADDING = [bytes(size) for size in range(ALIGN)]
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
      tree: the data as a list, with an `ArrayType` for each array.
      encoded: the header in bytes.
      leaves: the arrays, in their order.
      nbytes: size of the payload, each array padded.
      size: size of payload and header.
      room: size of a block of memory for the payload.
      plain: whether there are values other than arrays.
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
        for count, node in enumerate(_terminal_nodes(tree, 0)):
            if count >= MAX_VALUES:
                raise WireError(f"there are more than {MAX_VALUES} values")
            if type(node) is not ArrayType:
                self.plain = True
                continue
            nbytes = math.prod(node.shape) * node.dtype.itemsize
            self.leaves.append(Leaf(*node, self.nbytes, nbytes))
            self.nbytes += -(-nbytes // ALIGN) * ALIGN
            if len(self.leaves) > MAX_ARRAYS:
                raise WireError(f"there are more than {MAX_ARRAYS} arrays")
        self.size = self.nbytes + len(encoded)
        self.room = block_bytes(self.nbytes)
        self._dtypes = [leaf.dtype for leaf in self.leaves]
        self._shapes = [leaf.shape for leaf in self.leaves]
        self._offsets: tuple[int, list[int]] = (-1, [])  # Last start, and its offsets.
        # Keys of the commonest data, one dict of arrays, which `combine` builds faster.
        self._names: list[str] | None = None
        match tree:
            case [dict() as only] if all(type(x) is ArrayType for x in only.values()):
                self._names = list(only)

    def build(self, buffer: Any, start: int = 0) -> list:
        """Returns the data; its arrays are views of the buffer and keep it alive."""
        return self.combine(self.views(buffer, start))

    def views(self, buffer: Any, start: int = 0) -> list[np.ndarray]:
        """Returns the arrays of a payload as views of a buffer.

        Args:
          buffer: holds the payload; the views keep it alive.
          start: first byte of the payload in the buffer.
        """
        before, offsets = self._offsets
        if start != before:  # It mostly is the same.
            offsets = [start + x.offset if x.nbytes else 0 for x in self.leaves]
            self._offsets = start, offsets
        # A loop in C: this runs for every call.
        buffers = itertools.repeat(buffer)
        return list(map(_ARRAY_OF, self._shapes, self._dtypes, buffers, offsets))

    def combine(self, arrays: list[np.ndarray]) -> list:
        """Returns the data with these arrays in place of their types."""
        if self._names is not None:
            return [dict(zip(self._names, arrays))]
        remaining = iter(arrays)
        return map_arrays(lambda _: next(remaining), self.tree)


class Message(NamedTuple):
    """A frame whose lengths and header were checked, but whose arrays were not read."""

    kind: int
    flags: int
    rows: int  # 0: one unstacked call; n: a stack of n.
    seq: int
    spec: Spec
    request: int  # Number of the block that holds the arrays, or NO_BLOCK.
    reply: int  # Number of the block offered for the reply's arrays, or NO_BLOCK.
    open: Sequence[int]  # Numbers of the sender's other calls without a reply.
    frame: Any  # Owner of the bytes: arrays in the frame keep it alive.
    start: int  # Where the payload begins in the frame.

    def data(self) -> list:
        """Returns the data of a message whose arrays are in its frame."""
        if self.flags & IN_MEMORY:
            raise WireError("arrays in shared memory, where only a call may have them")
        return self.spec.build(self.frame, self.start)

    def value(self) -> Any:
        """Returns the only value of a message that is not a call."""
        match self.data():
            case [value]:
                return value
        raise WireError("expected one value")


_message: Callable[[tuple], Message] = functools.partial(tuple.__new__, Message)


class Codec:
    """Encodes and decodes frames, with bounded tables of the headers it has seen.

    The tables belong to one client or server. Several threads may use them: lookups
    and insertions are single dict operations.
    """

    def __init__(self, max_bytes: int = 1 << 30):
        self.max_bytes = max_bytes
        self._by_bytes: dict[bytes, Spec] = {}
        self._by_signature: dict[tuple, Spec] = {}  # By keys, dtypes and shapes.
        # Of the last frame with only a header and arrays: its size, the bytes before
        # its number, end and bytes of its header, kind, spec, and start of the payload.
        self._last: tuple = (-1, b"", 0, b"", 0, None, 0)

    def flatten(self, method: str, data: Sequence[Any]) -> tuple[Spec, list]:
        """Returns the header and the arrays of data.

        Args:
          method: name of the called method; empty for a result.
          data: the arguments, or one result.
        """
        looks = None
        # One dict of arrays, the commonest data, is looked up instead of taken apart.
        if len(data) == 1 and type(only := data[0]) is dict:
            arrays = list(only.values())
            try:
                # A loop in C: this runs for every call.
                looks = (method, *only, *map(_LOOKS, arrays))
                spec = self._by_signature.get(looks)
                if spec is not None:
                    return spec, arrays
            except (AttributeError, TypeError):
                looks = None  # Not all values are arrays.
        encoded, arrays = flatten(method, data)
        spec = self.find(encoded)
        if looks is not None:
            cache_spec(self._by_signature, looks, spec)
        return spec, arrays

    def find(self, encoded: bytes) -> Spec:
        """Returns the checked header of encoded bytes."""
        spec = self._by_bytes.get(encoded)
        if spec is None:
            spec = Spec(encoded)
            if not spec.plain:  # Plain values mostly come only once.
                cache_spec(self._by_bytes, encoded, spec)
        return spec

    def control(self, kind: int, data: Any = None) -> bytes:
        """Builds the frame of a message that belongs to no call."""
        return encode(kind, NO_CALL, *self.flatten("", [data]))

    def decode(self, frame: Any) -> Message:
        """Checks a frame and returns its message, without touching its arrays."""
        size, head, end, encoded, kind, spec, start = self._last
        if (
            len(frame) == size
            and frame[:_HEAD_SIZE] == head
            and frame[_PRELUDE_SIZE:end] == encoded
        ):
            # Answers to a client mostly differ only in number and arrays.
            (seq,) = SEQ.unpack_from(frame, _HEAD_SIZE)
            return _message(
                (kind, 0, 0, seq, spec, NO_BLOCK, NO_BLOCK, (), frame, start)
            )
        size = len(frame)
        if size < _PRELUDE_SIZE:
            raise WireError(f"expected at least {_PRELUDE_SIZE} bytes, got {size}")
        fields = PRELUDE.unpack_from(frame)
        magic, kind, flags, rows, header_size, extra_size, seq = fields
        begin = _PRELUDE_SIZE + header_size
        end = begin + extra_size
        if magic != MAGIC or kind > STRANGER or end > size:
            raise WireError(
                f"a message of kind {kind}, truncated or of another protocol"
            )
        encoded = bytes(frame[_PRELUDE_SIZE:begin])
        spec = self._by_bytes.get(encoded) or self.find(encoded)
        request, reply, open_calls = NO_BLOCK, NO_BLOCK, ()
        if extra_size:
            if not 16 <= extra_size <= MAX_EXTRA or extra_size % 8:
                raise WireError("the places in shared memory are cut off, or too many")
            numbers = struct.unpack_from(f"<{extra_size // 8}Q", frame, begin)
            request, reply, open_calls = numbers[0], numbers[1], numbers[2:]
        start = (end + ALIGN - 1) & -ALIGN
        nbytes = spec.nbytes
        if nbytes > self.max_bytes:
            raise WireError(
                f"arrays of {nbytes} bytes are more than the limit of {self.max_bytes}"
            )
        if nbytes and not flags & IN_MEMORY and size != start + nbytes:
            raise WireError(
                f"dtypes and shapes say {nbytes} bytes of arrays, "
                f"{max(0, size - start)} came"
            )
        if not (flags or rows or extra_size):
            head = bytes(frame[:_HEAD_SIZE])
            self._last = size, head, begin, encoded, kind, spec, start
        return Message(
            kind, flags, rows, seq, spec, request, reply, open_calls, frame, start
        )


def encode(
    kind: int,
    seq: int,
    spec: Spec,
    arrays: list,
    rows: int = 0,
    request: int = NO_BLOCK,
    reply: int = NO_BLOCK,
    open: Collection[int] = (),
    in_memory: bool = False,
) -> bytes:
    """Builds a frame; with `in_memory`, the arrays are already in shared memory."""
    if not 0 <= rows < 1 << 16:
        raise WireError(f"a stack has 0 to 65535 rows, not {rows}")
    extra = b""
    if request or reply or open:
        extra = _TWO.pack(request, reply)
        if open:
            extra += struct.pack(f"<{len(open)}Q", *open)
    encoded = spec.encoded
    sizes = len(encoded), len(extra)
    head = PRELUDE.pack(MAGIC, kind, in_memory, rows, *sizes, seq)
    if in_memory or not arrays:
        return head + encoded + extra
    padding = _PADDING[-(_PRELUDE_SIZE + sum(sizes)) % ALIGN]
    parts: list[Any] = [head, encoded, extra, padding]
    for array, leaf in zip(arrays, spec.leaves):
        parts += (as_bytes(array), _PADDING[-leaf.nbytes % ALIGN])
    return b"".join(parts)


def split_at_seq(frame: bytes) -> tuple[bytes, bytes]:
    """Splits a frame at the number of its call: like calls differ only there."""
    return frame[:_HEAD_SIZE], frame[_PRELUDE_SIZE:]


def seq_of(frame: bytes) -> int:
    """Returns the number of a frame's call."""
    return SEQ.unpack_from(frame, _HEAD_SIZE)[0]


def cache_spec(table: dict, key: Any, spec: Spec) -> None:
    """Adds to a table of at most MAX_CACHED_SPECS entries; clears a full one first."""
    if len(table) >= MAX_CACHED_SPECS:
        table.clear()
    table[key] = spec


def flatten(method: str, tree: Iterable) -> tuple[bytes, list[np.ndarray]]:
    """Returns the encoded header of data, not checked yet, and its arrays.

    Raises:
      WireError: the data cannot be sent.
    """
    arrays: list[np.ndarray] = []
    return _pack([method, *tree], arrays), arrays


def check_schema(schema: dict, spec: Spec, rows: int) -> None:
    """Checks the only argument of a call, a dict, against {key: (dtype, shape)}.

    Raises:
      WireError: the argument differs; the text says what was expected, and what came.
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
    """Returns the size of a block for `nbytes`: a power of two, at least 4096."""
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
        # Integers above 64 bits, invalid Unicode, lists that contain themselves.
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
    """Checks nested data, and yields its arrays and plain values."""
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
    # NumPy refuses empty arrays if their other sizes are too large, so a 0 counts as 1.
    if math.prod(max(1, size) for size in shape) * dtype.itemsize > MAX_ARRAY_BYTES:
        raise WireError(f"an array of shape {tuple(shape)} is too large")
    return ArrayType(dtype, tuple(shape))
