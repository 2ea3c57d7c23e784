"""Folders, buffers and checkpoints for the tests of replay."""

from __future__ import annotations

import os
import tempfile

import pytest

from embodied.checkpoint import Checkpoint
from embodied.replay import Replay


@pytest.fixture
def memory_folder():
    """Makes temporary folders, if possible in memory, where syncing is quick."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return lambda: tempfile.TemporaryDirectory(dir=place)


@pytest.fixture
def make(tmp_path):
    """Makes buffers that are saved below one folder."""

    def make(length=3, capacity=None, directory=tmp_path / "replay", **kwargs):
        kwargs = {"chunksize": 8, "context": 1, **kwargs}
        return Replay(length, capacity, directory, **kwargs)

    return make


@pytest.fixture
def checkpoint(tmp_path):
    """A Checkpoint that keeps two saves."""
    return Checkpoint(tmp_path, keep=2)
