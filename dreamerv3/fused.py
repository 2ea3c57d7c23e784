"""The recurrent state-space model, arranged for loops over time. Agent process.

A loop launches thousands of small kernels, and that is what a training step mostly
waits for. So products that do not depend on the step before are taken out of the loop,
and products that read the same input are joined. `dreamerv3.rssm` has the model as it
is described; tests compare values and gradients of the two.

`recur` is a scan whose parameter gradients are taken after it. The ordinary gradient of
a scan adds up the gradient of every weight at every step: it doubles the matrix
products of the backward pass, and reads and writes all weights each time, for a batch
of a few rows. Here the backward scan computes only the gradient of the carry, which is
what steps depend on. The gradients of parameters and inputs follow in one pass over all
steps, as large matrix products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dreamerv3.rssm import RSSM, Cell, Latent, flat, squash_action, time_first
from embodied.jax.nets import Array, Tree, block_matmul, f32

Step = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def observe(
    dyn: RSSM, latent: Latent, action: Array, tokens: Array, first: Array, noise: Array
) -> tuple[Latent, Array]:
    """Steps through sequences with their observations, as `RSSM.step` does.

    Args:
      dyn: dynamics.
      latent: state before the first step, [B, ...].
      action: [B, T, A] float32, the action before each step.
      tokens: [B, T, E] compute dtype.
      first: [B, T] bool; the state and action before a step are zeros there.
      noise: [T, B, S, C] float32, from `RSSM.noise`.

    Returns:
      States [B, T, ...] after each step, and their logits [B, T, S, C].
    """
    fused = FusedCell(dyn.cell)
    keep = 1 - first.astype(dyn.cell.dtype)[..., None]
    action = squash_action(action * f32(keep))
    inputs = {
        "keep": keep,
        "action": fused.action_term(fused.action_weights(dyn.parts), action),
        "tokens": fused.token_term(dyn.parts, tokens),
    }
    inputs = {**jax.tree.map(time_first, inputs), "noise": noise}
    weights = fused.observe_weights(dyn.parts)
    carry = fused.observe_carry(weights, latent["deter"], latent["stoch"])
    states, logits = recur(fused.observe_step, dyn.scan_unroll, weights, carry, inputs)
    states = {"deter": states["deter"], "stoch": dyn.cell.grouped(states["stoch"])}
    return jax.tree.map(time_first, (states, logits))


@dataclasses.dataclass(frozen=True)
class FusedCell:
    """Steps of the model as functions of prepared weights.

    Attributes:
      cell: sizes. All arrays may have any leading axes.
    """

    cell: Cell

    def action_weights(self, parts: Tree) -> Tree:
        """Weights of `action_term`, in the compute dtype."""
        # The same inputs meet all blocks, so that the blocks join to one kernel.
        kernel = parts["dynhid0"].weight[:, self._own :].swapaxes(0, 1)
        return {
            "dynin2": parts["dynin2"].cast(),
            "dynin2norm": parts["dynin2norm"],
            "kernel": kernel.reshape((self.cell.hidden, self.cell.deter)),
            "bias": parts["dynhid0"].offset,
        }

    def action_term(self, weights: Tree, action: Array) -> Array:
        """Share of the action [..., A] in the output of `dynhid0`, bias included."""
        x = self.cell.layer(weights, "dynin2", action)
        return x @ weights["kernel"] + weights["bias"]

    def token_term(self, parts: Tree, tokens: Array) -> Array:
        """Share of the tokens [..., E] in the output of `obs0`, bias included."""
        first = parts["obs0"]
        kernel = first.weight if self.cell.absolute else first.weight[self.cell.deter :]
        return tokens @ kernel + first.offset

    def core_weights(self, parts: Tree) -> Tree:
        """Weights of `core`, in the compute dtype."""
        layers = [f"dynhid{index}" for index in range(1, self.cell.dynlayers)]
        normed = ["dynin0", "dynin1", "dynhid0", *layers]
        return {
            "block": parts["dynhid0"].weight[:, : self._own],
            "bias0": parts["dynin0"].offset,
            "bias1": parts["dynin1"].offset,
            **{name: parts[name].cast() for name in [*layers, "dyngru"]},
            **{f"{name}norm": parts[f"{name}norm"] for name in normed},
        }

    def core(
        self, weights: Tree, deter: Array, dynin0: Array, dynin1: Array, action: Array
    ) -> Array:
        """`RSSM.core` from the products of its inputs with their kernels.

        Args:
          weights: from `core_weights`.
          deter: [..., D].
          dynin0: [..., H], deter times the kernel of `dynin0`.
          dynin1: [..., H], flat stoch times the kernel of `dynin1`.
          action: [..., D], from `action_term`.
        """
        x0 = self.cell.activate(weights, "dynin0", dynin0 + weights["bias0"])
        x1 = self.cell.activate(weights, "dynin1", dynin1 + weights["bias1"])
        x = block_matmul(self.cell.per_block(deter, [x0, x1]), weights["block"])
        x = self.cell.activate(weights, "dynhid0", x + action)
        for index in range(1, self.cell.dynlayers):
            x = self.cell.layer(weights, f"dynhid{index}", x)
        return self.cell.gates(weights["dyngru"](x), deter)

    def observe_weights(self, parts: Tree) -> Tree:
        """Weights of `observe_step`, in the compute dtype."""
        # Both read the new deter: this step's posterior and the next step's core.
        readers = [parts["dynin0"].weight]
        if not self.cell.absolute:
            readers.append(parts["obs0"].weight[: self.cell.deter])
        layers = [f"obs{index}" for index in range(1, self.cell.obslayers)]
        return {
            "core": self.core_weights(parts),
            "stoch": parts["dynin1"].weight,
            "deter": jnp.concatenate(readers, -1),
            **{name: parts[name].cast() for name in [*layers, "obslogit"]},
            **{f"{name}norm": parts[f"{name}norm"] for name in ["obs0", *layers]},
        }

    def observe_carry(self, weights: Tree, deter: Array, stoch: Array) -> Tree:
        """Carry of `observe_step` for a state [..., D] and [..., S, C]."""
        kernel = weights["deter"][:, : self.cell.hidden]
        return {"deter": deter, "stoch": flat(stoch), "dynin0": deter @ kernel}

    def observe_step(self, weights: Tree, carry: Tree, now: Tree) -> tuple[Tree, Tree]:
        """Computes core, posterior and sample.

        Args:
          weights: from `observe_weights`.
          carry: deter [..., D], flat stoch [..., S * C], and the product `dynin0`
            of that deter with the kernel of the same name.
          now: keep [..., 1], which is 0 where an episode begins and else 1;
            action [..., D] from `action_term`; tokens [..., H] from `token_term`;
            noise [..., S, C].

        Returns:
          The new carry, and logits [..., S, C].
        """
        keep = now["keep"]
        deter = self.core(
            weights["core"],
            carry["deter"] * keep,
            carry["dynin0"] * keep,
            (carry["stoch"] * keep) @ weights["stoch"],
            now["action"],
        )
        product = deter @ weights["deter"]
        dynin0, x = product[..., : self.cell.hidden], product[..., self.cell.hidden :]
        x = now["tokens"] if self.cell.absolute else x + now["tokens"]
        x = self.cell.activate(weights, "obs0", x)
        for index in range(1, self.cell.obslayers):
            x = self.cell.layer(weights, f"obs{index}", x)
        logits = self.cell.grouped(weights["obslogit"](x))
        stoch = self.cell.sample(logits, now["noise"])
        return {"deter": deter, "stoch": flat(stoch), "dynin0": dynin0}, logits

    @property
    def _own(self) -> int:
        """Inputs of a block of `dynhid0` before those from the action."""
        return self.cell.deter // self.cell.blocks + 2 * self.cell.hidden


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recur(
    step: Step, unroll: int, params: Tree, carry: Tree, inputs: Tree
) -> tuple[Tree, Tree]:
    """Scans `carry, outputs = step(params, carry, inputs)` over the first axis.

    Args:
      step: works on rows, whatever axes are before them: [B, ...] in the scan and
        [T, B, ...] in the backward pass. A function of its arguments alone.
      unroll: steps per iteration of the loop.
      params: floating point arrays, the same for all steps.
      carry: [B, ...] floating point arrays.
      inputs: [T, B, ...] floating point arrays.

    Returns:
      Carries after each step and outputs, [T, B, ...].
    """

    def body(carry: Tree, inputs: Tree) -> tuple[Tree, tuple[Tree, Tree]]:
        carry, outputs = step(params, carry, inputs)
        return carry, (carry, outputs)

    return jax.lax.scan(body, carry, inputs, unroll=unroll)[1]


def _forward(
    step: Step, unroll: int, params: Tree, carry: Tree, inputs: Tree
) -> tuple[tuple[Tree, Tree], Any]:
    steps = jax.tree.leaves(inputs)[0].shape[0]
    # Zeros added to each carry: their gradient is the gradient of that carry.
    nudges = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), carry)
    # Only results of matrix products are kept; the cheap rest is computed again.
    saving = jax.checkpoint(
        step, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable
    )

    def body(carry: Tree, now: tuple[Tree, Tree]) -> tuple[Tree, tuple[Tree, Tree]]:
        inputs, nudge = now
        carry, outputs = saving(params, carry, inputs)
        carry = jax.tree.map(jnp.add, carry, nudge)
        return carry, (carry, outputs)

    def scan(carry: Tree, nudges: Tree) -> tuple[Tree, Tree]:
        return jax.lax.scan(body, carry, (inputs, nudges), unroll=unroll)[1]

    results, backward = jax.vjp(scan, carry, nudges)
    return results, (backward, params, carry, inputs, results[0])


def _backward(
    step: Step, unroll: int, saved: Any, gradients: tuple[Tree, Tree]
) -> tuple[Tree, Tree, Tree]:
    backward, params, carry, inputs, carries = saved
    carry_gradient, carries_gradient = backward(gradients)
    before = jax.tree.map(
        lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), carry, carries
    )

    def all_steps(params: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        return step(params, before, inputs)

    _, pull = jax.vjp(all_steps, params, inputs)
    params_gradient, inputs_gradient = pull((carries_gradient, gradients[1]))
    return params_gradient, carry_gradient, inputs_gradient


recur.defvjp(_forward, _backward)
