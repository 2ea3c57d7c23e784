"""Arrays that travel as one between host and device."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from embodied.jax.devices import Rows

DTYPES = [bool, np.uint8, np.int8, np.int32, np.uint32, np.float32, np.float16]
DTYPES += [ml_dtypes.bfloat16]


def make_tree(rows):
    rng = np.random.default_rng(rows)
    bytes_ = {
        np.dtype(dtype).name: rng.integers(0, 256, (rows, 5, 8), np.uint8)
        .view(np.uint8 if dtype is bool else dtype)
        .reshape((rows, 5, -1))
        for dtype in DTYPES
    }
    bytes_["bool"] = bytes_["bool"] % 2 == 0
    return bytes_, (rng.standard_normal(rows).astype(np.float32), {})


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        right = np.asarray(right)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()  # NaNs included.


@pytest.mark.parametrize("rows", [1, 16])
class TestRows:
    def test_from_the_host_to_a_compiled_function(self, rows):
        tree = make_tree(rows)
        joined = Rows.join(tree)
        assert isinstance(joined.block, np.ndarray) and joined.block.dtype == np.uint8
        assert_same(tree, jax.jit(Rows.split)(joined))

    def test_from_a_compiled_function_to_the_host(self, rows):
        tree = make_tree(rows)
        joined = jax.jit(Rows.join)(tree)
        assert isinstance(joined, Rows)
        assert_same(tree, jax.tree.map(np.asarray, joined).split())

    def test_it_is_one_array(self, rows):
        (block,) = jax.tree.leaves(Rows.join(make_tree(rows)))
        expected = sum(x.nbytes for x in jax.tree.leaves(make_tree(rows)))
        assert block.shape == (rows, expected // rows)


@given(
    arrays.arrays(
        st.sampled_from([np.float32, np.int32, np.uint8]),
        arrays.array_shapes(max_dims=3, min_side=0).filter(lambda shape: shape[0]),
    )
)
def test_any_shape(x):
    assert_same([x, x], Rows.join([x, x]).split())


def test_both_sides_agree_on_the_bytes():
    tree = {"a": np.arange(6, dtype=np.int32).reshape((2, 3)), "b": np.ones(2, bool)}
    host = Rows.join(tree)
    device = Rows.join(jax.tree.map(jnp.asarray, tree))
    assert host.columns == device.columns and host.treedef == device.treedef
    np.testing.assert_array_equal(host.block, device.block)
