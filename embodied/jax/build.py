"""Making layers, and drawing their initial weights. Agent process.

Layers are made without weights first; then the weights of all of them are drawn at
once, since a random draw per layer takes long to compile.

    recipes: Recipes = {}
    layer = Builder(recipes, 'enc', ...).linear('mlp0', 7, 16)
    weights = draw(key, recipes)    # {'enc/mlp0/kernel': ...}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embodied.jax.nets import MLP, Array, BlockLinear, Conv, Linear, Norm

# A normal truncated at two standard deviations has the deviation 1 / 1.1368.
TRUNCATION = 1.1368
DISTRIBUTIONS = ("trunc_normal", "normal", "uniform")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to draw a kernel [..., in, out]: its variance is scale^2 over its fan."""

    shape: tuple[int, ...]
    distribution: str
    fan: str
    scale: float

    @property
    def deviation(self) -> float:
        """Standard deviation of the weights."""
        outer = math.prod(self.shape[:-2])
        inputs, outputs = outer * self.shape[-2], outer * self.shape[-1]
        fans = {"in": inputs, "out": outputs, "avg": (inputs + outputs) / 2}
        return self.scale * math.sqrt(1 / fans[self.fan])


Recipes = dict[str, Recipe]  # By flat name.


@dataclasses.dataclass(frozen=True)
class Builder:
    """Makes layers with zeros as kernels.

    Attributes:
      recipes: gets the recipe of each kernel.
      path: flat name of the module that the layers are for.
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
        """Takes winit, norm and act from the module's config."""
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
    """Draws values with variance one."""
    if not size:
        return jnp.zeros(0, jnp.float32)
    if distribution == "trunc_normal":
        values = jax.random.truncated_normal(key, -2.0, 2.0, (size,), jnp.float32)
        return values * TRUNCATION
    if distribution == "normal":
        return jax.random.normal(key, (size,), jnp.float32)
    limit = math.sqrt(3)
    return jax.random.uniform(key, (size,), jnp.float32, -limit, limit)


def _zeros(units: int) -> Any:
    return np.zeros(units, np.float32)
