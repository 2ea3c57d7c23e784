"""The decoder: recurrent states back to observations. Agent process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from dreamerv3.encoder import CoderSettings, smallest_map, split_spaces
from embodied.jax import values
from embodied.jax.distributions import Categorical, squared_error
from embodied.jax.heads import NamedSpaces
from embodied.jax.nets import (
    MLP,
    Array,
    Builder,
    Conv,
    Linear,
    Recipes,
    activate,
    f32,
    symexp,
    symlog,
)
from embodied.jax.resampling import doubled_conv, to_squares


class Decoder(eqx.Module):
    """An MLP for vectors, convolutions for images.

    Raw outputs by key: logits [..., *shape, classes] for discrete vectors, predictions
    [..., *shape] of continuous ones (of their symlog), pixels in 0..1 for images.
    """

    mlp: MLP | None
    vec: dict[str, dict[str, Linear]]
    parts: dict[str, Any]
    vectors: NamedSpaces = eqx.field(static=True)
    images: NamedSpaces = eqx.field(static=True)
    smallest: tuple[int, int] = eqx.field(static=True)
    settings: CoderSettings = eqx.field(static=True)
    dtype: str = eqx.field(static=True)
    halved_channels: int = eqx.field(static=True)

    def __call__(self, deter: Array, stoch: Array) -> dict[str, Array]:
        """Decodes states [..., D] and [..., S, C] to raw outputs, float32."""
        stoch = stoch.reshape((*stoch.shape[:-2], -1))
        outputs: dict[str, Array] = {}
        if self.mlp is not None:
            outputs.update(self._decode_vectors(deter, stoch))
        if self.images:
            outputs.update(self._decode_images(deter, stoch))
        return outputs

    def losses(
        self, outputs: Mapping[str, Array], obs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Losses [...] float32 by key, zero where a value is missing."""
        losses = {}
        for key, space in self.vectors:
            there = values.present(space, obs[key])
            event = len(space.shape)
            if space.discrete:
                dist = Categorical.of(outputs[key], event=event)
                loss = -dist.logp(values.class_index(space, obs[key]))
            else:
                # Before symlog and the square: infinities would spoil the gradient.
                mask = there.reshape(there.shape + (1,) * event)
                target = jnp.where(mask, f32(obs[key]), 0)
                target = symlog(target) if self.settings.symlog else target
                loss = squared_error(outputs[key], target, event)
            losses[key] = jnp.where(there, loss, 0)
        for key, _ in self.images:
            losses[key] = squared_error(outputs[key], f32(obs[key]) / 255, 3)
        return losses

    def predictions(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Observations by key as the environment would show them.

        Images stay float32 in 0..1.
        """
        result = {key: outputs[key] for key, _ in self.images}
        for key, space in self.vectors:
            x = outputs[key]
            if space.discrete:
                index = jnp.argmax(x, -1).astype(jnp.int32)
                result[key] = values.class_value(space, index)
            else:
                result[key] = symexp(x) if self.settings.symlog else x
        return result

    def _decode_vectors(self, deter: Array, stoch: Array) -> dict[str, Array]:
        assert self.mlp is not None
        x = self.mlp(jnp.concatenate([stoch, deter], -1))
        outputs = {}
        for key, space in self.vectors:
            (layer,) = self.vec[key].values()
            shape = space.shape
            if space.discrete:
                shape = (*shape, values.classes(space, key))
            outputs[key] = f32(layer(x)).reshape((*x.shape[:-1], *shape))
        return outputs

    def _decode_images(self, deter: Array, stoch: Array) -> dict[str, Array]:
        parts, settings, lead = self.parts, self.settings, deter.shape[:-1]
        height, width = self.smallest
        spread = parts["sp0"](deter)
        spread = spread.reshape((*lead, settings.bspace, height, width, -1))
        spread = jnp.moveaxis(spread, -4, -2)  # g h w c to h w g c
        spread = spread.reshape((*lead, height, width, -1))
        x = self._activate("sp1", parts["sp1"](stoch))
        x = parts["sp2"](x).reshape(spread.shape)
        x = self._activate("sp", f32(spread) + f32(x))
        stages = [f"conv{index}" for index in reversed(range(len(settings.mults) - 1))]
        squares = False  # Whether each 2x2 square of pixels lies together.
        for name, following in zip(stages, [*stages[1:], "imgout"]):
            x, squares = self._convolve(name, x, squares, following)
            x = self._activate(name, x)
        x, _ = self._convolve("imgout", x, squares)
        x = jax.nn.sigmoid(f32(x))
        outputs, start = {}, 0
        for key, space in self.images:
            outputs[key] = x[..., start : start + space.shape[-1]]
            start += space.shape[-1]
        return outputs

    def _convolve(
        self, name: str, x: Array, squares: bool, following: str = ""
    ) -> tuple[Array, bool]:
        """Applies a convolution; returns maps as squares if the next one wants them."""
        conv: Conv = self.parts[name]
        if not self._doubles(name):
            return conv(x), False
        even = not (x.shape[-2] % 2 or x.shape[-3] % 2)
        if not squares and even and self._on_squares(name):
            x, squares = to_squares(x), True
        leave = self._on_squares(following)
        return doubled_conv(conv, x, squares, leave), leave

    def _doubles(self, name: str) -> bool:
        """Whether maps are doubled before a convolution, instead of by its strides."""
        return not self.settings.strided and not (
            self.settings.outer and name == "imgout"
        )

    def _on_squares(self, name: str) -> bool:
        return (
            name in self.parts
            and self._doubles(name)
            and self.parts[name].bias.size <= self.halved_channels
        )

    def _activate(self, name: str, x: Array) -> Array:
        return activate(self.parts[f"{name}norm"], x, self.settings.act, self.dtype)


def make_decoder(
    recipes: Recipes,
    spaces: NamedSpaces,
    deter: int,
    stoch: int,
    config: Mapping[str, Any],
    dtype: str,
    halved_channels: int = 0,
) -> Decoder:
    """Makes the decoder `dec`.

    Args:
      recipes: gets the recipes of the weights.
      spaces: observations to decode, sorted by key.
      deter: units of the recurrent state.
      stoch: length of the flat stochastic state.
      config: keys of `agent.dec.simple`.
      dtype: compute dtype.
      halved_channels: convolutions with at most so many output channels are computed
        on maps of half the size.

    Raises:
      ValueError: an observation that cannot be decoded.
    """
    vectors, images = split_spaces(spaces)
    settings = CoderSettings.of(config)
    build = Builder.of(recipes, "dec", config, dtype)
    mlp, vec = None, {}
    if vectors:
        mlp = build.mlp(deter + stoch, settings.units, settings.layers)
        for name, space in vectors:
            kind = "logits" if space.discrete else "pred"
            size = values.vector_size(space, name)
            layer = build.linear(
                f"vec/{name}/{kind}", settings.units, size, settings.outscale
            )
            vec[name] = {kind: layer}
    parts: dict[str, Any] = {}
    smallest = (0, 0)
    if images:
        smallest = smallest_map(images, settings)
        channels = sum(space.shape[-1] for _, space in images)
        parts = _image_parts(build, smallest, channels, deter, stoch, settings)
    return Decoder(
        mlp, vec, parts, vectors, images, smallest, settings, dtype, halved_channels
    )


def _image_parts(
    build: Builder,
    smallest: tuple[int, int],
    channels: int,
    deter: int,
    stoch: int,
    settings: CoderSettings,
) -> dict[str, Any]:
    depths, bspace = settings.depths, settings.bspace
    size = smallest[0] * smallest[1] * depths[-1]
    wide = 2 * settings.units
    if depths[-1] % bspace:
        raise ValueError(
            f"agent.dec.simple.bspace expected a divisor of the channels of the "
            f"smallest map ({depths[-1]}), got {bspace}."
        )
    parts: dict[str, Any] = {
        "sp0": build.block("sp0", deter, size, bspace),
        "sp1": build.linear("sp1", stoch, wide),
        "sp1norm": build.scale(wide),
        "sp2": build.linear("sp2", wide, size),
        "spnorm": build.scale(depths[-1]),
    }
    # With strides, convolutions double the map themselves.
    stride: dict[str, Any] = {}
    if settings.strided:
        stride = {"stride": 2, "transposed": True}
    inputs = depths[-1]
    for index in reversed(range(len(depths) - 1)):
        parts[f"conv{index}"] = build.conv(
            f"conv{index}", inputs, depths[index], settings.kernel, **stride
        )
        parts[f"conv{index}norm"] = build.scale(depths[index])
        inputs = depths[index]
    parts["imgout"] = build.conv(
        "imgout",
        inputs,
        channels,
        settings.kernel,
        settings.outscale,
        **({} if settings.outer else stride),
    )
    return parts
