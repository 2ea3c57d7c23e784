"""The recurrent state-space model, one step at a time. Agent process.

`dreamerv3.fused` has the same model arranged for loops over long sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from embodied.jax.distributions import Categorical
from embodied.jax.nets import (
    Array,
    Builder,
    Recipes,
    Tree,
    activate,
    add_bias,
    block_matmul,
    f32,
    sg,
)

Latent = dict[str, Array]  # deter [..., D] and stoch [..., S, C], compute dtype


@dataclasses.dataclass(frozen=True)
class Cell:
    """Sizes of the model, and the functions that its plain and fused forms share.

    All arrays may have any leading axes.

    Attributes:
      deter: units D of the deterministic state.
      hidden: units H of the layers around it.
      stoch: number S of categorical variables.
      classes: classes C of each.
      blocks: blocks of the recurrent weights; divides D.
      unimix: share of the uniform distribution in each categorical.
      imglayers: layers of the prior.
      obslayers: layers of the posterior.
      dynlayers: block layers before the gates.
      absolute: whether the posterior ignores the deterministic state.
      act: name of the activation.
      dtype: compute dtype.
    """

    deter: int
    hidden: int
    stoch: int
    classes: int
    blocks: int
    unimix: float
    imglayers: int
    obslayers: int
    dynlayers: int
    absolute: bool
    act: str
    dtype: str

    def layer(self, parts: Tree, name: str, x: Array) -> Array:
        """Applies a linear layer of `parts`, its norm and the activation."""
        return self.activate(parts, name, parts[name](x))

    def activate(self, parts: Tree, name: str, x: Array) -> Array:
        """Applies the norm of a layer of `parts` and the activation."""
        return activate(parts[f"{name}norm"], x, self.act, self.dtype)

    def per_block(self, deter: Array, shared: list[Array]) -> Array:
        """Joins, for each block, its slice of deter and all of `shared`; flattened."""
        lead = deter.shape[:-1]
        own = deter.reshape((*lead, self.blocks, -1))
        both = jnp.concatenate(shared, -1)[..., None, :]
        both = jnp.broadcast_to(both, (*lead, self.blocks, both.shape[-1]))
        return jnp.concatenate([own, both], -1).reshape((*lead, -1))

    def gates(self, x: Array, deter: Array, bias: Array | None = None) -> Array:
        """Updates deter [..., D] by the GRU gates of x [..., 3 D], in float32.

        A `bias` [3 D] that x lacks is added to it.
        """
        old, _, _, candidate, update = self._gate_values(x, deter, bias)
        new = old + update * (candidate - old)
        return new.reshape(deter.shape).astype(self.dtype)

    def gate_slopes(self, x: Array, deter: Array) -> tuple[Array, Array]:
        """Derivatives of `gates` by x [..., blocks, 3, D / blocks], and by deter."""
        old, reset, inner, candidate, update = self._gate_values(x, deter)
        slope = update * (1 - jnp.square(candidate))
        by_reset = slope * inner * reset * (1 - reset)
        by_update = (candidate - old) * update * (1 - update)
        slopes = jnp.stack([by_reset, slope * reset, by_update], -2)
        return slopes, (1 - update).reshape(deter.shape)

    def _gate_values(
        self, x: Array, deter: Array, bias: Array | None = None
    ) -> tuple[Array, ...]:
        """Old deter, reset, input of the candidate, candidate and update, by block."""
        lead = deter.shape[:-1]
        x = x.reshape((*lead, self.blocks, 3, -1))
        parts = [x[..., index, :] for index in range(3)]
        if bias is not None:
            # To each part, since a compiler makes a sum with the whole product a part
            # of that product, which then needs a copy of the bias for every row.
            bias = bias.reshape((self.blocks, 3, -1))
            parts = [add_bias(part, bias[:, i]) for i, part in enumerate(parts)]
        parts = [f32(part) for part in parts]
        old = f32(deter).reshape((*lead, self.blocks, -1))
        reset, inner = jax.nn.sigmoid(parts[0]), parts[1]
        update = jax.nn.sigmoid(parts[2] - 1)
        return old, reset, inner, jnp.tanh(reset * inner), update

    def grouped(self, x: Array) -> Array:
        """Splits [..., S * C] to [..., S, C]."""
        return x.reshape((*x.shape[:-1], self.stoch, self.classes))

    def dist(self, logits: Array) -> Categorical:
        """Distribution of the stochastic state, from logits [..., S, C]."""
        return Categorical.of(logits, self.unimix, event=1)

    def sample(self, logits: Array, noise: Array) -> Array:
        """Draws one-hots [..., S, C], with the gradient of their probabilities."""
        return self.dist(logits).straight_through(noise).astype(self.dtype)


class RSSM(eqx.Module):
    """A deterministic state updated by a block GRU, and categorical variables."""

    parts: dict[str, Any]
    cell: Cell = eqx.field(static=True)
    scan_unroll: int = eqx.field(static=True, default=1)

    def initial(self, batch: int) -> Latent:
        """State before the first step: zeros."""
        cell = self.cell
        return {
            "deter": jnp.zeros((batch, cell.deter), cell.dtype),
            "stoch": jnp.zeros((batch, cell.stoch, cell.classes), cell.dtype),
        }

    def noise(self, key: Array, lead: tuple[int, ...]) -> Array:
        """Draws the noise of samples [*lead, S, C]."""
        shape = (*lead, self.cell.stoch, self.cell.classes)
        return jax.random.gumbel(key, shape, jnp.float32)

    def core(self, latent: Latent, action: Array) -> Array:
        """The next deter [..., D] after an action [..., A]."""
        cell, parts, deter = self.cell, self.parts, latent["deter"]
        inputs = (deter, flat(latent["stoch"]), squash_action(action))
        shared = [cell.layer(parts, f"dynin{i}", x) for i, x in enumerate(inputs)]
        x = cell.per_block(deter, shared)
        for index in range(cell.dynlayers):
            layer = parts[f"dynhid{index}"]
            # Apart from its bias, which would have to be copied for every row.
            x = jax.lax.optimization_barrier(block_matmul(x, layer.weight))
            x = add_bias(x, layer.bias)
            x = cell.activate(parts, f"dynhid{index}", x)
        gru = parts["dyngru"]
        return cell.gates(block_matmul(x, gru.weight), deter, gru.bias)

    def posterior(self, deter: Array, tokens: Array) -> Array:
        """Logits [..., S, C] given deter [..., D] and tokens [..., E]."""
        cell = self.cell
        x = tokens if cell.absolute else jnp.concatenate([deter, tokens], -1)
        for index in range(cell.obslayers):
            x = cell.layer(self.parts, f"obs{index}", x)
        return cell.grouped(self.parts["obslogit"](x))

    def prior(self, deter: Array) -> Array:
        """Logits [..., S, C] given deter [..., D] alone."""
        return self.prior_after_first(self.parts["prior0"](deter))

    def prior_after_first(self, x: Array) -> Array:
        """Logits of the prior from the output of `prior0`, for callers that have it."""
        cell, parts = self.cell, self.parts
        for index in range(cell.imglayers):
            if index:
                x = parts[f"prior{index}"](x)
            x = cell.activate(parts, f"prior{index}", x)
        return cell.grouped(parts["priorlogit"](x))

    def step(
        self, latent: Latent, action: Array, tokens: Array, first: Array, noise: Array
    ) -> tuple[Latent, Array]:
        """Computes the next state, given an observation.

        Args:
          latent: state before the step, [..., D] and [..., S, C].
          action: [..., A] float32, the action before the step.
          tokens: [..., E] compute dtype.
          first: [...] bool, whether an episode begins; the state and action before
            such a step are replaced by zeros.
          noise: [..., S, C] float32, from `noise`.

        Returns:
          The state after the step, and its logits [..., S, C].
        """
        keep = 1 - first.astype(self.cell.dtype)[..., None]
        before = {
            "deter": latent["deter"] * keep,
            "stoch": latent["stoch"] * keep[..., None],
        }
        deter = self.core(before, action * f32(keep))
        logits = self.posterior(deter, tokens)
        return {"deter": deter, "stoch": self.cell.sample(logits, noise)}, logits

    def imagine(self, latent: Latent, action: Array, noise: Array) -> Latent:
        """Steps through sequences of given actions, without observations or resets.

        Args:
          latent: state before the first step, [B, ...].
          action: [B, T, A] float32, the action before each step.
          noise: [T, B, S, C] float32, from `noise`.

        Returns:
          States [B, T, ...] after each step.
        """

        def body(latent: Latent, now: tuple[Array, Array]) -> tuple[Latent, Latent]:
            deter = self.core(latent, now[0])
            stoch = self.cell.sample(self.prior(deter), now[1])
            latent = {"deter": deter, "stoch": stoch}
            return latent, latent

        _, states = jax.lax.scan(body, latent, (time_first(action), noise))
        return jax.tree.map(time_first, states)


def make_rssm(
    recipes: Recipes,
    actions: int,
    tokens: int,
    config: Mapping[str, Any],
    dtype: str,
    scan_unroll: int = 1,
) -> RSSM:
    """Makes the dynamics `dyn`.

    Args:
      recipes: gets the recipes of the weights.
      actions: length of the action vector.
      tokens: length of the encoder's tokens.
      config: keys of `agent.dyn.rssm`.
      dtype: compute dtype.
      scan_unroll: steps per iteration of the scan over time.
    """
    names = [field.name for field in dataclasses.fields(Cell) if field.name in config]
    cell = Cell(**{name: config[name] for name in names}, dtype=dtype)
    build = Builder.of(recipes, "dyn", config, dtype)
    deter, hidden = cell.deter, cell.hidden
    stoch = cell.stoch * cell.classes
    parts: dict[str, Any] = {}

    def layer(name: str, inputs: int) -> None:
        parts[name] = build.linear(name, inputs, hidden)
        parts[f"{name}norm"] = build.scale(hidden)

    for index, inputs in enumerate((deter, stoch, actions)):
        layer(f"dynin{index}", inputs)
    inputs = deter + 3 * hidden * cell.blocks
    for index in range(cell.dynlayers):
        name = f"dynhid{index}"
        parts[name] = build.block(name, inputs, deter, cell.blocks)
        parts[f"{name}norm"] = build.scale(deter)
        inputs = deter
    parts["dyngru"] = build.block("dyngru", deter, 3 * deter, cell.blocks)
    posterior = tokens if cell.absolute else deter + tokens
    for index in range(cell.obslayers):
        layer(f"obs{index}", hidden if index else posterior)
    for index in range(cell.imglayers):
        layer(f"prior{index}", hidden if index else deter)
    for name in ("obslogit", "priorlogit"):
        parts[name] = build.linear(name, hidden, stoch, config["outscale"])
    return RSSM(parts, cell, scan_unroll)


def flat(stoch: Array) -> Array:
    """Joins the last two axes: [..., S, C] to [..., S * C]."""
    return stoch.reshape((*stoch.shape[:-2], -1))


def squash_action(action: Array) -> Array:
    """Divides by max(1, |a|), without gradient through the divisor."""
    return action / sg(jnp.maximum(1, jnp.abs(action)))


def time_first(x: Array) -> Array:
    """Swaps batch and time."""
    return x.swapaxes(0, 1)
