"""Latents come back as they were, and take little room."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from embodied.replay import Replay
from embodied.replay.chunks import Field

FLOATS = [np.dtype(x) for x in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)]


def round_trip(key, values):
    """Stores one step per value, and returns the sampled values in the same order."""
    replay = Replay(1, context=1)
    replay.add_batch({key: values, "row": np.arange(len(values))}, range(len(values)))
    batch = replay.sample(50 * len(values))
    rows = [int(np.flatnonzero(batch["row"][:, 0] == i)[0]) for i in range(len(values))]
    return batch[key][rows, 0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_come_back_bit_by_bit(dtype):
    bits = np.random.default_rng(0).integers(0, 255, (3, 8 * dtype.itemsize), np.uint8)
    values = bits.view(dtype)  # Includes NaNs with different bits.
    found = round_trip("dyn/deter", values)
    assert found.dtype == dtype
    assert (np.ascontiguousarray(found).view(np.uint8) == bits).all()
    assert Field("dyn/deter", dtype, (8,)).stored_dtype.itemsize == dtype.itemsize


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_class_indices_are_stored_as_they_are(dtype):
    values = np.array([[0, 3], [1, 2]], dtype)
    found = round_trip("dyn/stoch", values)
    assert found.dtype == dtype
    assert (found == values).all()


def test_latents_of_size12m_take_two_bytes_a_unit_and_one_a_class():
    step = {
        "dyn/deter": np.zeros(2048, ml_dtypes.bfloat16),
        "dyn/stoch": np.zeros(32, np.uint8),
    }
    replay = Replay(1, 2000, context=1)
    replay.add(step)
    stats = replay.stats()
    packed = stats["bytes"] / stats["chunks"] / (2000 // 32)
    assert 2 * 2048 + 32 <= packed <= 2 * 2048 + 32 + 64


def test_without_context_latents_are_dropped():
    replay = Replay(2, 100)
    replay.add({"reward": np.float32(0), "dyn/deter": np.zeros(1000, np.float32)})
    replay.add({"reward": np.float32(1), "dyn/deter": np.zeros(3, np.float32)})
    assert set(replay.sample(1)) == {"reward", "stepid"}
    assert replay.stats()["bytes"] < 1000
