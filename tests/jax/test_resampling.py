"""Convolutions that work on the smaller map equal the plain implementation."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_testing import compute

from embodied.jax.nets import Conv, Linear
from embodied.jax.resampling import (
    doubled_conv,
    largest,
    max_pool,
    pooled_conv,
    to_squares,
)


def make_conv(size, inputs, outputs, seed=0):
    rng = np.random.default_rng(seed)
    kernel = rng.standard_normal((size, size, inputs, outputs), np.float32)
    bias = rng.standard_normal(outputs, np.float32)
    return Conv(jnp.asarray(kernel), jnp.asarray(bias), "float32")


def plain_pooled(conv, x):
    x = conv(x)
    *lead, height, width, channels = x.shape
    x = x.reshape((*lead, height // 2, 2, width // 2, 2, channels))
    return x.max((-4, -2))


def plain_doubled(conv, x):
    return conv(x.repeat(2, -3).repeat(2, -2))


def ordinary_pooled(conv, x):
    return pooled_conv(conv, x, halve=False)


def halved_conv(conv, x):
    return doubled_conv(conv, to_squares(x), halve=True)


def squares_out(conv, x):
    return doubled_conv(conv, x, squares=True)


def squares_in_and_out(conv, x):
    return doubled_conv(conv, to_squares(x), halve=True, squares=True)


def plain_squares(conv, x):
    return to_squares(plain_doubled(conv, x))


CASES = [
    (pooled_conv, plain_pooled),
    (ordinary_pooled, plain_pooled),
    (doubled_conv, plain_doubled),
    (halved_conv, plain_doubled),
    (squares_out, plain_squares),
    (squares_in_and_out, plain_squares),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize(("ours", "plain"), CASES)
def test_outputs_equal_the_plain_way(ours, plain, size):
    conv = make_conv(size, 3, 5)
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 12, 3), np.float32)
    result, expected = compute(lambda *args: (ours(*args), plain(*args)), conv, x)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ours", "plain"), CASES)
def test_gradients_equal_the_plain_way(ours, plain):
    conv = make_conv(5, 2, 4)
    x = np.random.default_rng(1).standard_normal((2, 8, 8, 2), np.float32)

    def gradients(conv, x):
        return [
            jax.grad(lambda *args, of=function: jnp.sin(of(*args)).sum(), (0, 1))(
                conv, x
            )
            for function in (ours, plain)
        ]

    result, expected = map(jax.tree.leaves, compute(gradients, conv, x))
    for one, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_squares_have_neighbouring_pixels_together():
    x = jnp.arange(2 * 4 * 6 * 3).reshape((2, 4, 6, 3))
    squares = to_squares(x)
    for row, column in np.ndindex(2, 3):
        square = x[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        expected = square.reshape((2, 4, 3))
        np.testing.assert_array_equal(squares[:, row, column], expected)


@pytest.mark.parametrize("ours", [pooled_conv, doubled_conv])
def test_the_compute_dtype_is_kept(ours):
    conv = make_conv(5, 3, 4)
    conv = Conv(conv.kernel, conv.bias, "bfloat16")
    result = jax.eval_shape(ours, conv, np.zeros((2, 8, 8, 3), np.float32))
    assert result.dtype == jnp.bfloat16


@pytest.mark.parametrize(("ours", "plain"), CASES)
@pytest.mark.parametrize("inputs", [3, 8])
def test_channels_that_are_added_for_the_device_change_nothing(ours, plain, inputs):
    conv = make_conv(5, inputs, 4)
    x = np.random.default_rng(1).integers(-4, 5, (2, 8, 8, inputs)).astype(np.float32)
    # Small integers, which are exact in bfloat16, as are their products.
    kernel, bias = jnp.round(conv.kernel), jnp.round(conv.bias)
    halves = Conv(kernel, bias, "bfloat16"), Conv(kernel, bias, "float32")
    result, expected = compute(lambda x: (ours(halves[0], x), plain(halves[1], x)), x)
    np.testing.assert_array_equal(result, expected.astype(jnp.bfloat16))


def test_max_pool_takes_the_largest_of_each_square():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    np.testing.assert_array_equal(max_pool(x)[0, :, :, 0], [[5, 7], [13, 15]])


def test_the_gradient_of_max_pool_goes_to_the_largest():
    x = np.random.default_rng(0).permutation(96).reshape(2, 4, 6, 2).astype(np.float32)
    weights = np.arange(24.0, dtype=np.float32).reshape(2, 2, 3, 2)
    gradient = compute(jax.grad(lambda x: (weights * max_pool(x)).sum()), x)
    expected = np.zeros_like(x)
    for n, h, w, c in np.ndindex(weights.shape):
        square = x[n, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2, c]
        row, column = np.unravel_index(square.argmax(), (2, 2))
        expected[n, 2 * h + row, 2 * w + column, c] = weights[n, h, w, c]
    np.testing.assert_array_equal(gradient, expected)


def test_the_gradient_goes_to_the_first_of_the_largest():
    values = np.array(list(itertools.product([0, 1, 2], repeat=4)), np.float32)
    columns = values.T  # [4, C]
    gradient = compute(jax.grad(lambda x: 3 * largest(x, (-2,)).sum()), columns)
    expected = 3 * np.eye(4)[np.argmax(values, -1)]
    np.testing.assert_array_equal(gradient, expected.T)
    np.testing.assert_array_equal(
        compute(lambda x: largest(x, (-2,)), columns), values.max(-1)
    )


@pytest.mark.parametrize("place", range(4))
def test_what_is_not_a_number_is_not_hidden(place):
    values = jnp.ones((4, 2)).at[place, 0].set(jnp.nan)
    np.testing.assert_array_equal(jnp.isnan(largest(values, (-2,))), [True, False])


@pytest.mark.parametrize(
    "layer",
    [
        lambda kernel, bias, x: Linear(kernel[0, 0], bias, "bfloat16")(x),
        lambda kernel, bias, x: Conv(kernel, bias, "bfloat16")(x),
        lambda kernel, bias, x: pooled_conv(Conv(kernel, bias, "bfloat16"), x),
        lambda kernel, bias, x: doubled_conv(Conv(kernel, bias, "bfloat16"), x),
    ],
    ids=["linear", "conv", "pooled", "doubled"],
)
def test_gradients_of_biases_are_summed_in_float32(layer):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 16, 16, 2)), jnp.bfloat16)
    kernel, bias = jnp.ones((3, 3, 2, 4)), jnp.zeros(4)
    y, pull = jax.vjp(lambda bias: layer(kernel, bias, x), bias)
    # Many numbers that mostly cancel in the sum.
    gradient = jnp.asarray(rng.normal(0.01, 1, size=y.shape), y.dtype)
    expected = np.asarray(gradient, np.float64).reshape((-1, 4)).sum(0)
    result = compute(pull, gradient)[0]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-2)
