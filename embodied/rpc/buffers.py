"""Reusable memory: blocks shared by two processes, and batch buffers. Any process.

A client owns blocks of anonymous memory (memfd). It writes a request's arrays into one
and offers another for the reply. It passes the descriptor of a block over its local
link before the first use; the server maps the block and never allocates any. A block
has no name, so the kernel frees it when the last of the two processes unmaps it or
dies. Its size is sealed, so that neither side can make the other read past its end. It
holds only array bytes, never structure.
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
from embodied.rpc.wire import Spec, WireError

THRESHOLD = 4096  # Bytes of arrays from which shared memory is faster than the frame.
NAME = "embodied-bulk"
MAX_TARGETS = 256  # Row ranges whose views a `BatchBuffer` caches.
MAX_OWN = 4 << 30  # Bytes of a client's blocks.
_EVERYTHING = itertools.repeat(...)
_SET: Any = operator.setitem
_PACK_SEQ = wire.SEQ.pack
# Keeps the weak references of leases alive, at half the cost of `weakref.finalize`.
_LEASES: dict[int, Any] = {}


def _is_available() -> bool:
    """Returns whether the kernel has anonymous memory, and grants it."""
    try:
        os.close(os.memfd_create(NAME))
    except (AttributeError, OSError):
        return False
    return True


AVAILABLE = _is_available()
_SEALS = 0
if AVAILABLE:
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Memory:
    """New anonymous memory of a fixed size; closed when no reference is left.

    Raises:
      OSError: there is not enough memory, or no descriptor left.
    """

    __slots__ = ("fileno",)

    def __init__(self, size: int):
        self.fileno = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Reserves the pages now, so that a lack of memory raises an error here and is
        # not a fatal signal later.
        os.posix_fallocate(self.fileno, 0, size)
        fcntl.fcntl(self.fileno, fcntl.F_ADD_SEALS, _SEALS)

    def __del__(self) -> None:
        if hasattr(self, "fileno"):
            os.close(self.fileno)


def memory_size(descriptor: int, limit: int) -> int:
    """Returns the size of memory that another process has made.

    Raises:
      WireError: it is not memory of a sealed size, is empty, or is over the limit.
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
        raise WireError(f"shared memory of {size} bytes is empty or over the limit")
    return size


def lease(memory: Any, owner: Any, spare: deque) -> np.ndarray:
    """Returns an array of the memory's bytes; once it is freed, its owner is spare.

    A NumPy view keeps the array it was made from alive, through all further views and
    slices. So the memory is not reused before the last of them is gone, however late
    that is. The memory must not be a NumPy array itself: views would keep that array
    alive instead of the returned one.

    Args:
      memory: a buffer that is not an array.
      owner: the object that owns the memory.
      spare: where the owner is appended, from any thread.
    """
    whole = np.frombuffer(memory, np.uint8)

    def end(reference: Any) -> None:
        del _LEASES[id(reference)]
        spare.append(owner)

    reference = weakref.ref(whole, end)
    _LEASES[id(reference)] = reference
    return whole


def copy_into(targets: list[np.ndarray], arrays: list[np.ndarray]) -> None:
    """Copies arrays into their targets; large copies release the GIL."""
    # A loop in C of `target[...] = array`. Each returns None, so `any` runs them all.
    any(map(_SET, targets, _EVERYTHING, arrays))


class Block:
    """A block of shared memory that this process owns.

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
        # Of the last request: (header, rows), views of its arrays, parts of its frame.
        self._use: tuple[Spec | None, int] = (None, 0)
        self._arrays: list[np.ndarray] = []
        self._parts = b"", b""

    def free(self) -> None:
        """Gives the block back. The other side must be done with it."""
        self._spare.append(self)

    def leased(self) -> np.ndarray:
        """Returns an array of its bytes; once that is freed, the block is spare."""
        return lease(self.pages, self, self._spare)

    def fill(self, spec: Spec, arrays: list[np.ndarray], rows: int) -> None:
        """Copies the arguments of a call into the block."""
        if (spec, rows) != self._use:  # A block mostly has the same use again.
            self._use = (spec, rows)
            self._arrays = spec.views(self.pages)
            frame = wire.encode(
                wire.CALL, 0, spec, [], rows, self.number, in_memory=True
            )
            self._parts = wire.split_at_seq(frame)
        any(map(_SET, self._arrays, _EVERYTHING, arrays))  # As in `copy_into`.

    def frame(self, seq: int) -> bytes:
        """Returns the frame of the filled call, if it is the only open one.

        The frame lists no other open calls and offers no block for the reply.
        """
        head, tail = self._parts
        return head + _PACK_SEQ(seq) + tail


class Arena:
    """The blocks of one client: hands out free ones, makes new ones, up to a limit.

    Any thread may allocate and free. A block is used by one call at a time; sizes
    are powers of two, so that a few serve calls of different sizes.
    """

    def __init__(self) -> None:
        self._total = 0
        self._count = 0
        self._spare: dict[int, deque[Block]] = {}
        self._gone: deque[int] = deque()  # Sizes of blocks that were freed for good.
        self._lock = threading.Lock()  # Held to make blocks and to close.

    def allocate(self, size: int) -> Block | None:
        """Returns a block of a `wire.block_bytes` size; None if memory is short.

        It may be larger, so that calls that are rarely open at once need no new one.
        """
        try:
            return self._spare[size].pop()  # The last one: its bytes are still cached.
        except (KeyError, IndexError):
            pass
        for larger in (2 * size, 4 * size):
            try:
                return self._spare[larger].pop()
            except (KeyError, IndexError):
                continue
        return self._make(size)

    def _make(self, size: int) -> Block | None:
        with self._lock:
            spare = self._spare.setdefault(size, deque())
            while self._gone:
                self._total -= self._gone.popleft()
            if self._total + size > MAX_OWN:
                return None
            try:
                block = Block(self._count + 1, size, spare)
            except OSError:
                return None
            # For example, those of calls that a restarted server does not answer.
            weakref.finalize(block, self._gone.append, size).atexit = False
            self._count += 1
            self._total += size
            return block

    def close(self) -> None:
        """Frees the unused blocks; the others are freed when their users are gone."""
        with self._lock:
            for spare in self._spare.values():
                spare.clear()
            self._spare.clear()


class PeerMemory:
    """Blocks that another process has passed over a link.

    Owned by the thread that receives from the link; worker threads read and write the
    memory that it hands out.
    """

    def __init__(self, limit: int = 8 << 30, max_blocks: int = 4096):
        self._blocks: dict[int, mmap.mmap] = {}
        self._total = 0
        self._limit = limit
        self._max_blocks = max_blocks

    def add(self, number: int, descriptor: int) -> None:
        """Maps a block under its number; the caller closes the descriptor.

        Raises:
          WireError: it is not a sealed block, its number is 0 or in use, there are too
            many blocks or bytes, or it cannot be mapped.
        """
        size = memory_size(descriptor, self._limit - self._total)
        if number in self._blocks or not number:
            raise WireError(f"the number {number} of a block is 0 or in use")
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
          WireError: no block has that number, or it is smaller than `nbytes`.
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
    function may keep its arguments. Then it is spare, for another batch.

    Args:
      spec: header of all columns.
      spare: where it is appended when it is free, from any thread.
    """

    def __init__(self, spec: Spec, spare: deque[BatchBuffer]):
        self._spec = spec
        self._spare = spare
        self._memory = bytearray(max(spec.nbytes, 1))
        self._columns = spec.views(self._memory)
        self._targets: dict[tuple[int, int], list[np.ndarray]] = {}

    def put(self, start: int, stop: int, arrays: list[np.ndarray]) -> None:
        """Copies the rows of a call into the rows from `start` to before `stop`."""
        targets = self._targets.get((start, stop))
        if targets is None:
            if len(self._targets) >= MAX_TARGETS:
                self._targets.clear()
            targets = [column[start:stop] for column in self._columns]
            self._targets[start, stop] = targets
        any(map(_SET, targets, _EVERYTHING, arrays))  # As in `copy_into`.

    def build(self, rows: int) -> Any:
        """Returns the first rows of all columns, as data. Called once per batch."""
        columns = self._spec.views(lease(self._memory, self, self._spare))
        return self._spec.combine([column[:rows] for column in columns])
