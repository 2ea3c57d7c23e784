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
from typing import Any

import numpy as np

from embodied.rpc import wire
from embodied.rpc.structures import Spec, WireError

AVAILABLE = hasattr(os, "memfd_create")
THRESHOLD = 4096  # Bytes of arrays from which memory is faster than the frame.
NAME = "embodied-bulk"
MAX_TARGETS = 256  # Places of rows that a buffer of batches remembers.
MAX_OWN = 4 << 30  # Bytes of a client's blocks.
_EVERYTHING = itertools.repeat(...)
_SET: Any = operator.setitem
# Keeps weak references of leases, as `weakref.finalize` does, at half its cost.
_LEASES: dict[int, Any] = {}
_SEALS = 0
if AVAILABLE:
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Memory:
    """New anonymous memory whose size cannot change; closed when nobody refers to it.

    Raises:
      OSError: there is not as much.
    """

    __slots__ = ("fileno",)

    def __init__(self, size: int):
        self.fileno = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Reserving the pages here turns a full memory into an error, where it would
        # later be a fatal signal.
        os.posix_fallocate(self.fileno, 0, size)
        fcntl.fcntl(self.fileno, fcntl.F_ADD_SEALS, _SEALS)

    def __del__(self) -> None:
        if hasattr(self, "fileno"):
            os.close(self.fileno)


def memory_size(descriptor: int, limit: int) -> int:
    """Returns the size of memory that another process has made.

    Raises:
      WireError: it is no memory of a size that cannot change, or too large.
    """
    try:
        # Files and devices have no seals, and reading them could block.
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        sealed = False
    if not sealed:
        raise WireError("a descriptor is not sealed shared memory")
    size = os.fstat(descriptor).st_size
    if not 0 < size <= limit:
        raise WireError(f"shared memory of {size} bytes is over the limit")
    return size


def lease(memory: Any, owner: Any, spare: deque) -> np.ndarray:
    """Returns an array of the memory's bytes; when it is gone, its owner is spare.

    NumPy arrays keep the array that they were made of alive, through all views and
    slices. Nothing rests on when the last of them ends: until then the memory is not
    used again. The memory must not be that of an array, to which views would refer.

    Args:
      memory: a buffer.
      owner: what it belongs to.
      spare: where the owner goes, from any thread.
    """
    whole = np.frombuffer(memory, np.uint8)

    def end(reference: Any) -> None:
        del _LEASES[id(reference)]
        spare.append(owner)

    reference = weakref.ref(whole, end)
    _LEASES[id(reference)] = reference
    return whole


def copy_into(targets: list[np.ndarray], arrays: list[np.ndarray]) -> None:
    """Copies arrays to where they belong; large ones let other threads run."""
    # A loop in C: `target[...] = array` for each; none returns anything.
    any(map(_SET, targets, _EVERYTHING, arrays))


class Block:
    """One piece of memory that this process owns.

    Attributes:
      number: tells the blocks of one client apart.
      shared: the link over which its descriptor was passed last.
    """

    def __init__(self, number: int, size: int, spare: deque[Block]):
        self.number = number
        self.size = size
        self.shared: Any = None
        self._spare = spare  # Where unused blocks of this size wait.
        self.memory = Memory(size)
        self.pages = mmap.mmap(self.memory.fileno, size)
        # Of the last request: its header and rows, its arrays here, and its frame.
        self._use: tuple[Spec | None, int] = (None, 0)
        self._arrays: list[np.ndarray] = []
        self._parts = b"", b""

    def free(self) -> None:
        """Gives the block back. The other side must be done with it."""
        self._spare.append(self)

    def leased(self) -> np.ndarray:
        """Returns a buffer of its bytes; the block is free when that is gone."""
        return lease(self.pages, self, self._spare)

    def fill(self, spec: Spec, arrays: list[np.ndarray], rows: int) -> None:
        """Copies the arguments of a call to where they belong."""
        if (spec, rows) != self._use:  # It mostly has the same use again.
            self._use = (spec, rows)
            self._arrays = spec.views(self.pages)
            frame = wire.encode(
                wire.CALL, 0, spec, [], rows, self.number, in_memory=True
            )
            self._parts = wire.around_seq(frame)
        any(map(_SET, self._arrays, _EVERYTHING, arrays))  # As in `copy_into`.

    def frame(self, seq: int) -> bytes:
        """Returns the frame of the call that was filled in, if no other is open."""
        return self._parts[0] + wire.SEQ.pack(seq) + self._parts[1]


class Arena:
    """The blocks of one client: hands out free ones, makes new ones, up to a limit.

    Any thread may allocate and free. A block is used by one call at a time; sizes
    are powers of two, so that a few serve calls of different sizes.
    """

    def __init__(self) -> None:
        self._total = 0
        self._count = 0
        self._spare: dict[int, deque[Block]] = {}
        self._lock = threading.Lock()  # Held to make blocks.

    def allocate(self, size: int) -> Block | None:
        """Returns a block, of `structures.block_bytes`; None if memory is short."""
        try:
            return self._spare[size].pop()  # The last one: it is still in the caches.
        except (KeyError, IndexError):
            return self._make(size)

    def _make(self, size: int) -> Block | None:
        with self._lock:
            spare = self._spare.setdefault(size, deque())
            if self._total + size > MAX_OWN:
                return None
            try:
                block = Block(self._count + 1, size, spare)
            except OSError:
                return None
            self._count += 1
            self._total += size
            return block

    def close(self) -> None:
        """Frees the blocks that are not in use; the others go with who uses them."""
        with self._lock:
            for spare in self._spare.values():
                spare.clear()
            self._spare.clear()


class PeerMemory:
    """Blocks of another process, which it has passed over a link.

    Owned by the thread that receives from the link; worker threads read and write the
    memory that it hands out.
    """

    def __init__(self, limit: int = 8 << 30, max_blocks: int = 4096):
        self._blocks: dict[int, mmap.mmap] = {}
        self._total = 0
        self._limit = limit
        self._max_blocks = max_blocks

    def add(self, number: int, descriptor: int) -> None:
        """Maps a block under its number; the descriptor is the caller's to close.

        Raises:
          WireError: it is not a sealed block, or there are too many.
        """
        size = memory_size(descriptor, self._limit - self._total)
        if number in self._blocks or not number:
            raise WireError(f"a block of shared memory has the number {number}")
        if len(self._blocks) >= self._max_blocks:
            raise WireError("the client has too many blocks of shared memory")
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._blocks[number] = mmap.mmap(descriptor, size, flags=flags)
        except OSError as error:
            raise WireError(f"cannot map shared memory: {error}") from None
        self._total += size

    def find(self, number: int, nbytes: int = 0) -> mmap.mmap:
        """Returns the memory of a block.

        Raises:
          WireError: there is none of that number, or with room for so many bytes.
        """
        pages = self._blocks.get(number)
        if pages is None:
            raise WireError("the client has passed no such block of shared memory")
        if len(pages) < nbytes:
            raise WireError("the arrays are larger than their shared memory")
        return pages


class BatchBuffer:
    """Memory for the rows of one batch: a column [capacity, ...] for each array.

    It belongs to a batch until the last array that refers to it is gone, so that a
    function may keep what it was given. Then it is a spare one, for another batch.

    Args:
      spec: of all columns.
      spare: where it goes when it is free, from any thread.
    """

    def __init__(self, spec: Spec, spare: deque[BatchBuffer]):
        self._spec = spec
        self._spare = spare
        self._memory = bytearray(max(spec.nbytes, 1))
        self._columns = spec.views(self._memory)
        self._targets: dict[tuple[int, int], list[np.ndarray]] = {}

    def put(self, start: int, stop: int, arrays: list[np.ndarray]) -> None:
        """Copies the rows of a call to where they belong."""
        targets = self._targets.get((start, stop))
        if targets is None:
            if len(self._targets) >= MAX_TARGETS:
                self._targets.clear()
            targets = [column[start:stop] for column in self._columns]
            self._targets[start, stop] = targets
        any(map(_SET, targets, _EVERYTHING, arrays))  # As in `copy_into`.

    def build(self, rows: int) -> Any:
        """Hands out the first rows of all columns, as data; once for each batch."""
        columns = self._spec.views(lease(self._memory, self, self._spare))
        return self._spec.combine([column[:rows] for column in columns])
