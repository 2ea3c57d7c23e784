"""Progress reports of workers to their supervisor. Any process of a run."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from typing import Any

# Indices of doubles in a progress page, which any process may read without a lock:
# aligned writes of eight bytes are atomic.
_SEEN, _STEPPED, _WAITING = 0, 1, 2
_PAGE_BYTES = 24


class Progress:
    """Reports the progress of a worker to its supervisor, also across processes.

        progress = Progress()
        worker = Process(parallel_env, make_env, progress, fds=[progress.fd])

        while True:                   # In the worker.
          with progress.waiting():    # For another worker, so this is not a hang.
            action = future.result()
          obs = env.step(action)
          progress.step()

    Reports are plain writes of the system-wide monotonic clock into shared memory,
    without system calls. The worker's main loop must make them, since a separate
    thread would go on while the main loop hangs. `step` may be called by several
    threads, the other methods by one.

    Attributes:
      fd: descriptor of the shared memory, to be passed to a `Process` in `fds`.
    """

    def __init__(self) -> None:
        fd = anonymous_file("progress")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, _PAGE_BYTES)
        self._open(fd)

    @property
    def seen(self) -> float:
        """Time of the last report; 0 if there is none, inf in an unwatched wait."""
        return self._times[_SEEN]

    @property
    def stepped(self) -> float:
        """Time of the last step, of this worker or its predecessors; 0 if none."""
        return self._times[_STEPPED]

    @property
    def waits(self) -> bool:
        """Whether the worker reports that it waits for another one."""
        return bool(self._times[_WAITING])

    def step(self) -> None:
        """Reports that a step was made."""
        now = time.monotonic()
        self._times[_SEEN] = now
        self._times[_STEPPED] = now

    @contextlib.contextmanager
    def waiting(self, watched: bool = False) -> Iterator[None]:
        """Reports the worker as waiting for another one, for the block's duration.

        Args:
          watched: whether the worker calls `alive` from time to time in the block, so
            that a worker that was stopped or hangs there is noticed.
        """
        self._times[_SEEN] = time.monotonic() if watched else math.inf
        self._times[_WAITING] = 1.0
        try:
            yield
        finally:
            self._times[_WAITING] = 0.0
            self._times[_SEEN] = time.monotonic()

    def alive(self) -> None:
        """Reports a waiting worker as responsive."""
        self._times[_SEEN] = time.monotonic()

    def reset(self) -> None:
        """Clears the reports of a worker that has ended, except for its last step."""
        self._times[_WAITING] = 0.0
        self._times[_SEEN] = 0.0

    def _open(self, fd: int) -> None:
        self.fd = fd
        self._times = memoryview(mmap.mmap(fd, _PAGE_BYTES)).cast("d")

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.fd,)


def anonymous_file(name: str) -> int:
    """Returns the descriptor of a new file without a path; `name` is for debugging."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _attach(fd: int) -> Progress:
    """Returns the Progress at a descriptor that was inherited from another process."""
    # Otherwise it was not passed on: Process(..., progress, fds=[progress.fd]).
    assert os.fstat(fd).st_size == _PAGE_BYTES, fd
    progress = Progress.__new__(Progress)
    progress._open(fd)  # Stays open: this process may pass it on.
    return progress
