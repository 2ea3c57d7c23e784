"""Memory that is used again: shared by two processes of one host, and of batches.

A client owns blocks of anonymous memory (memfd). It writes a request's arrays into one
and offers another for the reply. It passes the descriptor of a block over its local
link before the first use; the server maps the block and never allocates any. A block
has no name, so the kernel frees it when the last of the two processes unmaps it or
dies. Its size is sealed, so that neither side can make the other read past its end;
what is in it is only array bytes, never structure.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from embodied.rpc import structures, wire

AVAILABLE = hasattr(os, "memfd_create")
MAX_TARGETS = 256  # Places of rows that a buffer of batches remembers.
THRESHOLD = 4096  # Bytes of arrays from which memory is faster than the frame.
NAME = "embodied-bulk"
_RELEASE_FROM = 1 << 16
_EVERYTHING = itertools.repeat(...)
_SET: Any = operator.setitem
_PACK = wire.SEQ.pack
_SEALS = 0
Leases = dict[int, Any]  # Weak references to memory in use, by their own ids.
if AVAILABLE:
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory(size: int) -> int:
    """Returns the descriptor of new memory whose size cannot change."""
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserving the pages here turns a full memory into an error, where it would
        # later be a fatal signal.
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def memory_size(descriptor: int, limit: int) -> int:
    """Returns the size of memory that another process has made.

    Raises:
      wire.WireError: it is no memory of a size that cannot change, or too large.
    """
    try:
        # Files and devices have no seals, and reading them could block.
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        sealed = False
    if not sealed:
        raise wire.WireError("a descriptor is not sealed shared memory")
    size = os.fstat(descriptor).st_size
    if not 0 < size <= limit:
        raise wire.WireError(f"shared memory of {size} bytes is over the limit")
    return size


def lease(whole: np.ndarray, held: Leases, on_end: Callable[[], None]) -> np.ndarray:
    """Tells when memory may be used again, since nobody reads it any more.

    NumPy arrays keep the array that they were made of alive, through all views and
    slices. Its end, of which a weak reference tells, is the end of the lease. Nothing
    rests on when that is: memory whose lease has not ended is not used again.

    Args:
      whole: a new array of the memory, which is returned. The memory itself is not
        that of an array: views would refer to that one.
      held: keeps the weak reference as long as the memory is in use.
      on_end: called once, from any thread.
    """

    def end(reference: Any) -> None:
        del held[id(reference)]
        on_end()

    reference = weakref.ref(whole, end)
    held[id(reference)] = reference
    return whole


class Block:
    """One piece of memory that this process owns.

    Attributes:
      number: tells the blocks of one client apart.
      shared: the link over which its descriptor was passed last.
    """

    __slots__ = (
        "_arrays",
        "_free",
        "_head",
        "_held",
        "_rows",
        "_spec",
        "_tail",
        "fileno",
        "number",
        "pages",
        "place",
        "shared",
        "size",
    )

    def __init__(self, number: int, size: int, free: deque[Block], held: Leases):
        self.number = number
        self.size = size
        self.shared: Any = None
        self._free = free  # Where unused blocks of this size wait.
        self._held = held
        self.fileno = make_memory(size)
        try:
            self.pages = mmap.mmap(self.fileno, size)
        except OSError:
            os.close(self.fileno)
            raise
        self.place = wire.PLACE.pack(number)  # For the other side.
        self._spec: structures.Spec | None = None  # Of the last request, as are:
        self._rows = 0
        self._arrays: list[np.ndarray] = []
        self._head: bytes = b""
        self._tail: bytes = b""

    def __del__(self) -> None:
        if hasattr(self, "pages"):
            os.close(self.fileno)

    def free(self) -> None:
        """Gives the block back. The other side must be done with it."""
        self._free.append(self)

    def leased(self) -> np.ndarray:
        """Returns a buffer of its bytes; the block is free when that is gone."""
        return lease(np.frombuffer(self.pages, np.uint8), self._held, self.free)

    def fill(self, spec: structures.Spec, arrays: list[np.ndarray], rows: int) -> None:
        """Copies the arguments of a call to where they belong."""
        if spec is not self._spec or rows != self._rows:
            self._prepare(spec, rows)  # It mostly has the same use again.
        # A loop in C: `target[...] = array` for each; none returns anything.
        any(map(_SET, self._arrays, _EVERYTHING, arrays))

    def frame(self, seq: int) -> bytes:
        """The frame of the call that was filled in, for a client with no other."""
        return self._head + _PACK(seq) + self._tail

    def _prepare(self, spec: structures.Spec, rows: int) -> None:
        self._arrays = structures.payload_arrays(spec, self.pages)
        places = (self.place, wire.NOWHERE)
        frame = wire.Codec.encode(wire.CALL, 0, spec, (), [], rows, places, (), True)
        end = wire.PRELUDE.size
        self._head, self._tail = frame[: end - wire.SEQ.size], frame[end:]
        self._spec, self._rows = spec, rows


class Arena:
    """The blocks of one client: hands out free ones, makes new ones, up to a limit.

    Any thread may allocate and free. A block is used by one call at a time; sizes
    are powers of two, so that a few serve calls of different sizes.
    """

    def __init__(self, limit: int = 4 << 30):
        self._limit = limit
        self._total = 0
        self._count = 0
        self._free: dict[int, deque[Block]] = {}
        self._held: Leases = {}
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Block | None:
        """Returns a block, of `structures.block_bytes`; None if memory is short."""
        free = self._free.get(size)
        if free:
            try:
                return free.pop()  # The last one: it is still in the caches.
            except IndexError:
                pass  # Another thread took it.
        with self._lock:
            if self._total + size > self._limit:
                return None
            free = self._free.setdefault(size, deque())
            try:
                block = Block(self._count + 1, size, free, self._held)
            except OSError:
                return None
            self._count += 1
            self._total += size
        return block


def write(target: memoryview, spec: structures.Spec, arrays: list[np.ndarray]) -> None:
    """Copies arrays into memory."""
    for array, leaf in zip(arrays, spec.leaves):
        end = leaf.offset + leaf.nbytes
        if leaf.nbytes < _RELEASE_FROM:
            target[leaf.offset : end] = structures.as_bytes(array)
        else:
            # NumPy lets other threads run while it copies.
            place = np.frombuffer(target[leaf.offset : end], leaf.dtype)
            np.copyto(place.reshape(leaf.shape), array)


class Mapping:
    """A block of another process."""

    __slots__ = ("_slices", "_spec", "pages")

    def __init__(self, pages: mmap.mmap):
        self.pages = pages
        self._spec: structures.Spec | None = None
        self._slices: list[memoryview] = []

    def slices(self, spec: structures.Spec) -> list[memoryview]:
        """The bytes of each array of a payload."""
        if spec is not self._spec:  # A block mostly has the same use again.
            self._slices = structures.payload_slices(spec, self.pages)
            self._spec = spec
        return self._slices


class PeerMemory:
    """Blocks of another process, which it has passed over a link.

    Owned by the thread that receives from the link; worker threads read and write the
    mappings that it hands out.
    """

    def __init__(self, limit: int = 8 << 30, max_blocks: int = 4096):
        self._blocks: dict[bytes, Mapping] = {}
        self._total = 0
        self._limit = limit
        self._max_blocks = max_blocks

    def add(self, number: int, descriptor: int) -> None:
        """Maps a block under its number; the descriptor is the caller's to close.

        Raises:
          wire.WireError: it is not a sealed block, or there are too many.
        """
        size = memory_size(descriptor, self._limit - self._total)
        place = wire.PLACE.pack(number)
        if place in self._blocks or place == wire.NOWHERE:
            raise wire.WireError(f"a block of shared memory has the number {number}")
        if len(self._blocks) >= self._max_blocks:
            raise wire.WireError("the client has too many blocks of shared memory")
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            pages = mmap.mmap(descriptor, size, flags=flags)
        except OSError as error:
            raise wire.WireError(f"cannot map shared memory: {error}") from None
        self._blocks[place] = Mapping(pages)
        self._total += size

    def find(self, place: bytes) -> Mapping:
        """Returns a block.

        Raises:
          wire.WireError: there is none of that number.
        """
        mapping = self._blocks.get(place)
        if mapping is None:
            raise wire.WireError("the client has passed no such block of shared memory")
        return mapping


class BatchBuffer:
    """Memory for the rows of one batch: a column [capacity, ...] for each array.

    It belongs to a batch until the last array that refers to it is gone, so that a
    function may keep what it was given. Then it is a spare one, for another batch.

    Args:
      columns: the arrays of one row.
      capacity: rows.
      spare: where it goes when it is free, from any thread.
      held: leases of buffers that are in use.
    """

    def __init__(
        self,
        columns: list[structures.Leaf],
        capacity: int,
        spare: deque[BatchBuffer],
        held: Leases,
    ):
        self._columns: list[tuple[structures.Leaf, int]] = []
        self._spare = spare
        self._held = held
        size = 0
        for leaf in columns:
            self._columns.append((leaf, size))
            column = capacity * leaf.nbytes
            size += -(-column // structures.ALIGN) * structures.ALIGN
        self._memory = bytearray(max(size, 1))
        self._targets: dict[tuple[int, int], list[memoryview]] = {}

    def targets(self, start: int, stop: int) -> list[memoryview]:
        """The bytes of some rows, in each column that is not empty."""
        targets = self._targets.get((start, stop))
        if targets is None:
            memory = memoryview(self._memory)
            targets = [
                memory[offset + start * leaf.nbytes : offset + stop * leaf.nbytes]
                for leaf, offset in self._columns
                if leaf.nbytes
            ]
            if len(self._targets) >= MAX_TARGETS:
                self._targets.clear()
            self._targets[start, stop] = targets
        return targets

    def arrays(self, rows: int) -> list[np.ndarray]:
        """Hands out the first rows of all columns; once for each batch."""
        memory = lease(np.frombuffer(self._memory, np.uint8), self._held, self._free)
        return [
            np.ndarray((rows, *leaf.shape), leaf.dtype, memory, offset)
            for leaf, offset in self._columns
        ]

    def _free(self) -> None:
        self._spare.append(self)
