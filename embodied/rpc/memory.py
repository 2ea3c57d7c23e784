"""Shared memory between two processes of one host, for requests and replies.

A client owns blocks of anonymous memory (memfd). It writes a request's arrays into
one and offers another for the reply; the server maps the blocks through /proc and
never allocates any. A block has no name, so the kernel frees it when the last of the
two processes unmaps it or dies. Its size is sealed, so that neither side can make
the other read past its end; what is in it is only array bytes, never structure.
"""

from __future__ import annotations

import ctypes
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

from embodied.rpc import layout, wire

AVAILABLE = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
THRESHOLD = 4096  # Bytes of arrays from which memory is faster than the frame.
NAME = "embodied-bulk"
_RELEASE_FROM = 1 << 16
_EVERYTHING = itertools.repeat(...)
_SET: Any = operator.setitem
_PACK = wire.SEQ.pack
_SEALS = 0
if AVAILABLE:
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def host_facts() -> dict[str, Any]:
    """What a server needs to know to tell whether it can map this process's memory."""
    if not AVAILABLE:
        return {}
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return {
            "boot": boot,
            "pids": os.readlink("/proc/self/ns/pid"),
            "pid": os.getpid(),
        }
    except OSError:
        return {}


class Block:
    """One piece of memory that this process owns."""

    __slots__ = (
        "_arrays",
        "_free",
        "_head",
        "_held",
        "_rows",
        "_spec",
        "_tail",
        "fileno",
        "lease",
        "pages",
        "place",
        "size",
    )

    def __init__(self, number: int, size: int, free: deque[Block], held: set[Block]):
        self.size = size
        self._free = free  # Where unused blocks of this size wait.
        self._held = held  # Blocks that nobody but their readers know.
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.fileno = os.memfd_create(NAME, flags)
        try:
            # Reserving the pages here turns a full memory into an error, where it
            # would later be a fatal signal.
            os.posix_fallocate(self.fileno, 0, size)
            fcntl.fcntl(self.fileno, fcntl.F_ADD_SEALS, _SEALS)
            self.pages = mmap.mmap(self.fileno, size)
        except OSError:
            os.close(self.fileno)
            raise
        self.place = wire.PLACE.pack(number, self.fileno, size)  # For the other side.
        self.lease: Any = None
        self._spec: layout.Spec | None = None  # Of the last request, as are all below.
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

    def leased(self) -> Any:
        """Returns a buffer of its bytes; the block is free when that is gone."""
        # NumPy arrays keep the ctypes object alive through all views and slices, so
        # its end is the moment at which nobody can read the block any more.
        owner = (ctypes.c_ubyte * self.size).from_buffer(self.pages)
        # Held, else the garbage collector finds a block that only its lease refers to.
        self._held.add(self)
        self.lease = weakref.ref(owner, self._end_lease)
        return owner

    def _end_lease(self, _: Any) -> None:
        self._held.discard(self)
        self.free()

    def fill(self, spec: layout.Spec, arrays: list[np.ndarray], rows: int) -> None:
        """Copies the arguments of a call to where they belong."""
        if spec is not self._spec or rows != self._rows:
            self._prepare(spec, rows)  # It mostly has the same use again.
        # A loop in C: `target[...] = array` for each; none returns anything.
        any(map(_SET, self._arrays, _EVERYTHING, arrays))

    def frame(self, seq: int) -> bytes:
        """The frame of the call that was filled in, for a client with no other."""
        return self._head + _PACK(seq) + self._tail

    def _prepare(self, spec: layout.Spec, rows: int) -> None:
        self._arrays = layout.payload_arrays(spec, self.pages)
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
        self._held: set[Block] = set()
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Block | None:
        """Returns a block, of `layout.block_bytes`, or None where memory is short."""
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
                block = Block(self._count, size, free, self._held)
            except OSError:
                return None
            self._count += 1
            self._total += size
        return block


def write(target: memoryview, spec: layout.Spec, arrays: list[np.ndarray]) -> None:
    """Copies arrays into memory."""
    for array, leaf in zip(arrays, spec.leaves):
        _write_one(target, leaf, array)


def write_made(target: memoryview, spec: layout.Spec, arrays: list[np.ndarray]) -> None:
    """Copies arrays into memory in which some of them may lie already."""
    whole = np.frombuffer(target, np.uint8)
    base = whole.ctypes.data
    moved = []
    for array, leaf in zip(arrays, spec.leaves):
        place = base + leaf.offset
        if array.ctypes.data == place and array.flags.c_contiguous:
            continue
        # Copied before anything is written, if it could be written over.
        safe = array.copy() if np.may_share_memory(array, whole) else array
        moved.append((leaf, safe))
    for leaf, array in moved:
        _write_one(target, leaf, array)


def _write_one(target: memoryview, leaf: layout.Leaf, array: np.ndarray) -> None:
    end = leaf.offset + leaf.nbytes
    if leaf.nbytes < _RELEASE_FROM:
        target[leaf.offset : end] = layout.as_bytes(array)
    else:
        # NumPy lets other threads run while it copies.
        place = np.frombuffer(target[leaf.offset : end], leaf.dtype)
        np.copyto(place.reshape(leaf.shape), array)


class Mapping:
    """A block of another process."""

    __slots__ = ("_slices", "_spec", "pages")

    def __init__(self, pages: mmap.mmap):
        self.pages = pages
        self._spec: layout.Spec | None = None
        self._slices: list[memoryview] = []

    def slices(self, spec: layout.Spec) -> list[memoryview]:
        """The bytes of each array of a payload."""
        if spec is not self._spec:  # A block mostly has the same use again.
            self._slices = layout.payload_slices(spec, self.pages)
            self._spec = spec
        return self._slices


class PeerMemory:
    """Another process's blocks, mapped by a server for one client.

    Owned by the server's loop thread; worker threads read and write the mappings
    that it hands out.
    """

    def __init__(self, facts: Any, limit: int = 8 << 30, max_blocks: int = 4096):
        self._blocks: dict[bytes, Mapping] = {}
        # What the server found out about frames whose arrays lie here, by their bytes.
        self.known: dict[bytes, Any] = {}
        self._numbers: set[int] = set()
        self._total = 0
        self._limit = limit
        self._max_blocks = max_blocks
        own = host_facts()
        same_host = (
            isinstance(facts, dict)
            and bool(own)
            and facts.get("boot") == own["boot"]
            and facts.get("pids") == own["pids"]
            and type(facts.get("pid")) is int
            and os.access(f"/proc/{facts['pid']}/fd", os.R_OK)
        )
        self.pid: int | None = facts["pid"] if same_host else None

    def map(self, place: bytes) -> Mapping:
        """Maps a block, or returns the mapping made before.

        Raises:
          wire.WireError: it is not a sealed block of the client.
        """
        known = self._blocks.get(place)
        if known is not None:
            return known
        number, fileno, size = wire.PLACE.unpack(place)
        if self.pid is None:
            raise wire.WireError("this client shares no memory with the server")
        if number in self._numbers or self._total + size > self._limit:
            raise wire.WireError("the client's shared memory is over the limit")
        if len(self._blocks) >= self._max_blocks or size <= 0:
            raise wire.WireError("the client has too many blocks of shared memory")
        mapping = self._blocks[place] = Mapping(self._open(fileno, size))
        self._numbers.add(number)
        self._total += size
        return mapping

    def clear(self) -> None:
        """Lets go of all blocks; those in use are unmapped when they are not."""
        self._blocks.clear()
        self.known.clear()
        self._numbers.clear()
        self._total = 0

    def _open(self, fileno: int, size: int) -> mmap.mmap:
        path = f"/proc/{self.pid}/fd/{fileno}"
        try:
            # The name is looked at first: opening a pipe or a device would block or
            # have effects.
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):
                raise wire.WireError("a descriptor is not a block of shared memory")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise wire.WireError(f"cannot map shared memory: {error}") from None
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != size:
                raise wire.WireError("a block of shared memory is not sealed")
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            return mmap.mmap(descriptor, size, flags=flags)
        except OSError as error:
            raise wire.WireError(f"cannot map shared memory: {error}") from None
        finally:
            os.close(descriptor)
