"""Steps in memory: their keys, and the chunks that hold them. Replay's process.

Every key has one array whose rows are the steps. Chunk n consists of the rows from
n · size on; it belongs to one stream and is filled from its start. A full chunk may
have a follower, in which the stream continues. The rows of a released chunk are reused
under a new id.

    rows     | chunk 0  | chunk 1  | chunk 2  | chunk 3  |
    stream A   . . . ────────────────▶ . . _
    stream B              . . . ────────────────▶ . _ _

Each step of a chunk also stands for the sequence that begins there. Sequences before
`dead` are evicted, those from `dead` to `born` can be sampled, and those from `born` to
`filled` still lack steps.

Nothing here locks; the module `buffer` says which lock guards what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from embodied.checkpoint.treefiles import EXTENSIONS
from embodied.replay.sizing import ReplayMemoryError

LOG_PREFIX = "log/"
LATENT_PREFIX = "dyn/"
STEPID = "stepid"
PRIORITY = "priority"
FLAGS = ("is_first", "is_last")
ID_BYTES = 16  # Of a chunk.
STEPID_BYTES = 20  # The chunk's id and the step's index in it, 4 bytes big-endian.
PRIORITY_BYTES = 4

# Copies are faster with huge pages, which waste too much for keys of a few bytes.
_HUGE_ROW_BYTES = 16
# Bytes from the start of a page to the first row. Large NumPy arrays begin 16 bytes
# into a page. Copying a row of whole pages from the start of a page to such an array
# takes three times as long as from other offsets, since the CPU mistakes the reads for
# reads of bytes that were written a moment before.
_OFFSET = 1024
_CONTEXT_HINT = (
    " Steps that were loaded have no latents if they are from a run with "
    "replay_context 0: use that again, or another logdir."
)


def is_latent(key: str) -> bool:
    """Whether the key is a latent, a recurrent state that training refreshes."""
    return key.startswith(LATENT_PREFIX)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name in EXTENSIONS


@dataclasses.dataclass(frozen=True)
class Field:
    """One key of a step, with the dtype and shape that callers see."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @functools.cached_property
    def stored_dtype(self) -> np.dtype:
        """The dtype in memory and in files.

        NumPy copies types that are not its own one element at a time, so these are
        stored as unsigned integers of their size.
        """
        own = self.dtype.isbuiltin == 1
        return self.dtype if own else np.dtype(f"u{self.dtype.itemsize}")

    @property
    def nbytes(self) -> int:
        """Bytes of one step."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class Schema:
    """The keys of all steps in a buffer.

    Args:
      fields: of a step, in the order in which batches have them.
      context: steps at the start of a sequence whose latents are sampled. With 0,
        latents are not stored.
    """

    def __init__(self, fields: Iterable[Field], context: int):
        fields = list(fields)
        # Bytes of a step in files, which may also hold a priority, and latents that
        # are not stored here.
        self.saved_bytes = sum(field.nbytes for field in fields) + PRIORITY_BYTES
        self.fields = {
            field.key: field for field in fields if context or not is_latent(field.key)
        }
        if not self.fields:
            raise ValueError("Expected a step with at least one key, got none.")
        for field in self.fields.values():
            _check_storable(field)
        self.context = context
        self.latents = [key for key in self.fields if is_latent(key)]
        self.step_bytes = sum(field.nbytes for field in self.fields.values())
        self.latent_bytes = sum(self.fields[key].nbytes for key in self.latents)

    @classmethod
    def of(cls, batch: Mapping[str, Any], context: int) -> Schema:
        """Infers the schema from the first steps [B, ...]."""
        fields = []
        for key, value in _relevant(batch, context).items():
            if value.ndim < 1:
                raise ValueError(f"Expected {key} with a batch dimension, got none.")
            fields.append(Field(key, value.dtype, value.shape[1:]))
        return cls(fields, context)

    def pack(self, batch: Mapping[str, Any], amount: int) -> dict[str, np.ndarray]:
        """Checks steps [amount, ...] and returns them as they are stored.

        Raises:
          ValueError: they differ from the schema in keys, dtypes or shapes.
        """
        values = _relevant(batch, self.context)
        if values.keys() != self.fields.keys():
            missing = sorted(self.fields.keys() - values.keys())
            surplus = sorted(values.keys() - self.fields.keys())
            raise ValueError(
                f"Expected steps with the keys {sorted(self.fields)}, as the first "
                f"step had, got {f'none of {missing}' if missing else ''}"
                f"{' and ' if missing and surplus else ''}"
                f"{f'{surplus} in addition' if surplus else ''}."
                f"{_CONTEXT_HINT if any(map(is_latent, surplus)) else ''}"
            )
        return {key: self.pack_key(key, values[key], (amount,)) for key in self.fields}

    def pack_key(self, key: str, value: Any, lead: tuple[int, ...]) -> np.ndarray:
        """Checks values [*lead, ...] of one key and returns them as stored."""
        field = self.fields[key]
        value = np.asarray(value)
        if is_latent(key) and _is_float(value.dtype) and _is_float(field.dtype):
            # Steps that were loaded may have the compute dtype of another device.
            value = value.astype(field.dtype, copy=False)
        if value.dtype != field.dtype or value.shape != lead + field.shape:
            raise ValueError(
                f"Expected {key} as {field.dtype} of shape {lead + field.shape}, as "
                f"the first step had it, got {value.dtype} of shape {value.shape}."
            )
        return value.view(field.stored_dtype)

    def parse_update(
        self, data: Mapping[str, Any]
    ) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray | None]:
        """Checks what `Replay.update` was given, or raises ValueError.

        Returns:
          Ids [n, 20] uint8, latents [n, ...] as stored, and priorities [n] float32.
        """
        stepids = parse_stepids(data)
        lead = stepids.shape[:-1]
        amount = int(np.prod(lead))
        known = {STEPID, PRIORITY, *self.latents}
        if surplus := sorted(data.keys() - known):
            raise ValueError(
                f"Expected an update of {sorted(known)}, got {surplus} in addition. "
                "Only latents that were stored with the steps can be refreshed; for "
                "these, the replay context must be at least 1."
            )
        latents = {
            key: self.pack_key(key, data[key], lead).reshape(
                amount, *self.fields[key].shape
            )
            for key in self.latents
            if key in data
        }
        priorities = None
        if PRIORITY in data:
            priorities = np.asarray(data[PRIORITY], np.float32)
            if priorities.shape != lead:
                raise ValueError(
                    f"Expected {PRIORITY} of shape {lead}, got {priorities.shape}."
                )
            priorities = priorities.reshape(amount)
        return stepids.reshape(amount, STEPID_BYTES), latents, priorities

    def empty_batch(self, batch: int, length: int) -> dict[str, np.ndarray]:
        """Returns uninitialised arrays for the keys of a sampled batch."""
        arrays = {}
        for key, field in self.fields.items():
            steps = self.context if is_latent(key) else length
            arrays[key] = np.empty((batch, steps, *field.shape), field.dtype)
        arrays[STEPID] = np.empty((batch, length, STEPID_BYTES), np.uint8)
        return arrays

    def to_json(self) -> list[list[Any]]:
        """Returns the fields as plain values."""
        return [[x.key, x.dtype.name, list(x.shape)] for x in self.fields.values()]

    @classmethod
    def from_json(cls, data: Any, context: int) -> Schema:
        """Returns the schema that `to_json` described, or raises ValueError."""
        try:
            fields = [
                Field(str(key), np.dtype(name), tuple(int(x) for x in shape))
                for key, name, shape in data
            ]
        except TypeError as error:
            raise ValueError(
                f"Expected a list of fields, got {data!r:.200}."
            ) from error
        return cls(fields, context)


def parse_stepids(data: Mapping[str, Any]) -> np.ndarray:
    """Returns the ids [..., 20] that an update is for, or raises ValueError."""
    stepids = np.asarray(data.get(STEPID, ()))
    if stepids.dtype != np.uint8 or stepids.shape[-1:] != (STEPID_BYTES,):
        raise ValueError(
            f"Expected {STEPID} as uint8 of shape [..., {STEPID_BYTES}], got "
            f"{stepids.dtype} of shape {stepids.shape}."
        )
    return stepids


class Chunks:
    """All chunks of a buffer, as arrays over chunks and over rows.

    Args:
      schema: of the steps.
      size: steps in a chunk.
      amount: number of chunks. Memory is allocated when it is first written to.
      priorities: whether steps have priorities.
    """

    def __init__(self, schema: Schema, size: int, amount: int, priorities: bool):
        self.schema = schema
        self.size = size
        self.amount = amount
        rows = size * amount
        self.arrays = {
            key: lazy_array((rows, *field.shape), field.stored_dtype)
            for key, field in schema.fields.items()
        }
        # Whether the episode ends here although the environment did not set `is_last`.
        self.abandoned = lazy_array((rows,), np.dtype(bool))
        # NaN until training sets a priority.
        self.priorities = (
            lazy_array((rows,), np.dtype(np.float32)) if priorities else None
        )
        self.ids = np.zeros((amount, ID_BYTES), np.uint8)
        self.used = np.zeros(amount, bool)
        self.open = np.zeros(amount, bool)  # A worker still adds to it.
        self.ended = np.zeros(amount, bool)  # No more sequences will be born.
        self.filled = np.zeros(amount, np.int32)
        self.born = np.zeros(amount, np.int32)
        self.dead = np.zeros(amount, np.int32)
        self.pins = np.zeros(amount, np.int32)  # Number of readers and writers.
        self.following = np.zeros(amount, np.int32)
        self.preceding = np.zeros(amount, np.int32)
        self.refreshed = np.zeros(amount, np.int64)  # Number of the last update.
        # Steps inserted into the buffer before the chunk's first and up to its last.
        self.first_insert = np.zeros(amount, np.int64)
        self.last_insert = np.zeros(amount, np.int64)
        self._numbers: dict[bytes, int] = {}  # By id.
        self._released: list[int] = []  # Reused first, as they have memory.
        self._untouched = 0  # Chunks from here on have never been used.

    @property
    def free(self) -> int:
        """How many chunks can be allocated."""
        return len(self._released) + self.amount - self._untouched

    def numbers(self) -> np.ndarray:
        """Returns the numbers [n] of all chunks that are in use."""
        return np.flatnonzero(self.used[: self._untouched])

    def find(self, identity: bytes) -> int:
        """Returns the number of a chunk, or -1 if it is gone."""
        return self._numbers.get(identity, -1)

    def allocate(self, preceding: int, identity: bytes = b"") -> int:
        """Takes a free chunk into use; returns its number.

        Args:
          preceding: the full chunk that it follows, or -1.
          identity: its id; by default a new one.
        """
        if self._released:
            number = self._released.pop()
        else:
            number, self._untouched = self._untouched, self._untouched + 1
        identity = identity or os.urandom(ID_BYTES)
        self._numbers[identity] = number
        self.ids[number] = np.frombuffer(identity, np.uint8)
        self.used[number] = True
        for flags in (self.open, self.ended):
            flags[number] = False
        for counts in (self.filled, self.born, self.dead, self.refreshed):
            counts[number] = 0
        self.following[number] = -1
        self.preceding[number] = preceding
        if preceding >= 0:
            self.following[preceding] = number
        rows = self.rows(number)
        self.abandoned[rows] = False
        if self.priorities is not None:
            self.priorities[rows] = np.nan
        return number

    def releasable(self, number: int) -> bool:
        """Whether no sequence, worker, reader or writer needs the chunk."""
        return bool(self._unneeded(number) and not self.pins[number])

    def any_blocked(self) -> bool:
        """Whether some chunk would be releasable but for its readers or writers."""
        numbers = np.flatnonzero(self.pins[: self._untouched])
        return bool(self._unneeded(numbers).any())

    def release(self, number: int) -> int:
        """Makes a chunk free again; returns the one that followed it, or -1."""
        del self._numbers[self.ids[number].tobytes()]
        self.used[number] = False
        self._released.append(number)
        following = int(self.following[number])
        if following >= 0:
            self.preceding[following] = -1
        return following

    def rows(self, number: int, start: int = 0, stop: int | None = None) -> slice:
        """Returns the rows of the steps from `start` to `stop` of a chunk."""
        base = number * self.size
        return slice(base + start, base + (self.size if stop is None else stop))

    def expand(self, slots: np.ndarray, length: int) -> np.ndarray:
        """Returns the rows [n, length] of the sequences that begin at rows [n]."""
        steps = np.arange(length)
        rows = slots[:, None] + steps
        offsets = slots % self.size
        crossing = np.flatnonzero(offsets + length > self.size)
        if len(crossing):
            index = offsets[crossing, None] + steps
            chunk = np.repeat(slots[crossing, None] // self.size, length, 1)
            while (over := index >= self.size).any():
                chunk[over] = self.following[chunk[over]]
                index[over] -= self.size
            rows[crossing] = chunk * self.size + index
        return rows

    def gather(self, key: str, rows: np.ndarray, out: np.ndarray) -> None:
        """Writes the values of a key at rows [...] into `out` [..., *shape]."""
        source = self.arrays[key]
        # Any mode but 'raise' writes straight into `out`; the rows are known to exist.
        source.take(rows, axis=0, out=out.view(source.dtype), mode="clip")

    def write_stepids(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Writes the ids of the steps at rows [...] into `out` [..., 20] uint8."""
        chunk, index = np.divmod(rows, self.size)
        out[..., :ID_BYTES] = self.ids[chunk]
        index = index.astype(">u4")[..., None]
        out[..., ID_BYTES:] = index.view(np.uint8)

    def locate(self, stepids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds steps by id.

        Args:
          stepids: [n, 20] uint8. Neighbours of the same chunk are looked up together.

        Returns:
          The rows [m] of the steps that were found, and a mask [n] bool of these steps.
        """
        if not len(stepids):
            return np.zeros(0, np.int64), np.zeros(0, bool)
        keys = np.ascontiguousarray(stepids[:, :ID_BYTES])
        index = np.ascontiguousarray(stepids[:, ID_BYTES:STEPID_BYTES])
        index = index.view(">u4")[:, 0].astype(np.int64)
        halves = keys.view(np.uint64)
        changes = (halves[1:] != halves[:-1]).any(1)
        starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        found = [self.find(keys[start].tobytes()) for start in starts.tolist()]
        chunk = np.repeat(found, np.diff(starts, append=len(keys)))
        present = (chunk >= 0) & (index < self.filled[chunk])
        return chunk[present] * self.size + index[present], present

    def _unneeded(self, numbers: Any) -> Any:
        """Whether no sequence and no worker needs a chunk; elementwise for several."""
        finished = self.ended[numbers] | (self.born[numbers] == self.size)
        return (
            self.used[numbers]
            & ~self.open[numbers]
            & (self.preceding[numbers] < 0)
            & (self.dead[numbers] == self.born[numbers])
            & finished
        )


class SlotRing:
    """Rows where sequences begin, from the oldest to the newest; 4 bytes each.

    Such a row is the slot of its sequence: it stands for it, and is reused after it.

    Args:
      expected: number of slots to make room for; the ring grows if there are more.
    """

    def __init__(self, expected: int = 64):
        self._ring = lazy_array((expected,), np.int32)
        self._head = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, slots: np.ndarray) -> None:
        """Adds slots [n], the oldest first."""
        if self._length + len(slots) > len(self._ring):
            grown = lazy_array((2 * (self._length + len(slots)),), np.int32)
            grown[: self._length] = self.oldest(self._length)
            self._ring, self._head = grown, 0
        end = self._head + self._length
        self._ring[np.arange(end, end + len(slots)) % len(self._ring)] = slots
        self._length += len(slots)

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the slots [n] int64 at ranks below the length; 0 is the oldest."""
        return self._ring[(self._head + ranks) % len(self._ring)].astype(np.int64)

    def oldest(self, amount: int) -> np.ndarray:
        """Returns the oldest slots [amount] int64."""
        return self.at(np.arange(amount))

    def drop(self, amount: int) -> None:
        """Removes the oldest slots."""
        self._head = (self._head + amount) % len(self._ring)
        self._length -= amount


def lazy_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns zeros whose memory is allocated, page by page, when it is written to."""
    dtype = np.dtype(dtype)
    row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    nbytes = shape[0] * row_bytes
    if not nbytes:
        return np.zeros(shape, dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, _OFFSET + nbytes, flags=private)
    except OSError as error:
        raise ReplayMemoryError(
            f"The system refused {nbytes / 1e9:.1f} GB for replay: {error}. Lower the "
            "capacity or the bytes of the replay buffer."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        large = row_bytes >= _HUGE_ROW_BYTES
        with contextlib.suppress(OSError):  # Not all kernels support it.
            memory.madvise(mmap.MADV_HUGEPAGE if large else mmap.MADV_NOHUGEPAGE)
    count = nbytes // dtype.itemsize
    return np.frombuffer(memory, dtype, count, _OFFSET).reshape(shape)


def _relevant(batch: Mapping[str, Any], context: int) -> dict[str, np.ndarray]:
    return {
        key: np.asarray(value)
        for key, value in batch.items()
        if not key.startswith(LOG_PREFIX) and (context or not is_latent(key))
    }


def _check_storable(field: Field) -> None:
    if field.key == STEPID:
        raise ValueError(f"The key {STEPID!r} is added by sampling; rename yours.")
    if field.key in FLAGS and field.shape:
        raise ValueError(f"Expected {field.key} as a scalar, got shape {field.shape}.")
    # NumPy's own dtypes need not have `isbuiltin` 1: it is 0 for unpickled ones.
    plain = field.dtype.isbuiltin != 2 and field.dtype.kind in "biuf"
    plain = plain and field.dtype.isnative
    if field.dtype.itemsize > 8 or not (plain or field.dtype.name in EXTENSIONS):
        raise ValueError(
            f"Expected {field.key} as bool, integer or float of at most 8 bytes in "
            f"native byte order, got dtype {field.dtype}. Convert it first."
        )
