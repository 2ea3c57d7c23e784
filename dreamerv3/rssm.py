"""The recurrent state-space model over sequences. Agent process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from dreamerv3.cell import Cell, squash_action
from embodied.jax.distributions import Categorical
from embodied.jax.nets import Array, Builder, Recipes, f32
from embodied.jax.recurrence import recur

Latent = dict[str, Array]  # deter [..., D] and stoch [..., S, C], compute dtype


class RSSM(eqx.Module):
    """A deterministic state that a GRU in blocks updates, and categorical variables."""

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
        deter, stoch = latent["deter"], latent["stoch"]
        return self.cell.core(self.parts, deter, stoch, squash_action(action))

    def posterior(self, deter: Array, tokens: Array) -> Array:
        """Logits [..., S, C] given deter [..., D] and tokens [..., E]."""
        return self.cell.posterior(self.parts, deter, tokens)

    def prior(self, deter: Array) -> Array:
        """Logits [..., S, C] given deter [..., D] alone."""
        return self.cell.prior(self.parts, deter)

    def dist(self, logits: Array) -> Categorical:
        """Distribution of the stochastic state, from logits [..., S, C]."""
        return self.cell.dist(logits)

    def step(
        self, latent: Latent, action: Array, tokens: Array, first: Array, noise: Array
    ) -> tuple[Latent, Array]:
        """One step with its observation, as `observe` without the time axis."""
        keep = 1 - first.astype(self.cell.dtype)[..., None]
        before = {
            "deter": latent["deter"] * keep,
            "stoch": latent["stoch"] * keep[..., None],
        }
        deter = self.core(before, action * f32(keep))
        logits = self.posterior(deter, tokens)
        return {"deter": deter, "stoch": self.cell.sample(logits, noise)}, logits

    def observe(
        self, latent: Latent, action: Array, tokens: Array, first: Array, noise: Array
    ) -> tuple[Latent, Array]:
        """Steps through sequences with their observations.

        Args:
          latent: state before the first step, [B, ...].
          action: [B, T, A] float32, the action before each step.
          tokens: [B, T, E] compute dtype.
          first: [B, T] bool; the state and action before a step are zeros there.
          noise: [T, B, S, C] float32, from `noise`.

        Returns:
          States [B, T, ...] after each step, and their logits [B, T, S, C].
        """
        keep = 1 - first.astype(self.cell.dtype)[..., None]
        action = squash_action(action * f32(keep))
        inputs = {
            "keep": keep,
            "action": self.cell.action_term(
                self.cell.action_weights(self.parts), action
            ),
            "tokens": self.cell.token_term(self.parts, tokens),
        }
        inputs = {**jax.tree.map(time_first, inputs), "noise": noise}
        weights = self.cell.observe_weights(self.parts)
        carry = self.cell.observe_carry(weights, latent["deter"], latent["stoch"])
        states, logits = recur(
            self.cell.observe_step, self.scan_unroll, weights, carry, inputs
        )
        states = {
            "deter": states["deter"],
            "stoch": self.cell.grouped(states["stoch"]),
        }
        return jax.tree.map(time_first, (states, logits))

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
    sizes = ("deter", "hidden", "stoch", "classes", "blocks", "unimix")
    counts = ("imglayers", "obslayers", "dynlayers", "absolute", "act")
    cell = Cell(**{name: config[name] for name in sizes + counts}, dtype=dtype)
    build = Builder.of(recipes, "dyn", config, dtype)
    deter, hidden = cell.deter, cell.hidden
    flat = cell.stoch * cell.classes
    parts: dict[str, Any] = {}

    def layer(name: str, inputs: int) -> None:
        parts[name] = build.linear(name, inputs, hidden)
        parts[f"{name}norm"] = build.scale(hidden)

    for index, inputs in enumerate((deter, flat, actions)):
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
        parts[name] = build.linear(name, hidden, flat, config["outscale"])
    return RSSM(parts, cell, scan_unroll)


def time_first(x: Array) -> Array:
    """Swaps batch and time."""
    return x.swapaxes(0, 1)
