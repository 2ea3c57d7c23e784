"""A scan over time whose parameter gradients are taken after it. Agent process.

The ordinary gradient of a scan adds up the gradient of every weight at every step: it
doubles the matrix products of the backward pass, and reads and writes all weights each
time, for a batch of a few rows. Here the backward scan computes only the gradient of
the carry, which is what steps depend on. The gradients of parameters and inputs follow
in one pass over all steps, as large matrix products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any  # A pytree of floating point arrays.
Step = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


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
