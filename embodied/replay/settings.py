"""The settings of a buffer, checked where they enter. Any process."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal


class ReplayMemoryError(MemoryError, ValueError):
    """What a buffer is to hold does not fit into the memory that it may use."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `Replay` is told; see there.

    Args:
      name: for messages.
      length: steps in a sequence.
      capacity: items wanted; None for as many as fit.
      bytes: memory to use, or 'auto' for a share of what is available.
      chunksize: steps in a chunk at most.
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


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, numbers.Integral) and int(value) >= low


def _is_number(value: Any, low: float) -> bool:
    return isinstance(value, numbers.Real) and float(value) >= low
