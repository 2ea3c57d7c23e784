"""Layers as plain pytrees. Agent process.

Parameters are float32. Linear layers and convolutions run in the compute dtype, with
their weights cast to it; norms and activations run in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp

Array = jax.Array
Tree = Any  # A pytree of arrays.

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "elu": jax.nn.elu,
    "tanh": jnp.tanh,
}
NORM_EPSILON = 1e-4

sg = jax.lax.stop_gradient


def f32(x: Array) -> Array:
    """Casts to float32; float64 stays as it is."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def symlog(x: Array) -> Array:
    """Compresses large values: sign(x) log(1 + |x|)."""
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: Array) -> Array:
    """Inverse of symlog: sign(x) (exp(|x|) - 1)."""
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


class Linear(eqx.Module):
    """Dense layer: [..., in] to [..., out]."""

    kernel: Array  # [in, out] float32
    bias: Array  # [out] float32
    dtype: str = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        """Multiplies and adds the bias, in the compute dtype."""
        return x.astype(self.dtype) @ self.weight + self.offset

    @property
    def weight(self) -> Array:
        """The kernel in the compute dtype."""
        return self.kernel.astype(self.dtype)

    @property
    def offset(self) -> Array:
        """The bias in the compute dtype."""
        return self.bias.astype(self.dtype)

    def cast(self) -> Self:
        """The layer with its weights in the compute dtype."""
        return type(self)(self.weight, self.offset, self.dtype)


class BlockLinear(Linear):
    """Block k of the input meets block k of the kernel: [..., in] to [..., out].

    The kernel is [blocks, in / blocks, out / blocks].
    """

    def __call__(self, x: Array) -> Array:
        """Multiplies and adds the bias, in the compute dtype."""
        return block_matmul(x.astype(self.dtype), self.weight) + self.offset


class Conv(eqx.Module):
    """Convolution of maps [..., H, W, in], same padding.

    With `stride` 2 it halves the map; with `transposed` it doubles it.
    """

    kernel: Array  # [size, size, in, out] float32
    bias: Array  # [out] float32
    dtype: str = eqx.field(static=True)
    stride: int = eqx.field(static=True, default=1)
    transposed: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Array) -> Array:
        """Convolves and adds the bias, in the compute dtype."""
        lead = x.shape[:-3]
        x = x.reshape((-1, *x.shape[-3:])).astype(self.dtype)
        kernel = self.kernel.astype(self.dtype)
        strides, layout = (self.stride, self.stride), ("NHWC", "HWIO", "NHWC")
        if self.transposed:
            x = jax.lax.conv_transpose(
                x, kernel, strides, "SAME", dimension_numbers=layout
            )
        else:
            x = jax.lax.conv_general_dilated(
                x, kernel, strides, "SAME", dimension_numbers=layout
            )
        x = x + self.bias.astype(self.dtype)
        return x.reshape((*lead, *x.shape[1:]))


class Norm(eqx.Module):
    """Normalises the last axis in float32, and returns float32."""

    scale: Array | None  # [units] float32
    shift: Array | None  # [units] float32, of layer norm only
    kind: str = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        """Normalises [..., units]."""
        x = f32(x)
        if self.scale is None:
            return x
        if self.kind == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + NORM_EPSILON)
        x = x * self.scale
        return x if self.shift is None else x + self.shift


class MLP(eqx.Module):
    """Layers `linear0, norm0, linear1, norm1, ...`, each with an activation."""

    parts: dict[str, Any]
    layers: int = eqx.field(static=True)
    act: str = eqx.field(static=True)
    dtype: str = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        """Maps [..., in] to [..., units], in the compute dtype."""
        return self.after_first(self.parts["linear0"](x))

    def after_first(self, x: Array) -> Array:
        """Goes on from the output of `linear0`, for callers who have it already."""
        for index in range(self.layers):
            if index:
                x = self.parts[f"linear{index}"](x)
            x = activate(self.parts[f"norm{index}"], x, self.act, self.dtype)
        return x


def block_matmul(x: Array, kernel: Array) -> Array:
    """Multiplies [..., g * i] by blocks [g, i, o] to [..., g * o]."""
    blocks, inputs, outputs = kernel.shape
    x = x.reshape((*x.shape[:-1], blocks, inputs))
    x = jnp.einsum("...gi,gio->...go", x, kernel)
    return x.reshape((*x.shape[:-2], blocks * outputs))


def activate(norm: Norm, x: Array, act: str, dtype: str) -> Array:
    """Norm and activation in float32, then back to the compute dtype."""
    return ACTIVATIONS[act](norm(x)).astype(dtype)
