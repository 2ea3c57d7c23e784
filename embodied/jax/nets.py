"""Layers as plain pytrees, and their initial weights. Agent process.

Parameters are float32. Linear layers and convolutions run in the compute dtype, with
their weights cast to it; norms and activations run in float32.

Layers are made without weights first; then the weights of all of them are drawn at
once, since a random draw per layer takes long to compile.

    recipes: Recipes = {}
    layer = Builder(recipes, 'enc', ...).linear('mlp0', 7, 16)
    weights = draw(key, recipes)    # {'enc/mlp0/kernel': ...}
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

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
# A normal truncated at two standard deviations has the deviation 1 / 1.1368.
TRUNCATION = 1.1368
DISTRIBUTIONS = ("trunc_normal", "normal", "uniform")

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


@jax.custom_vjp
def add_bias(x: Array, bias: Array) -> Array:
    """Adds a bias to the last axes of `x`, in the dtype of `x`.

    The gradient of the bias is summed in float32. JAX would sum it in the dtype of `x`:
    where a million bfloat16 numbers cancel, the result is mostly rounding error.
    """
    return x + bias.astype(x.dtype)


def _add_bias(x: Array, bias: Array) -> tuple[Array, Array]:
    return add_bias(x, bias), bias


def _add_bias_backward(bias: Array, gradient: Array) -> tuple[Array, Array]:
    if gradient.dtype == jnp.bfloat16:
        # Otherwise the compiler sums the gradient in the precision before rounding, and
        # keeps it in that precision as well.
        gradient = jax.lax.optimization_barrier(gradient)
    total = f32(gradient).sum(tuple(range(gradient.ndim - bias.ndim)))
    return gradient, total.astype(bias.dtype)


add_bias.defvjp(_add_bias, _add_bias_backward)


@jax.custom_vjp
def whole_gradient(x: Array) -> Array:
    """Returns `x`, whose gradient is computed before anything reads it.

    The gradient of an array of which slices are used is a sum. Compilers compute it
    again in each kernel that reads it.
    """
    return x


whole_gradient.defvjp(
    lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)


class Linear(eqx.Module):
    """Dense layer: [..., in] to [..., out]."""

    kernel: Array  # [in, out] float32
    bias: Array  # [out] float32
    dtype: str = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        """Multiplies and adds the bias, in the compute dtype."""
        return add_bias(x.astype(self.dtype) @ self.weight, self.bias)

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


def known_linear(layer: Linear, x: Array, y: Array) -> Array:
    """Returns y = layer(x[:len(y)]), which is known, with the gradient of the layer.

    Args:
      layer: dense layer.
      x: [N + n, in].
      y: [N, out].
    """
    return _known_linear(layer.weight, layer.bias, x, y)


@jax.custom_vjp
def _known_linear(kernel: Array, bias: Array, x: Array, y: Array) -> Array:
    return y


def _known_linear_forward(
    kernel: Array, bias: Array, x: Array, y: Array
) -> tuple[Array, Any]:
    return y, (kernel, bias, x)


def _known_linear_backward(
    saved: Any, gradient: Array
) -> tuple[Array, Array, Array, None]:
    kernel, bias, x = saved
    by_bias = f32(gradient).sum(0).astype(bias.dtype)
    # With zeros for the rest of `x`, since a part of it would be a copy.
    gradient = jnp.pad(gradient, ((0, len(x) - len(gradient)), (0, 0)))
    return x.T @ gradient, by_bias, gradient @ kernel.T, None


_known_linear.defvjp(_known_linear_forward, _known_linear_backward)


class BlockLinear(Linear):
    """Dense layer with a block-diagonal kernel: [..., in] to [..., out].

    The kernel is [blocks, in / blocks, out / blocks]; its block k multiplies block k of
    the input.
    """

    def __call__(self, x: Array) -> Array:
        """Multiplies and adds the bias, in the compute dtype."""
        return add_bias(block_matmul(x.astype(self.dtype), self.weight), self.bias)


class Conv(eqx.Module):
    """Convolution of maps [..., H, W, in], same padding.

    With `stride` 2 it halves the map, or doubles it if `transposed`.
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
        x = add_bias(x, self.bias)
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
        x = x * rms_factor(x) * self.scale
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
        """Continues from the output of `linear0`, for callers that have it already."""
        for index in range(self.layers):
            if index:
                x = self.parts[f"linear{index}"](x)
            x = activate(self.parts[f"norm{index}"], x, self.act, self.dtype)
        return x


def block_matmul(x: Array, kernel: Array, dtype: Any = None) -> Array:
    """Multiplies [..., g * i] by blocks [g, i, o] to [..., g * o], of another dtype."""
    blocks, inputs, outputs = kernel.shape
    x = x.reshape((*x.shape[:-1], blocks, inputs))
    x = jnp.einsum("...gi,gio->...go", x, kernel, preferred_element_type=dtype)
    return x.reshape((*x.shape[:-2], blocks * outputs))


@jax.custom_vjp
def wide_matmul(x: Array, kernel: Array) -> Array:
    """Multiplies by a kernel [in, out] or by blocks; the result is float32.

    Devices add up products of bfloat16 numbers in float32. A norm that reads the result
    then needs no conversion, which compilers cannot always make a part of the norm. The
    gradient is rounded to the dtype of `x` before it is multiplied.
    """
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    if kernel.ndim == 2:
        y = jnp.matmul(x, kernel, preferred_element_type=wide)
    else:
        y = block_matmul(x, kernel, wide)
    # What is added to the result is not made a part of the product, which would need it
    # in an array of its own.
    return jax.lax.optimization_barrier(y)


def _wide_matmul(x: Array, kernel: Array) -> tuple[Array, Any]:
    return wide_matmul(x, kernel), (x, kernel)


def _wide_matmul_backward(saved: Any, gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    _, pull = jax.vjp(jnp.matmul if kernel.ndim == 2 else block_matmul, x, kernel)
    return pull(gradient.astype(x.dtype))


wide_matmul.defvjp(_wide_matmul, _wide_matmul_backward)


def activate(norm: Norm, x: Array, act: str, dtype: str) -> Array:
    """Norm and activation in float32, then back to the compute dtype."""
    usual = norm.scale is not None and norm.kind == "rms" and act == "silu"
    if usual and dtype == "bfloat16":
        return rms_silu(x, norm.scale, dtype)
    return ACTIVATIONS[act](norm(x)).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_silu(x: Array, scale: Array, dtype: str) -> Array:
    """RMS norm and SiLU, with a backward pass that keeps no map in float32.

    The ordinary gradient needs the slope of each element twice, for the norm's sum over
    channels and for the result. So compilers write the slope to memory, in float32,
    which takes accelerators longer than computing it again.

    Args:
      x: [..., units].
      scale: [units] float32.
      dtype: dtype of the result.
    """
    return _rms_silu(x, scale, dtype)[0]


def _rms_silu(x: Array, scale: Array, dtype: str) -> tuple[Array, Any]:
    factor = rms_factor(f32(x))
    result = jax.nn.silu(f32(x) * factor * scale).astype(dtype)
    return result, (x, scale, factor)


def _rms_silu_backward(dtype: str, saved: Any, gradient: Array) -> tuple[Array, Array]:
    x, scale, factor = saved
    normed, gradient = f32(x) * factor, f32(gradient)
    y = normed * scale
    # The slope is computed by tanh here and by the sigmoid below: if the expressions
    # were the same, the compiler would compute it once and keep it.
    half = jnp.tanh(0.5 * y)
    slope = 0.5 * (1 + half) + 0.25 * y * (1 - half * half)
    share = (gradient * slope * y).mean(-1, keepdims=True)
    sigmoid = jax.nn.sigmoid(y)
    inner = gradient * sigmoid * (1 + y * (1 - sigmoid))
    by_scale = (inner * normed).sum(tuple(range(x.ndim - 1)))
    return ((inner * scale - normed * share) * factor).astype(x.dtype), by_scale


rms_silu.defvjp(_rms_silu, _rms_silu_backward)


def rms_factor(x: Array) -> Array:
    """Factor [..., 1] that scales [..., units] to a root mean square of one."""
    # Nothing follows the sum but the root, which is then a part of the sum's kernel.
    squares = (jnp.square(x) + NORM_EPSILON) / x.shape[-1]
    return jax.lax.rsqrt(squares.sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Distribution that the initial weights of a kernel [..., in, out] are drawn from.

    Attributes:
      shape: shape of the kernel.
      distribution: one of `DISTRIBUTIONS`.
      fan: `in`, `out` or `avg`: which number of units to divide the variance by.
      scale: factor of the standard deviation; 0 for zeros.
    """

    shape: tuple[int, ...]
    distribution: str
    fan: str
    scale: float

    @property
    def deviation(self) -> float:
        """Standard deviation of the weights; for `uniform` their bound."""
        outer = math.prod(self.shape[:-2])
        inputs, outputs = outer * self.shape[-2], outer * self.shape[-1]
        fans = {"in": inputs, "out": outputs, "avg": (inputs + outputs) / 2}
        return self.scale * math.sqrt(1 / fans[self.fan])


Recipes = dict[str, Recipe]  # By flat name.


@dataclasses.dataclass(frozen=True)
class Builder:
    """Makes layers whose kernels are zeros, and adds their recipes.

    Attributes:
      recipes: gets the recipe of each kernel.
      path: flat name of the module that the layers belong to.
      winit: distribution and fan, such as `trunc_normal_in`.
      norm: kind of norms: `rms`, `layer` or `none`.
      act: name of the activation.
      dtype: compute dtype.
    """

    recipes: Recipes
    path: str
    winit: str
    norm: str
    act: str
    dtype: str

    @classmethod
    def of(
        cls, recipes: Recipes, path: str, config: Mapping[str, Any], dtype: str
    ) -> Builder:
        """Makes a builder with winit, norm and act from the module's config."""
        options = (config["winit"], config["norm"], config["act"])
        return cls(recipes, path, *options, dtype)

    def linear(self, name: str, inputs: int, units: int, scale: float = 1.0) -> Linear:
        """A dense layer."""
        kernel = self._kernel(name, (inputs, units), scale)
        return Linear(kernel, _zeros(units), self.dtype)

    def block(self, name: str, inputs: int, units: int, blocks: int) -> BlockLinear:
        """A block layer; `blocks` divides inputs and units."""
        if inputs % blocks or units % blocks:
            raise ValueError(
                f"{self.path}/{name} expected a number of blocks that divides its "
                f"inputs ({inputs}) and units ({units}), got {blocks}."
            )
        shape = (blocks, inputs // blocks, units // blocks)
        return BlockLinear(self._kernel(name, shape, 1.0), _zeros(units), self.dtype)

    def conv(
        self,
        name: str,
        inputs: int,
        units: int,
        size: int,
        scale: float = 1.0,
        stride: int = 1,
        transposed: bool = False,
    ) -> Conv:
        """A convolution with a square kernel."""
        kernel = self._kernel(name, (size, size, inputs, units), scale)
        return Conv(kernel, _zeros(units), self.dtype, stride, transposed)

    def scale(self, units: int) -> Norm:
        """A norm of `units` values."""
        ones = _zeros(units) + 1 if self.norm != "none" else None
        shift = _zeros(units) if self.norm == "layer" else None
        return Norm(ones, shift, self.norm)

    def mlp(self, inputs: int, units: int, layers: int) -> MLP:
        """An MLP, under the name `mlp`."""
        parts: dict[str, Any] = {}
        for index in range(layers):
            parts[f"linear{index}"] = self.linear(f"mlp/linear{index}", inputs, units)
            parts[f"norm{index}"] = self.scale(units)
            inputs = units
        return MLP(parts, layers, self.act, self.dtype)

    def _kernel(self, name: str, shape: tuple[int, ...], scale: float) -> Any:
        distribution, _, fan = self.winit.rpartition("_")
        if distribution not in DISTRIBUTIONS or fan not in ("in", "out", "avg"):
            raise ValueError(
                f"Initialisation expected {', '.join(DISTRIBUTIONS)} with _in, _out or "
                f"_avg, got {self.winit!r}."
            )
        recipe = Recipe(shape, distribution, fan, scale)
        self.recipes[f"{self.path}/{name}/kernel"] = recipe
        return np.zeros(shape, np.float32)


def draw(key: Array, recipes: Recipes) -> dict[str, Array]:
    """Draws the kernels of all recipes, by name."""
    kernels = {}
    for index, distribution in enumerate(DISTRIBUTIONS):
        chosen = {
            name: recipe
            for name, recipe in sorted(recipes.items())
            if recipe.distribution == distribution and recipe.scale
        }
        sizes = [math.prod(recipe.shape) for recipe in chosen.values()]
        pool = _standard(jax.random.fold_in(key, index), distribution, sum(sizes))
        start = 0
        for (name, recipe), size in zip(chosen.items(), sizes):
            values = pool[start : start + size].reshape(recipe.shape)
            kernels[name] = values * recipe.deviation
            start += size
    for name, recipe in recipes.items():
        if not recipe.scale:
            kernels[name] = jnp.zeros(recipe.shape, jnp.float32)
    return kernels


def _standard(key: Array, distribution: str, size: int) -> Array:
    """Draws values that are to be multiplied by `Recipe.deviation`.

    Their standard deviation is one if they are normal; uniform ones are in -1..1, as in
    the reference.
    """
    if not size:
        return jnp.zeros(0, jnp.float32)
    if distribution == "trunc_normal":
        values = jax.random.truncated_normal(key, -2.0, 2.0, (size,), jnp.float32)
        return values * TRUNCATION
    if distribution == "normal":
        return jax.random.normal(key, (size,), jnp.float32)
    return jax.random.uniform(key, (size,), jnp.float32, -1.0, 1.0)


def _zeros(units: int) -> Any:
    return np.zeros(units, np.float32)
