"""Convolutions that halve or double maps, without maps of twice the size.

Agent process. Accelerators are slow at convolutions with few channels on large maps.
`pooled_conv` and `doubled_conv` give the same results as the plain way, but compute on
the smaller map, where four neighbouring pixels are four groups of channels.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embodied.jax.nets import Array, Conv, add_bias

LAYOUT = ("NHWC", "HWIO", "NHWC")
CHANNELS = 8  # Matrix units take multiples of so many channels of 16 bits.


def pooled_conv(conv: Conv, x: Array, halve: bool = True) -> Array:
    """Convolves maps [..., 2H, 2W, C] and takes the largest of each 2x2 square.

    Args:
      conv: the convolution.
      x: the maps.
      halve: whether to compute on maps of half the size, with four times as many
        channels.
    """
    *lead, height, width, channels = x.shape
    x = x.reshape((-1, height, width, channels))
    if halve:
        kernel, padding = _block_kernel(conv.kernel)
        x = _convolve(_to_blocks(x), kernel, padding, conv.dtype)
        x = largest(x.reshape((*x.shape[:-1], 4, -1)), (-2,))
    else:
        size = conv.kernel.shape[0]
        x = _convolve(x, conv.kernel, ((size - 1) // 2, size // 2), conv.dtype)
        x = max_pool(x)
    # Equal to adding it before, where there are four times as many numbers to add it
    # to, and where devices have fewer ways to compute the convolution.
    x = add_bias(x, conv.bias)
    return x.reshape((*lead, *x.shape[1:]))


def max_pool(x: Array) -> Array:
    """Halves maps [..., 2H, 2W, C] to the largest value of each 2x2 square."""
    *lead, height, width, channels = x.shape
    x = x.reshape((*lead, height // 2, 2, width // 2, 2, channels))
    return largest(x, (-4, -2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def largest(x: Array, axes: tuple[int, ...]) -> Array:
    """Maximum of four values along `axes`, which are negative indices.

    The gradient goes to the first of the largest values. The backward pass needs one
    byte per result. The ordinary gradient, of a maximum or of a window reduction, reads
    all values again, or keeps a mask for each of them.
    """
    return _largest(x, axes)[0]


def _largest(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    places: list[list[Any]] = [[slice(None)] * x.ndim for _ in range(4)]
    for place, indices in zip(places, np.ndindex(*(x.shape[axis] for axis in axes))):
        for axis, index in zip(axes, indices):
            place[axis] = index
    a, b, c, d = (x[tuple(place)] for place in places)
    left, right = jnp.maximum(a, b), jnp.maximum(c, d)
    which = jnp.where(
        right > left, jnp.where(d > c, 3, 2), jnp.where(b > a, 1, 0)
    ).astype(jnp.uint8)
    return jnp.maximum(left, right), which


def _largest_backward(
    axes: tuple[int, ...], which: Array, gradient: Array
) -> tuple[Array]:
    # All four at once: the sum of four padded arrays takes three times as long.
    sizes = [1] * (gradient.ndim + len(axes))
    for axis in axes:
        sizes[axis] = 4 if len(axes) == 1 else 2
    order = jnp.arange(4, dtype=jnp.uint8).reshape(sizes)
    chosen = jnp.expand_dims(which, axes) == order
    zero = jnp.zeros((), gradient.dtype)
    return (jnp.where(chosen, jnp.expand_dims(gradient, axes), zero),)


largest.defvjp(_largest, _largest_backward)


def doubled_conv(
    conv: Conv, x: Array, halve: bool = False, squares: bool = False
) -> Array:
    """Repeats the pixels of maps [..., H, W, C] to 2H and 2W, and convolves.

    Args:
      conv: the convolution.
      x: the maps; with `halve`, as `to_squares` returns them.
      halve: whether to compute on maps of half the size, with four times as many
        channels. This is more arithmetic, but accelerators are faster at it if there
        are few channels.
      squares: whether to return maps as `to_squares` does.
    """
    *lead, height, width, channels = x.shape
    if halve:
        *lead, height, width, _, _ = x.shape
        channels *= 4
    x = x.reshape((-1, height, width, channels))
    pick, padding = _pick_pixels(conv.kernel.shape[0])
    pick = pick.sum(1)  # Both input pixels of a pair are repeats of the same one.
    kernel = jnp.einsum(
        "pau,qbv,uvco->pqcabo", pick, pick, conv.kernel, precision="highest"
    )
    kernel = kernel.reshape((*kernel.shape[:3], -1))
    if halve:
        kernel, padding = _block_kernel(kernel)
    x = _convolve(x, kernel, padding, conv.dtype)
    # Added here, where the bias is one number for each channel of the convolution.
    x = add_bias(x, jnp.tile(conv.bias, x.shape[-1] // conv.bias.size))
    if halve:
        x = _from_blocks(x)
    if squares:
        return x.reshape((*lead, *x.shape[1:3], 4, -1))
    x = _from_blocks(x)
    return x.reshape((*lead, *x.shape[1:]))


def to_squares(x: Array) -> Array:
    """Puts the pixels of each 2x2 square together.

    [..., 2H, 2W, C] becomes [..., H, W, 4, C].
    """
    *lead, height, width, channels = x.shape
    x = _to_blocks(x.reshape((-1, height, width, channels)))
    return x.reshape((*lead, height // 2, width // 2, 4, channels))


def _to_blocks(x: Array) -> Array:
    """Makes the pixels of each 2x2 square channels: [N, 2H, 2W, C] to [N, H, W, 4C]."""
    count, height, width, channels = x.shape
    x = x.reshape((count, height // 2, 2, width // 2, 2, channels))
    x = jnp.moveaxis(x, 2, 3)
    return x.reshape((count, height // 2, width // 2, 4 * channels))


def _from_blocks(x: Array) -> Array:
    """Undoes `_to_blocks`: [N, H, W, 4C] to [N, 2H, 2W, C]."""
    count, height, width, channels = x.shape
    x = x.reshape((count, height, width, 2, 2, channels // 4))
    x = jnp.moveaxis(x, 3, 2)
    return x.reshape((count, 2 * height, 2 * width, channels // 4))


def _block_kernel(kernel: Array) -> tuple[Array, tuple[int, int]]:
    """Returns kernel [P, P, 4C, 4O] and padding that apply [K, K, C, O] to blocks."""
    pick, padding = _pick_pixels(kernel.shape[0])
    # Offsets p q, input pixels s t, output pixels a b, taps u v.
    result = jnp.einsum(
        "psau,qtbv,uvco->pqstcabo", pick, pick, kernel, precision="highest"
    )
    inputs = 4 * kernel.shape[2]
    return result.reshape((*result.shape[:2], inputs, -1)), padding


def _convolve(x: Array, kernel: Array, padding: tuple[int, int], dtype: str) -> Array:
    missing = -x.shape[-1] % CHANNELS
    if missing and dtype == "bfloat16":
        # Here, a compiler can pad while it arranges the map. Later, it takes a copy.
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, 0)))
    return jax.lax.conv_general_dilated(
        x.astype(dtype),
        kernel.astype(dtype),
        (1, 1),
        (padding, padding),
        dimension_numbers=LAYOUT,
    )


def _pick_pixels(size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Computes which tap of a kernel meets which pixel, along one axis.

    Tap u of a kernel that is centred at pixel a of a pair (0 or 1) meets pixel
    r = a + u - before, where `before` is the padding: pixel r mod 2 of the pair that
    is r // 2 further on.

    Returns:
      [offsets, input pixel, output pixel, taps], one where they meet, else zero; and
      the padding of the smaller map before and after.
    """
    before = (size - 1) // 2
    first, last = -before // 2, (size - before) // 2
    pick = np.zeros((last - first + 1, 2, 2, size), np.float32)
    for pixel in range(2):
        for tap in range(size):
            place = pixel + tap - before
            pick[place // 2 - first, place % 2, pixel, tap] = 1
    return pick, (-first, last)
