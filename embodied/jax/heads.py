"""Heads: an MLP and an output distribution on its features. Agent process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from embodied.jax import values
from embodied.jax.distributions import Binary, BoundedNormal, Categorical, TwoHot
from embodied.jax.nets import MLP, Array, Builder, Linear
from embodied.space import Space

ActionDist = Categorical | BoundedNormal
NamedSpaces = tuple[tuple[str, Space], ...]  # Sorted by key; can be hashed.


class TwoHotHead(eqx.Module):
    """Predicts a scalar from features [..., F]."""

    mlp: MLP
    head: dict[str, Linear]

    def __call__(self, feat: Array) -> TwoHot:
        """Distribution over scalars [...]."""
        return TwoHot(self.head["logits"](self.mlp(feat)))


class BinaryHead(eqx.Module):
    """Predicts the probability of an event from features [..., F]."""

    mlp: MLP
    head: dict[str, Linear]

    def __call__(self, feat: Array) -> Binary:
        """Distribution over events [...]."""
        return Binary(self.head["logit"](self.mlp(feat))[..., 0])


class PolicyHead(eqx.Module):
    """Predicts a distribution for each action from features [..., F].

    The outputs of all actions are computed in one matrix product.
    """

    mlp: MLP
    head: dict[str, dict[str, Linear]]
    spaces: NamedSpaces = eqx.field(static=True)
    unimix: float = eqx.field(static=True)
    minstd: float = eqx.field(static=True)
    maxstd: float = eqx.field(static=True)

    def __call__(self, feat: Array) -> dict[str, ActionDist]:
        """Distributions of actions [...] by key."""
        return self.after_first(self.mlp.parts["linear0"](feat))

    def after_first(self, x: Array) -> dict[str, ActionDist]:
        """Continues from the output of `linear0`, for callers that have it already."""
        return self.outputs(self.mlp.after_first(x), self.output_weights())

    def output_weights(self) -> tuple[Array, Array]:
        """Kernel and bias of the outputs of all actions, in the compute dtype."""
        kernel = jnp.concatenate([layer.weight for layer in self._layers()], -1)
        return kernel, jnp.concatenate([layer.offset for layer in self._layers()], -1)

    def outputs(self, x: Array, weights: tuple[Array, Array]) -> dict[str, ActionDist]:
        """Distributions by key from the output of the MLP."""
        y = x @ weights[0] + weights[1]
        sizes = [layer.bias.shape[0] for layer in self._layers()]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        pieces = iter(jnp.split(y, ends[:-1], -1))
        return {
            key: self._dist(key, space, [next(pieces) for _ in _parts(space)])
            for key, space in self.spaces
        }

    def noise(self, key: Array, lead: tuple[int, ...]) -> dict[str, Array]:
        """Draws the noise of actions [*lead, ...] by key."""
        noise = {}
        for index, (name, space) in enumerate(self.spaces):
            part = jax.random.fold_in(key, index)
            shape = (*lead, *space.shape)
            if space.discrete:
                shape = (*shape, values.classes(space, name))
                noise[name] = jax.random.gumbel(part, shape, jnp.float32)
            else:
                noise[name] = jax.random.normal(part, shape, jnp.float32)
        return noise

    def sample(
        self, dists: Mapping[str, ActionDist], noise: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Draws actions as values of their spaces."""
        return {
            key: action_value(space, dists[key].sample(noise[key]))
            for key, space in self.spaces
        }

    def mode(self, dists: Mapping[str, ActionDist]) -> dict[str, Array]:
        """Most likely actions as values of their spaces."""
        return {
            key: action_value(space, dists[key].mode()) for key, space in self.spaces
        }

    def _layers(self) -> list[Linear]:
        return [
            self.head[key][name] for key, space in self.spaces for name in _parts(space)
        ]

    def _dist(self, key: str, space: Space, raw: list[Array]) -> ActionDist:
        lead, event = raw[0].shape[:-1], len(space.shape)
        if space.discrete:
            shape = (*lead, *space.shape, values.classes(space, key))
            counts = values.class_counts(space)
            return Categorical.of(raw[0].reshape(shape), self.unimix, event, counts)
        mean, std = (x.reshape((*lead, *space.shape)) for x in raw)
        return BoundedNormal.of(mean, std, event, self.minstd, self.maxstd)


def twohot_head(build: Builder, inputs: int, config: Mapping[str, Any]) -> TwoHotHead:
    """Makes a head from the config keys layers, units, bins and outscale."""
    units = config["units"]
    logits = build.linear("head/logits", units, config["bins"], config["outscale"])
    return TwoHotHead(build.mlp(inputs, units, config["layers"]), {"logits": logits})


def binary_head(build: Builder, inputs: int, config: Mapping[str, Any]) -> BinaryHead:
    """Makes a head from the config keys layers, units and outscale."""
    units = config["units"]
    logit = build.linear("head/logit", units, 1, config["outscale"])
    return BinaryHead(build.mlp(inputs, units, config["layers"]), {"logit": logit})


def policy_head(
    build: Builder, inputs: int, spaces: NamedSpaces, config: Mapping[str, Any]
) -> PolicyHead:
    """Makes a head with categorical and bounded normal actions."""
    units = config["units"]
    head: dict[str, dict[str, Linear]] = {}
    for key, space in spaces:
        size = values.vector_size(space, key)
        head[key] = {
            name: build.linear(f"head/{key}/{name}", units, size, config["outscale"])
            for name in _parts(space)
        }
    mlp = build.mlp(inputs, units, config["layers"])
    bounds = (config["unimix"], config["minstd"], config["maxstd"])
    return PolicyHead(mlp, head, spaces, *(float(bound) for bound in bounds))


def action_value(space: Space, sample: Array) -> Array:
    """Turns a sample of an action's distribution into a value of its space."""
    if space.discrete:
        return values.class_value(space, sample)
    return sample.astype(values.jax_dtype(space))


def action_event(space: Space, value: Array) -> Array:
    """Inverse of `action_value`: returns the event that `logp` takes."""
    return values.class_index(space, value) if space.discrete else value


def action_vector(spaces: NamedSpaces, actions: Mapping[str, Array]) -> Array:
    """Concatenates actions to a vector [..., A] float32; missing values are zeros."""
    parts = [values.encode(space, key, actions[key]) for key, space in spaces]
    return jnp.concatenate(parts, -1)


def action_size(spaces: NamedSpaces) -> int:
    """Length of the vector of all actions."""
    return sum(values.vector_size(space, key) for key, space in spaces)


def _parts(space: Space) -> tuple[str, ...]:
    return ("logits",) if space.discrete else ("mean", "stddev")
