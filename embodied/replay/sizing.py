"""Sizes a buffer by its settings and the available memory. Replay's process.

Containers, Slurm and systemd limit memory by control groups. A process belongs to one
group, and the limits of all groups above it apply as well.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import psutil

logger = logging.getLogger("embodied.replay")

# Two buffers, for training and evaluation, usually share a process.
AUTO_SHARE = 0.4
INDEX_BYTES = 40  # Per step, of the buffer's and the selector's own arrays.
_MAX_STEPS = np.iinfo(np.int32).max - 1  # Rows of steps are stored as int32.
_MIN_CHUNKS = 32  # Small buffers get small chunks, so that few steps lie unused.
_SPARE_CHUNKS = 4096  # For many workers; takes no memory until it is used.

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = ("memory.max", "memory.current")  # Limit and use in bytes, of version 2.
_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


class ReplayMemoryError(MemoryError, ValueError):
    """A buffer does not fit into the memory that it may use."""


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """Checked arguments of `Replay`; see there.

    Args:
      name: for messages.
      length: steps in a sequence.
      capacity: items wanted; None for as many as fit.
      bytes: memory to use, or 'auto' for a share of what is available.
      chunksize: maximum steps in a chunk.
      context: steps at the start of a sequence whose latents are sampled.
      online: whether there is an online queue.
    """

    name: str
    length: int
    capacity: float | None
    bytes: float | Literal["auto"]
    chunksize: int
    context: int
    online: bool

    def __post_init__(self) -> None:
        if not _is_whole(self.length, 1):
            raise ValueError(
                f"Expected sequences of 1 step or more, got {self.length!r}."
            )
        if self.capacity is not None and not _is_number(self.capacity, 1):
            raise ValueError(
                f"Expected capacity >= 1 as a number, or None, got {self.capacity!r}."
            )
        if not _is_whole(self.chunksize, 1):
            raise ValueError(f"Expected chunksize >= 1, got {self.chunksize!r}.")
        if not (_is_whole(self.context, 0) and self.context <= self.length):
            raise ValueError(
                f"Expected a context from 0 to the length of sequences, {self.length}, "
                f"got {self.context!r}."
            )
        number = isinstance(self.bytes, int | float) and self.bytes > 0
        if self.bytes != "auto" and not number:
            raise ValueError(
                f"Expected bytes as a positive number or 'auto', got {self.bytes!r}."
            )


@dataclasses.dataclass(frozen=True)
class BufferSizes:
    """The sizes of a buffer.

    Args:
      capacity: number of items, which are starts of sequences.
      chunksize: steps in a chunk.
      chunks: number of chunks that fit.
    """

    capacity: int
    chunksize: int
    chunks: int


def plan_sizes(settings: ReplaySettings, step_bytes: int) -> BufferSizes:
    """Decides the sizes of a buffer, once the bytes of a step are known.

    Raises:
      ReplayMemoryError: an explicit limit is too small for the capacity, or the memory
        is too small for one sequence.
    """
    name, length, limit = settings.name, settings.length, settings.bytes
    step_bytes += INDEX_BYTES
    nbytes = available_bytes() * AUTO_SHARE if limit == "auto" else float(limit)
    fits = int(nbytes // step_bytes)
    capacity = wanted = None if settings.capacity is None else int(settings.capacity)
    if capacity is not None and fits < capacity:
        problem = (
            f"Replay '{name}' should hold {capacity} steps of {step_bytes} bytes, "
            f"{capacity * step_bytes / 1e9:.3g} GB, but "
        )
        if limit != "auto":
            raise ReplayMemoryError(
                f"{problem}bytes={limit:.4g} holds {fits} steps. Lower the capacity "
                "to that, raise bytes, or use bytes='auto'."
            )
        logger.warning(
            "%s%.3g GB of memory, %d%% of what is available, hold %d steps. The "
            "capacity shrinks to that.",
            problem,
            nbytes / 1e9,
            100 * AUTO_SHARE,
            fits,
        )
        capacity = fits
    # The available memory changes from run to run, the size of chunks should not.
    stable = wanted if limit == "auto" else (wanted or fits)
    size = settings.chunksize
    if stable is not None:
        size = min(size, max(1, stable // _MIN_CHUNKS))
    chunks = min(fits, _MAX_STEPS) // size
    if capacity is not None:
        chunks = min(chunks, 2 * -(-(capacity + length) // size) + _SPARE_CHUNKS)
    if chunks < chunks_per_worker(length, size) + 1:
        raise ReplayMemoryError(
            f"Replay '{name}' may use {nbytes / 1e9:.3g} GB, which holds {fits} steps "
            f"of {step_bytes} bytes. One sequence of {length} in chunks of {size} "
            f"needs {(chunks_per_worker(length, size) + 1) * size}. Raise bytes, or "
            "lower chunksize or the length of sequences."
        )
    return BufferSizes(capacity or chunks * size, size, chunks)


def chunks_per_worker(length: int, size: int) -> int:
    """Returns how many chunks a worker's unfinished sequences may span."""
    return 1 + -(-(length - 1) // size)


def available_bytes() -> int:
    """Returns the available memory, within the limits of a container or job."""
    return int(min(psutil.virtual_memory().available, cgroup_bytes_left()))


def cgroup_bytes_left(membership: Path = _MEMBERSHIP, root: Path = _CGROUPS) -> float:
    """Returns the bytes until the first limit is reached; infinite without a limit.

    Args:
      membership: file that lists the groups of the process.
      root: folder of all groups; version 1 has a subfolder for each kind of resource.
    """
    return min(
        (_left(folder, *files) for folder, files in _groups(membership, root)),
        default=math.inf,
    )


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yields the folders of groups that may limit memory, with their file names."""
    # Always the roots: inside a container they are the container's own groups, even if
    # the list names groups as seen from outside, which have no folder here.
    yield root, _FILES
    yield root / "memory", _FILES_V1
    for controllers, path in _memberships(membership):
        if not controllers:
            yield from ((x, _FILES) for x in _with_parents(root, path))
        elif "memory" in controllers.split(","):
            yield from ((x, _FILES_V1) for x in _with_parents(root / "memory", path))


def _memberships(membership: Path) -> list[tuple[str, str]]:
    """Returns controllers and path of each line 'number:controllers:path'."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # Only Linux has control groups.
        return []
    fields = [line.split(":", 2) for line in lines]
    return [(field[1], field[2]) for field in fields if len(field) == 3]


def _with_parents(root: Path, path: str) -> list[Path]:
    # A path with '..' is a group beside the container's own, whose limits cannot be
    # read from inside.
    parts = PurePosixPath(path.lstrip("/")).parts
    if ".." in parts:
        return []
    return [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]


def _left(folder: Path, limit: str, used: str) -> float:
    try:
        left = int((folder / limit).read_text()) - int((folder / used).read_text())
    except (OSError, ValueError):  # No such file, or 'max': there is no limit.
        return math.inf
    return max(0, left + _cached(folder))


def _cached(folder: Path) -> int:
    """Returns the bytes of files in memory, which are given up when needed."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        found = {name: int(value) for name, value in map(str.split, lines)}
    except (OSError, ValueError):
        return 0
    # In version 1 the groups below are included only in the total.
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, numbers.Integral) and int(value) >= low


def _is_number(value: Any, low: float) -> bool:
    return isinstance(value, numbers.Real) and low <= float(value) < math.inf
