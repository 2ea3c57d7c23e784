"""How many steps fit into memory, and how they are cut into chunks. Replay."""

from __future__ import annotations

import dataclasses
import logging

import psutil

from embodied.replay import cgroups
from embodied.replay.settings import ReplayMemoryError, Settings
from embodied.replay.slots import MAX_SLOT

logger = logging.getLogger("embodied.replay")

# Two buffers, for training and evaluation, usually share a process.
AUTO_SHARE = 0.4
INDEX_BYTES = 40  # Per step, of the buffer's and the selector's own arrays.
_MIN_CHUNKS = 32  # Small buffers get small chunks, so that few steps lie unused.
_SPARE_CHUNKS = 4096  # For many workers; not touched, and so not there, without them.


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a buffer.

    Args:
      capacity: items, that is starts of sequences.
      chunksize: steps in a chunk.
      chunks: number of chunks that fit.
    """

    capacity: int
    chunksize: int
    chunks: int


def make_plan(settings: Settings, step_bytes: int) -> Plan:
    """Decides how large a buffer becomes, once the bytes of a step are known.

    Raises:
      ReplayMemoryError: an explicit limit does not hold the capacity, or no limit
        holds one sequence.
    """
    name, length, limit = settings.name, settings.length, settings.bytes
    step_bytes += INDEX_BYTES
    nbytes = available_bytes() * AUTO_SHARE if limit == "auto" else float(limit)
    fits = int(nbytes // step_bytes)
    capacity = wanted = None if settings.capacity is None else int(settings.capacity)
    if capacity is not None and fits < capacity:
        problem = (
            f"Replay '{name}' is to hold {capacity} steps of {step_bytes} bytes, "
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
    # What is available changes from run to run, the size of chunks should not.
    stable = wanted if limit == "auto" else (wanted or fits)
    size = settings.chunksize
    if stable is not None:
        size = min(size, max(1, stable // _MIN_CHUNKS))
    chunks = min(fits, MAX_SLOT) // size
    if capacity is not None:
        chunks = min(chunks, 2 * -(-(capacity + length) // size) + _SPARE_CHUNKS)
    if chunks < chunks_per_worker(length, size) + 1:
        raise ReplayMemoryError(
            f"Replay '{name}' may use {nbytes / 1e9:.3g} GB, which holds {fits} steps "
            f"of {step_bytes} bytes. One sequence of {length} in chunks of {size} "
            f"needs {(chunks_per_worker(length, size) + 1) * size}. Raise bytes, or "
            "lower chunksize or the length of sequences."
        )
    return Plan(capacity or chunks * size, size, chunks)


def chunks_per_worker(length: int, size: int) -> int:
    """Chunks that a worker's unfinished sequences may lie in."""
    return 1 + -(-(length - 1) // size)


def available_bytes() -> int:
    """Returns the memory that can be used, also inside a container or a job."""
    return int(min(psutil.virtual_memory().available, cgroups.bytes_left()))
