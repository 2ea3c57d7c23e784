"""The wire format: one frame a message, arrays without a copy, no pickle. Any process.

    | prelude 24 B | spec | extra | padding | array | padding | array | ...

The prelude says what kind of message it is and how long its parts are. The spec
holds the method's name and the structure, dtypes and shapes of its data. It is the
same bytes for every call of the same shape, so both sides look it up instead of
building or parsing it again. The extra part holds what differs from call to call:
where in shared memory the arrays lie when they are not in the frame, which other calls
are open, and plain values. Arrays start at multiples of 64 bytes.

Nothing here trusts the other side: counts, depth, dtypes, shapes and lengths are
checked before anything is allocated, and a frame that does not fit raises WireError.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from embodied.rpc.structures import (
    ALIGN,
    MAX_LEAVES,
    Spec,
    WireError,
    as_bytes,
    as_lists,
    check_structure,
    flatten,
    pack,
    unpack,
)

PRELUDE = struct.Struct("<4sBBHIIQ")  # Its last field is the number of the call.
SEQ = struct.Struct("<Q")
MAGIC = b"EMB1"

# Kinds of messages.
HELLO, WELCOME, HEARTBEAT, BYE, CALL, REPLY, ERROR, STRANGER = range(8)

# Flags.
BULK = 1  # The arrays lie in shared memory.
PLACES = 2  # The extra part starts with two places in it, of request and reply.
OPEN = 4  # Then come the numbers of other calls, and how many they are.

PLACE = struct.Struct("<Q")  # Number of a block of shared memory; 0 for none.
NOWHERE = bytes(PLACE.size)
NO_CALL = (1 << 64) - 1  # The number of messages that belong to no call.

MAX_SPEC_BYTES = 1 << 20
MAX_CACHED_SPECS = 512

_COUNT = struct.Struct("<H")
_BOTH = 2 * PLACE.size


# Spec and plain values of a message, the owner of its bytes, and where arrays begin.
Payload = tuple[Spec, Sequence[Any], Any, int]


class Message(NamedTuple):
    """A frame whose lengths and structure were checked; arrays not yet looked at."""

    kind: int
    flags: int
    rows: int  # 0: one unstacked call; n: a stack of n.
    seq: int
    spec: Spec
    values: Sequence[Any]
    places: tuple[bytes, bytes]  # Of request and reply in shared memory, or NOWHERE.
    open: Sequence[int]  # Numbers of the sender's calls that have no reply yet.
    frame: Any  # Owner of the bytes: arrays in the frame keep it alive.
    start: int  # Where the payload begins in the frame.


class LastShape:
    """Keys, dtypes and shapes of a method's last data; the next mostly has the same.

    Comparing a dict of arrays with it is much cheaper than to take it apart.
    """

    __slots__ = ("_keys", "_looks", "spec")

    def __init__(self, spec: Spec, data: dict[str, Any]):
        self.spec = spec
        self._keys = tuple(data)
        self._looks = list(map(_LOOKS, data.values()))

    def arrays(self, data: Any) -> list | None:
        """Returns the arrays of data that looks the same; None if it does not."""
        if type(data) is not dict or tuple(data) != self._keys:
            return None
        arrays = list(data.values())
        # A loop in C: this runs for every call, in processes whose caches are cold.
        try:
            same = list(map(_LOOKS, arrays)) == self._looks
        except AttributeError:  # Something that is no array.
            return None
        return arrays if same else None


class Codec:
    """Encodes and decodes frames, with bounded tables of the specs it has seen.

    The tables belong to one client or server. Several threads may use them: lookups
    and insertions are single dict operations.
    """

    def __init__(self, max_bytes: int = 1 << 30):
        self.max_bytes = max_bytes
        self._by_structure: dict[tuple, Spec] = {}
        self._by_bytes: dict[bytes, Spec] = {}
        self._heads: dict[bytes, tuple[int, int, int, int, int]] = {}
        self._shapes: dict[str, LastShape] = {}
        # Size, head, spec in bytes, kind, spec and start of the last plain frame.
        self._last: tuple[int, bytes, bytes, int, Any, int] = (-1, b"", b"", 0, None, 0)

    def spec(self, method: str, structure: tuple) -> Spec:
        """Returns the spec of a structure that `flatten` made."""
        key = (method, structure)
        spec = self._by_structure.get(key)
        if spec is None:
            encoded = pack([method, structure])
            if len(encoded) > MAX_SPEC_BYTES:
                raise WireError(f"keys and shapes take {len(encoded)} bytes, too many")
            check_structure(as_lists(structure), 0, [MAX_LEAVES])
            spec = Spec(method, structure, encoded)
            if len(self._by_structure) >= MAX_CACHED_SPECS:
                self._by_structure.clear()
            self._by_structure[key] = spec
        return spec

    def call(self, method: str, arguments: tuple) -> tuple[Spec, list, Sequence[Any]]:
        """Returns the spec, arrays and plain values of a call."""
        last = self._shapes.get(method)
        if last is not None and len(arguments) == 1:
            arrays = last.arrays(arguments[0])
            if arrays is not None:
                return last.spec, arrays, ()
        structure, arrays, values = flatten(arguments)
        spec = self.spec(method, structure)
        if len(arguments) == 1:
            self._keep_shape(method, spec, arguments[0], np.ndarray | np.generic)
        return spec, arrays, values

    def result(self, method: str, tree: Any) -> tuple[Spec, list, Sequence[Any]]:
        """Returns the spec, arrays and plain values of a method's result."""
        key = f"={method}"
        last = self._shapes.get(key)
        if last is not None:
            arrays = last.arrays(tree)
            if arrays is not None:
                return last.spec, arrays, ()
        structure, arrays, values = flatten(tree)
        spec = self.spec("", structure)
        self._keep_shape(key, spec, tree, np.ndarray)
        return spec, arrays, values

    def _keep_shape(self, key: str, spec: Spec, data: Any, kind: Any) -> None:
        if type(data) is dict and all(isinstance(x, kind) for x in data.values()):
            if len(self._shapes) >= MAX_CACHED_SPECS:
                self._shapes.clear()
            self._shapes[key] = LastShape(spec, data)

    @staticmethod
    def encode(
        kind: int,
        seq: int,
        spec: Spec,
        values: Sequence[Any],
        arrays: list[np.ndarray],
        rows: int = 0,
        places: tuple[bytes, bytes] | None = None,
        open: Collection[int] = (),
        in_memory: bool = False,
    ) -> bytes:
        """Builds a frame; with `in_memory` the arrays are already elsewhere."""
        flags = BULK if in_memory else 0
        extra = b""
        if places is not None:
            flags |= PLACES
            extra = places[0] + places[1]
        if open:
            flags |= OPEN
            count = len(open)
            extra += struct.pack(f"<H{count}Q", count, *open)
        if values:
            extra += pack(values)
        if not 0 <= rows < 1 << 16:
            raise WireError(f"a stack has 0 to 65535 rows, not {rows}")
        encoded = spec.encoded
        sizes = len(encoded), len(extra)
        head = PRELUDE.pack(MAGIC, kind, flags, rows, *sizes, seq)
        if in_memory or not arrays:
            return head + encoded + extra
        return _with_payload([head, encoded, extra], spec, map(as_bytes, arrays))

    def control(self, kind: int, data: Any = None) -> bytes:
        """Builds the frame of a message that belongs to no call."""
        structure, arrays, values = flatten(data)
        return self.encode(kind, NO_CALL, self.spec("", structure), values, arrays)

    def decode(self, frame: Any) -> Message:
        """Checks a frame and returns what it says, without touching its arrays."""
        size = len(frame)
        head = bytes(frame[:_HEAD_SIZE])
        known = self._heads.get(head)
        kind, flags, rows, begin, length = known or _read_head(head)
        if length > size:
            raise WireError(f"expected at least {length} bytes, got {size}")
        (seq,) = SEQ.unpack_from(frame, _HEAD_SIZE)
        encoded = bytes(frame[_PRELUDE_SIZE:begin])
        spec = self._by_bytes.get(encoded) or self._parse(encoded)
        places, open_calls, values = _NO_EXTRA
        if length != begin:
            places, open_calls, values = _extra(flags, bytes(frame[begin:length]))
        start = (length + ALIGN - 1) & -ALIGN
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
        if known is None:
            if len(self._heads) >= MAX_CACHED_SPECS:
                self._heads.clear()
            self._heads[head] = (kind, flags, rows, begin, length)
        if length == begin and not (flags or rows):
            self._last = (size, head, encoded, kind, spec, start)
        return Message(
            kind, flags, rows, seq, spec, values, places, open_calls, frame, start
        )

    def decode_known(self, frame: Any) -> tuple[int, int, int, Payload] | None:
        """Returns number, kind, flags and contents, if it looks like the last one.

        Answers to a client mostly do.
        """
        size, head, encoded, kind, spec, start = self._last
        if len(frame) != size or type(frame) is not bytes:
            return None
        if frame.startswith(head) and frame.startswith(encoded, _PRELUDE_SIZE):
            (seq,) = SEQ.unpack_from(frame, _HEAD_SIZE)
            if seq != NO_CALL:
                return seq, kind, 0, (spec, (), frame, start)
        return None

    def _parse(self, encoded: bytes) -> Spec:
        data = unpack(encoded)
        if not isinstance(data, list) or len(data) != 2 or not isinstance(data[0], str):
            raise WireError("the header is not a method name and a structure")
        budget = [MAX_LEAVES]
        structure = check_structure(data[1], 0, budget)
        spec = Spec(data[0], structure, encoded)
        if len(self._by_bytes) >= MAX_CACHED_SPECS:
            self._by_bytes.clear()
        self._by_bytes[encoded] = spec
        return spec


def without_seq(frame: bytes) -> bytes:
    """All of a frame but the number of its call: the same for calls that look alike."""
    return frame[:_HEAD_SIZE] + frame[_PRELUDE_SIZE:]


def seq_of(frame: bytes) -> int:
    """The number of a frame's call."""
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


def _with_payload(parts: list[Any], spec: Spec, chunks: Iterable[Any]) -> bytes:
    parts.append(_PADDING[-sum(map(len, parts)) % ALIGN])
    for chunk, leaf in zip(chunks, spec.leaves):
        parts.append(chunk)
        parts.append(_PADDING[-leaf.nbytes % ALIGN])
    return b"".join(parts)


def message_tree(message: Message) -> Any:
    """Returns the data of a message whose arrays are in its frame."""
    if message.flags & BULK:
        raise WireError("arrays in shared memory, where only a call may have them")
    return message.spec.build(message.frame, message.start, message.values)


_PRELUDE_SIZE = PRELUDE.size
_HEAD_SIZE = PRELUDE.size - SEQ.size
_LOOKS = operator.attrgetter("__class__", "dtype", "shape")
_NO_PLACES = (NOWHERE, NOWHERE)
_NO_EXTRA: tuple[tuple[bytes, bytes], Sequence[int], Sequence[Any]]
_NO_EXTRA = (_NO_PLACES, (), ())
_PADDING = [bytes(size) for size in range(ALIGN)]


def _read_head(head: bytes) -> tuple[int, int, int, int, int]:
    """Returns kind, flags, rows, and where spec and extra part end."""
    if len(head) < _HEAD_SIZE:
        raise WireError(f"expected at least {_PRELUDE_SIZE} bytes, got {len(head)}")
    fields = PRELUDE.unpack(head + bytes(SEQ.size))
    magic, kind, flags, rows, spec_size, extra_size, _ = fields
    if magic != MAGIC:
        raise WireError(f"expected a message that starts with {MAGIC!r}")
    if kind > STRANGER or spec_size > MAX_SPEC_BYTES:
        raise WireError(f"kind {kind} with a header of {spec_size} bytes is not known")
    begin = _PRELUDE_SIZE + spec_size
    return kind, flags, rows, begin, begin + extra_size


def _extra(
    flags: int, extra: bytes
) -> tuple[tuple[bytes, bytes], Sequence[int], Sequence[Any]]:
    """Takes places, open calls and plain values out of the part after the spec."""
    places, open_calls, begin = _NO_PLACES, (), 0
    if flags & PLACES:
        if len(extra) < _BOTH:
            raise WireError("the places in shared memory are cut off")
        places = extra[: PLACE.size], extra[PLACE.size : _BOTH]
        begin = _BOTH
    if flags & OPEN:
        try:
            (count,) = _COUNT.unpack_from(extra, begin)
            open_calls = struct.unpack_from(f"<{count}Q", extra, begin + _COUNT.size)
        except struct.error:
            raise WireError("the numbers of open calls are cut off") from None
        begin += _COUNT.size + 8 * count
    if begin == len(extra):
        return places, open_calls, ()
    values = unpack(extra[begin:])
    if type(values) is not list:
        raise WireError("the plain values are not a list")
    return places, open_calls, values
