"""The encoder: observations to one vector of tokens per step. Agent process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from embodied.envs.keys import SIGNALS
from embodied.jax import values
from embodied.jax.heads import NamedSpaces
from embodied.jax.nets import Array, Builder, Recipes, activate, symlog
from embodied.jax.resampling import pooled_conv

SMALLEST_MAP, LARGEST_MAP = 3, 16  # Sides of the smallest feature map.


@dataclasses.dataclass(frozen=True)
class CoderSettings:
    """Keys of `agent.enc.simple`, and of `agent.dec.simple`, which has two more."""

    depth: int
    mults: tuple[int, ...]
    layers: int
    units: int
    act: str
    norm: str
    winit: str
    symlog: bool
    outer: bool
    kernel: int
    strided: bool
    outscale: float = 1.0
    bspace: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CoderSettings:
        """Reads the settings from the configuration."""
        return cls(**{**config, "mults": tuple(config["mults"])})

    @property
    def depths(self) -> list[int]:
        """Channels of each stage."""
        return [self.depth * factor for factor in self.mults]


class Encoder(eqx.Module):
    """An MLP for vectors, convolutions for images.

    Arrays of at most two dimensions are vectors. Images are stacked on channels.
    """

    parts: dict[str, Any]
    vectors: NamedSpaces = eqx.field(static=True)
    images: NamedSpaces = eqx.field(static=True)
    settings: CoderSettings = eqx.field(static=True)
    dtype: str = eqx.field(static=True)
    pooled_channels: int = eqx.field(static=True)
    acting_channels: int = eqx.field(static=True)

    def for_acting(self) -> Encoder:
        """The same encoder, arranged for a few images instead of a batch."""
        return dataclasses.replace(self, pooled_channels=self.acting_channels)

    def __call__(self, obs: Mapping[str, Array]) -> Array:
        """Encodes observations [..., *shape] to tokens [..., E] in the compute dtype.

        A key with a missing value at a step is encoded as zeros at that step.
        """
        tokens = []
        if self.vectors:
            tokens.append(self._encode_vectors(obs))
        if self.images:
            tokens.append(self._encode_images(obs))
        return jnp.concatenate(tokens, -1)

    def _encode_vectors(self, obs: Mapping[str, Array]) -> Array:
        parts = []
        for key, space in self.vectors:
            x = values.encode(space, key, obs[key])
            # In float32, since the compute dtype may not hold large values.
            compress = self.settings.symlog and not space.discrete
            parts.append(symlog(x) if compress else x)
        x = jnp.concatenate(parts, -1).astype(self.dtype)
        for index in range(self.settings.layers):
            x = self.parts[f"mlp{index}"](x)
            x = self._activate(f"mlp{index}", x)
        return x

    def _encode_images(self, obs: Mapping[str, Array]) -> Array:
        x = jnp.concatenate([obs[key] for key, _ in self.images], -1)
        x = x.astype(self.dtype) / 255 - 0.5
        settings = self.settings
        for index in range(len(settings.mults)):
            conv = self.parts[f"cnn{index}"]
            if settings.strided or (settings.outer and index == 0):
                x = conv(x)
            else:
                x = pooled_conv(conv, x, x.shape[-1] <= self.pooled_channels)
            x = self._activate(f"cnn{index}", x)
        return x.reshape((*x.shape[:-3], -1))

    def _activate(self, name: str, x: Array) -> Array:
        return activate(self.parts[f"{name}norm"], x, self.settings.act, self.dtype)


def make_encoder(
    recipes: Recipes,
    spaces: NamedSpaces,
    config: Mapping[str, Any],
    dtype: str,
    pooled_channels: int = 0,
    acting_channels: int = 0,
) -> tuple[Encoder, int]:
    """Makes the encoder `enc` and returns it with the length of its tokens.

    Args:
      recipes: gets the recipes of the weights.
      spaces: observations to encode, sorted by key.
      config: keys of `agent.enc.simple`.
      dtype: compute dtype.
      pooled_channels: convolutions with at most so many input channels are computed
        on the pooled map.
      acting_channels: the same for acting, where an accelerator takes longer to arrange
        the kernels than it saves.

    Raises:
      ValueError: an observation that cannot be encoded.
    """
    vectors, images = split_spaces(spaces)
    settings = CoderSettings.of(config)
    build = Builder.of(recipes, "enc", config, dtype)
    parts: dict[str, Any] = {}
    size = 0
    if vectors:
        inputs = sum(values.vector_size(space, name) for name, space in vectors)
        for index in range(settings.layers):
            parts[f"mlp{index}"] = build.linear(f"mlp{index}", inputs, settings.units)
            parts[f"mlp{index}norm"] = build.scale(settings.units)
            inputs = settings.units
        size += inputs
    if images:
        height, width = smallest_map(images, settings)
        inputs = sum(space.shape[-1] for _, space in images)
        for index, depth in enumerate(settings.depths):
            full = settings.outer and index == 0
            stride = 2 if settings.strided and not full else 1
            parts[f"cnn{index}"] = build.conv(
                f"cnn{index}", inputs, depth, settings.kernel, stride=stride
            )
            parts[f"cnn{index}norm"] = build.scale(depth)
            inputs = depth
        size += height * width * inputs
    channels = (pooled_channels, acting_channels)
    return Encoder(parts, vectors, images, settings, dtype, *channels), size


def split_spaces(spaces: NamedSpaces) -> tuple[NamedSpaces, NamedSpaces]:
    """Separates vectors from images, and refuses other spaces."""
    if not spaces:
        raise ValueError(
            "The agent expected at least one observation to encode beside "
            f"{', '.join(SIGNALS)}, got none."
        )
    for key, space in spaces:
        image = len(space.shape) == 3 and space.dtype == "uint8"
        vector = len(space.shape) <= 2 and space.dtype.kind in "biuf"
        if len(space.shape) == 2 and space.dtype == "uint8":
            vector = False
        if not image and not vector:
            raise ValueError(
                f"Observation {key!r} expected an image [H, W, C] uint8 or an array "
                f"of at most 2 dimensions, got {space}. Add the channel axis to "
                "grayscale images, or reshape or convert the array in the environment."
            )
    vectors = tuple((key, space) for key, space in spaces if len(space.shape) <= 2)
    images = tuple((key, space) for key, space in spaces if len(space.shape) == 3)
    return vectors, images


def smallest_map(images: NamedSpaces, settings: CoderSettings) -> tuple[int, int]:
    """Height and width of the smallest feature map, to which images are halved.

    Raises:
      ValueError: images of different or unsupported sizes.
    """
    sizes = {key: space.shape[:2] for key, space in images}
    height, width = next(iter(sizes.values()))
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"Images expected one size for all keys, got {sizes}. Resize them in the "
            "environment."
        )
    factor = 2 ** (len(settings.mults) - settings.outer)
    maps = (height // factor, width // factor)
    fits = all(SMALLEST_MAP <= side <= LARGEST_MAP for side in maps)
    if height % factor or width % factor or not fits:
        raise ValueError(
            f"Images expected sides that are multiples of {factor} from "
            f"{SMALLEST_MAP * factor} to {LARGEST_MAP * factor}, since the networks "
            f"scale them by {factor}, got {height}x{width}. Resize them in the "
            "environment."
        )
    return maps
