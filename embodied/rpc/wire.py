"""The wire format: one frame a message, arrays without a copy, no pickle. Any process.

    | prelude 24 B | header | extra | padding | array | padding | array | ...

The prelude has the kind of the message and the lengths of its parts. The header holds
the method's name and its data, with dtypes and shapes in place of arrays. It is the
same bytes for every call of the same shape, so both sides look it up instead of
building or parsing it again. The extra part holds what else differs from call to call:
where in shared memory the arrays lie when they are not in the frame, and which other
calls are open. Arrays start at multiples of 64 bytes.

Nothing here trusts the other side: a frame whose lengths, header or arrays do not fit
raises WireError before anything is allocated.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from embodied.rpc.structures import ALIGN, Spec, WireError, as_bytes, flatten

PRELUDE = struct.Struct("<4sBBHIIQ")  # Its last field is the number of the call.
SEQ = struct.Struct("<Q")
_TWO = struct.Struct("<QQ")
MAGIC = b"EMB2"

# Kinds of messages.
HELLO, WELCOME, HEARTBEAT, BYE, CALL, REPLY, ERROR, STRANGER = range(8)

IN_MEMORY = 1  # A flag: the arrays lie in shared memory.
NOWHERE = 0  # In place of the number of a block of shared memory.
NO_CALL = (1 << 64) - 1  # The number of messages that belong to no call.
MAX_CACHED_SPECS = 512

_PRELUDE_SIZE = PRELUDE.size
_HEAD_SIZE = PRELUDE.size - SEQ.size
_LOOKS = operator.attrgetter("__class__", "dtype", "shape")
_PADDING = [bytes(size) for size in range(ALIGN)]


class Message(NamedTuple):
    """A frame whose lengths and header were checked; arrays not yet looked at."""

    kind: int
    flags: int
    rows: int  # 0: one unstacked call; n: a stack of n.
    seq: int
    spec: Spec
    request: int  # Block of shared memory of the arrays, or NOWHERE.
    reply: int  # Block that is offered for the arrays of the reply, or NOWHERE.
    open: Sequence[int]  # Numbers of the sender's calls that have no reply yet.
    frame: Any  # Owner of the bytes: arrays in the frame keep it alive.
    start: int  # Where the payload begins in the frame.

    def data(self) -> list:
        """Returns the data of a message whose arrays are in its frame."""
        if self.flags & IN_MEMORY:
            raise WireError("arrays in shared memory, where only a call may have them")
        return self.spec.build(self.frame, self.start)

    def value(self) -> Any:
        """Returns the data of a message that is no call."""
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
        self._by_looks: dict[tuple, Spec] = {}  # Of dicts of arrays.
        # Of the last frame with nothing but a header and arrays: its size, the bytes
        # before its number, its header, and what follows from them.
        self._last: tuple = (-1, b"", 0, b"", 0, None, 0)

    def flatten(self, method: str, data: Sequence[Any]) -> tuple[Spec, list]:
        """Returns the header and the arrays of data.

        Args:
          method: whose arguments it is; empty for a result.
          data: the arguments, or one result.
        """
        looks = None
        # One dict of arrays, the commonest data, is looked up instead of taken apart.
        if len(data) == 1 and type(only := data[0]) is dict:
            arrays = list(only.values())
            try:
                # A loop in C: this runs for every call.
                looks = (method, *only, *map(_LOOKS, arrays))
                spec = self._by_looks.get(looks)
                if spec is not None:
                    return spec, arrays
            except (AttributeError, TypeError):
                looks = None  # Something is no array.
        encoded, arrays = flatten(method, data)
        spec = self.find(encoded)
        if looks is not None:
            keep(self._by_looks, looks, spec)
        return spec, arrays

    def find(self, encoded: bytes) -> Spec:
        """Returns the header of its bytes, checked."""
        spec = self._by_bytes.get(encoded)
        if spec is None:
            spec = Spec(encoded)
            if not spec.plain:  # Other values mostly come only once.
                keep(self._by_bytes, encoded, spec)
        return spec

    def control(self, kind: int, data: Any = None) -> bytes:
        """Builds the frame of a message that belongs to no call."""
        return encode(kind, NO_CALL, *self.flatten("", [data]))

    def decode(self, frame: Any) -> Message:
        """Checks a frame and returns what it says, without touching its arrays."""
        size, head, end, encoded, kind, spec, start = self._last
        if (
            len(frame) == size
            and frame[:_HEAD_SIZE] == head
            and frame[_PRELUDE_SIZE:end] == encoded
        ):
            # Answers to a client mostly look alike.
            (seq,) = SEQ.unpack_from(frame, _HEAD_SIZE)
            return _message((kind, 0, 0, seq, spec, NOWHERE, NOWHERE, (), frame, start))
        size = len(frame)
        if size < _PRELUDE_SIZE:
            raise WireError(f"expected at least {_PRELUDE_SIZE} bytes, got {size}")
        fields = PRELUDE.unpack_from(frame)
        magic, kind, flags, rows, header_size, extra_size, seq = fields
        begin = _PRELUDE_SIZE + header_size
        end = begin + extra_size
        if magic != MAGIC or kind > STRANGER or end > size:
            raise WireError(f"a message of kind {kind}, cut off or of another protocol")
        encoded = bytes(frame[_PRELUDE_SIZE:begin])
        spec = self._by_bytes.get(encoded) or self.find(encoded)
        request, reply, open_calls = NOWHERE, NOWHERE, ()
        if extra_size:
            if extra_size < 16 or extra_size % 8:
                raise WireError("the places in shared memory are cut off")
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
    request: int = NOWHERE,
    reply: int = NOWHERE,
    open: Collection[int] = (),
    in_memory: bool = False,
) -> bytes:
    """Builds a frame; with `in_memory` the arrays are already elsewhere."""
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


def around_seq(frame: bytes) -> tuple[bytes, bytes]:
    """Returns a frame before and after its call's number.

    Both are the same for calls that look alike.
    """
    return frame[:_HEAD_SIZE], frame[_PRELUDE_SIZE:]


def seq_of(frame: bytes) -> int:
    """Returns the number of a frame's call."""
    return SEQ.unpack_from(frame, _HEAD_SIZE)[0]


def row_frames(
    kind: int, spec: Spec, arrays: list[np.ndarray], places: list[tuple[int, int]]
) -> list[bytes]:
    """Builds a frame for each (number, index), of one row of stacked arrays."""
    count = len(arrays[0]) if arrays else 0
    payload = np.zeros((count, spec.nbytes), np.uint8)
    for array, leaf in zip(arrays, spec.leaves):
        if leaf.nbytes:
            rows = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            end = leaf.offset + leaf.nbytes
            payload[:, leaf.offset : end] = rows.reshape(count, leaf.nbytes)
    encoded = spec.encoded
    head = PRELUDE.pack(MAGIC, kind, 0, 0, len(encoded), 0, 0)[:_HEAD_SIZE]
    tail = encoded + _PADDING[-(_PRELUDE_SIZE + len(encoded)) % ALIGN]
    size, whole, number = spec.nbytes, payload.tobytes(), SEQ.pack
    return [
        head + number(seq) + tail + whole[index * size : (index + 1) * size]
        for seq, index in places
    ]


def keep(table: dict, key: Any, spec: Spec) -> None:
    """Adds to a table, which never has more than so many entries."""
    if len(table) >= MAX_CACHED_SPECS:
        table.clear()
    table[key] = spec
