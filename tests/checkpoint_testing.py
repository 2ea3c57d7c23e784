"""What tests of checkpoints share."""

from __future__ import annotations

import contextlib
import logging
import struct
from pathlib import Path

import numpy as np


def same(left, right):
    """Whether two trees are equal in values, types, dtypes, shapes and key order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray | np.generic):
        alike = left.dtype == right.dtype and left.shape == right.shape
        if left.dtype == np.longdouble:  # Its padding bytes are arbitrary.
            return alike and np.array_equal(left, right)
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    return left == right


def files_below(root):
    root = Path(root)
    return {x.relative_to(root).as_posix() for x in root.rglob("*") if x.is_file()}


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@contextlib.contextmanager
def warnings():
    """Collects the messages logged in this block; `caplog` spans all examples."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("embodied.checkpoint")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
