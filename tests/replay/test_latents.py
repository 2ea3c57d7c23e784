"""Latents come back as they were, and take little room."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embodied.replay import Replay
from embodied.replay.latents import make_codec

FLOATS = [np.dtype(x) for x in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)]


def round_trip(key, values):
    codec = make_codec(key, values.dtype, values.shape[1:])
    stored = codec.pack(values)
    assert stored.dtype == codec.dtype
    assert stored.shape == (len(values), *codec.shape)
    rows = np.arange(len(values))[None]
    out = np.empty((1, *values.shape), values.dtype)
    codec.gather(stored, rows, out)
    return stored, out[0]


@given(
    hnp.arrays(np.int64, hnp.array_shapes(min_dims=1, max_dims=3), elements=st.just(0)),
    st.integers(1, 300),
    st.sampled_from(FLOATS),
    st.data(),
)
def test_onehot_vectors_come_back_the_same(shape_of, classes, dtype, data):
    index = data.draw(
        hnp.arrays(np.int64, (2, *shape_of.shape), elements=st.integers(0, classes))
    )
    table = np.concatenate([np.eye(classes), np.zeros((1, classes))]).astype(dtype)
    values = table[index]
    stored, found = round_trip("dyn/stoch", values)
    assert found.dtype == dtype
    assert (found == values).all()
    assert stored.dtype == (np.uint8 if classes < 256 else np.uint16)
    assert (stored == index).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_other_floats_come_back_bit_by_bit(dtype):
    bits = np.random.default_rng(0).integers(0, 255, (3, 8 * dtype.itemsize), np.uint8)
    values = bits.view(dtype)  # Among them NaNs, whose bits differ too.
    stored, found = round_trip("dyn/deter", values)
    assert found.dtype == dtype
    assert (found.view(np.uint8) == bits).all()
    assert stored.nbytes == values.nbytes


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_class_indices_are_stored_as_they_are(dtype):
    values = np.array([[0, 3], [1, 2]], dtype)
    stored, found = round_trip("dyn/stoch", values)
    assert stored.dtype == found.dtype == dtype
    assert (found == values).all()


def test_a_flat_stoch_is_stored_as_it_is():
    values = np.array([[0.25, 0.75], [1, 0]], np.float32)
    assert (round_trip("dyn/stoch", values)[1] == values).all()


@pytest.mark.parametrize(
    "vector", [[0.5, 0.5], [1, 1], [0, 2], [np.nan, 0], [0, -1], [1, np.nan]]
)
def test_what_is_not_onehot_is_refused(vector):
    values = np.array([[[1, 0], vector]], np.float32)
    codec = make_codec("dyn/stoch", values.dtype, values.shape[1:])
    with pytest.raises(ValueError, match="Expected dyn/stoch to be one-hot"):
        codec.pack(values)


def test_too_many_classes_are_refused():
    with pytest.raises(ValueError, match="1 to 65535 classes"):
        make_codec("dyn/stoch", np.dtype(np.float32), (2, 1 << 16))


def test_a_refused_step_changes_nothing():
    replay = Replay(1, context=1)
    replay.add({"dyn/stoch": np.eye(3, dtype=np.float32)})
    with pytest.raises(ValueError, match="one-hot"):
        replay.add({"dyn/stoch": np.ones((3, 3), np.float32)})
    assert len(replay) == 1
    assert (replay.sample(1)["dyn/stoch"][0, 0] == np.eye(3)).all()


def test_latents_of_size12m_take_two_bytes_a_unit_and_one_a_class():
    step = {
        "dyn/deter": np.zeros(2048, ml_dtypes.bfloat16),
        "dyn/stoch": np.zeros((32, 16), np.float32),
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
