"""Where the arrays of a message lie in its payload. Any process.

Arrays start at multiples of 64 bytes, whether in a frame or in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from embodied.rpc.trees import array_leaves, unflatten

ALIGN = 64


class Leaf(NamedTuple):
    """Where one array of a message lies."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # From the start of the payload.
    nbytes: int


class Spec:
    """Method, structure, dtypes and shapes of a message, and its payload's layout.

    The structure is one of `embodied/rpc/trees.py`.
    """

    __slots__ = (
        "_named",
        "encoded",
        "leaves",
        "method",
        "nbytes",
        "room",
        "row",
        "structure",
    )

    def __init__(self, method: str, structure: tuple, encoded: bytes):
        self.method = method
        self.structure = structure
        self.encoded = encoded
        self.row: tuple | None = None  # Of a stack, once it was asked for.
        self.leaves: list[Leaf] = []
        offset = 0
        for dtype, shape in array_leaves(structure):
            nbytes = math.prod(shape) * dtype.itemsize
            self.leaves.append(Leaf(dtype, shape, offset, nbytes))
            offset += -(-nbytes // ALIGN) * ALIGN
        self.nbytes = offset  # Of the payload, each array padded.
        self.room = block_bytes(offset)
        # Of the commonest structure, a dict of arrays, which is quick to build.
        self._named: list[tuple] | None = None
        flat = structure[0] == "d" and all(child[0] == "a" for child in structure[2])
        if flat and all(leaf.nbytes for leaf in self.leaves):
            self._named = list(zip(structure[1], self.leaves))

    def build(self, buffer: Any, start: int, values: Sequence[Any]) -> Any:
        """Puts the arrays of a payload and plain values together again."""
        if self._named is None or values:
            arrays = payload_arrays(self, buffer, start)
            return unflatten(self.structure, arrays, values)
        return {
            key: np.ndarray(shape, dtype, buffer, start + offset)
            for key, (dtype, shape, offset, _) in self._named
        }


def block_bytes(nbytes: int) -> int:
    """The size of a block of memory that so many bytes fit in: a power of two."""
    return 1 << max(12, (nbytes - 1).bit_length())


def payload_arrays(spec: Spec, buffer: Any, start: int = 0) -> list[np.ndarray]:
    """Returns the arrays of a payload as views of `buffer`, which they keep alive."""
    return [
        np.ndarray(shape, dtype, buffer, start + offset)
        if nbytes
        else np.empty(shape, dtype)
        for dtype, shape, offset, nbytes in spec.leaves
    ]


def payload_slices(spec: Spec, buffer: Any, start: int = 0) -> list[memoryview]:
    """Returns the bytes of each array of a payload, empty ones left out."""
    view = memoryview(buffer)
    return [
        view[start + leaf.offset : start + leaf.offset + leaf.nbytes]
        for leaf in spec.leaves
        if leaf.nbytes
    ]


def as_bytes(array: np.ndarray) -> Any:
    """Returns an array's bytes, without a copy if it is large and contiguous."""
    if array.nbytes < 1024:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
