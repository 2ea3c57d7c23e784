"""Scans over time whose backward pass is arranged for speed. Agent process.

`scan_with_vjp` computes the gradients of parameters after the backward scan. The
ordinary gradient of a scan adds up the gradient of every weight at every step: it
doubles the matrix products of the backward pass, and reads and writes all weights each
time, for a batch of a few rows. Here the backward scan computes only the gradient of
the carry. The gradients of parameters and inputs follow in one pass over all steps, as
large matrix products.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from embodied.jax.nets import Array, Tree


class Recurrence:
    """Steps of a loop over time that `scan_with_vjp` can run."""

    def step(self, params: Tree, carry: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        """Returns the next carry, and outputs."""
        raise NotImplementedError

    def slopes(self, params: Tree, before: Tree, inputs: Tree) -> Tree:
        """Returns the inputs of `step_back` by step; called once for all steps."""
        return before, inputs

    def step_back(
        self, params: Tree, slopes: Tree, gradient: Tree, outputs: Tree
    ) -> Tree:
        """Returns the gradient of the carry before a step.

        Args:
          params: the same for all steps.
          slopes: those of this step.
          gradient: gradient of the carry after the step.
          outputs: gradient of the outputs of the step.
        """
        before, inputs = slopes
        _, pull = jax.vjp(lambda carry: self.step(params, carry, inputs), before)
        return pull((gradient, outputs))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan_with_vjp(
    steps: Recurrence, unroll: int, params: Tree, carry: Tree, inputs: Tree
) -> tuple[Tree, Tree]:
    """Scans `carry, outputs = steps.step(params, carry, inputs)` over the first axis.

    Args:
      steps: the steps, which must take any leading axes: [B, ...] in the scan and
        [T, B, ...] in the backward pass. They depend on their arguments alone.
      unroll: steps per iteration of the loop.
      params: floating point arrays, the same for all steps.
      carry: [B, ...] floating point arrays.
      inputs: [T, B, ...] floating point arrays.

    Returns:
      Carries after each step and outputs, [T, B, ...].
    """
    return _forward(steps, unroll, params, carry, inputs)[0]


def _forward(
    steps: Recurrence, unroll: int, params: Tree, carry: Tree, inputs: Tree
) -> tuple[tuple[Tree, Tree], Any]:
    def body(carry: Tree, inputs: Tree) -> tuple[Tree, tuple[Tree, Tree]]:
        carry, outputs = steps.step(params, carry, inputs)
        return carry, (carry, outputs)

    results = scan_blocks(body, carry, inputs, unroll)[1]
    return results, (params, carry, inputs, results[0])


def _backward(
    steps: Recurrence, unroll: int, saved: Any, gradients: tuple[Tree, Tree]
) -> tuple[Tree, Tree, Tree]:
    params, carry, inputs, carries = saved
    before = jax.tree.map(
        lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), carry, carries
    )
    slopes = steps.slopes(params, before, inputs)

    def body(gradient: Tree, now: Any) -> tuple[Tree, Tree]:
        outside, outputs, slopes = now
        total = jax.tree.map(jnp.add, outside, gradient)
        return steps.step_back(params, slopes, total, outputs), total

    none = jax.tree.map(jnp.zeros_like, carry)
    # Not copied: most of its kernels can read the many slopes where they are.
    carry_gradient, carries_gradient = scan_blocks(
        body, none, (*gradients, slopes), unroll, reverse=True, copy=False
    )

    def all_steps(params: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        return steps.step(params, before, inputs)

    _, pull = jax.vjp(all_steps, params, inputs)
    params_gradient, inputs_gradient = pull((carries_gradient, gradients[1]))
    return params_gradient, carry_gradient, inputs_gradient


scan_with_vjp.defvjp(_forward, _backward)


def scan_blocks(
    body: Callable[[Tree, Tree], tuple[Tree, Tree]],
    carry: Tree,
    inputs: Tree,
    unroll: int,
    reverse: bool = False,
    copy: bool = True,
) -> tuple[Tree, Tree]:
    """Runs `jax.lax.scan` with several steps per iteration.

    All outputs of an iteration that have the same dtype are written at once.

    Args:
      body: a step from carry and inputs to carry and outputs.
      carry: carry before the first step.
      inputs: [T, ...].
      unroll: most steps per iteration; the largest divisor of T up to it is used.
      reverse: whether to begin with the last inputs.
      copy: whether to copy the inputs of an iteration, all of a dtype at once. A kernel
        that normalises or samples cannot read at an offset that is only known at run
        time, and is split into three or four kernels if its inputs are not copied.

    Returns:
      The last carry, and outputs [T, ...].
    """
    length = jax.tree.leaves(inputs)[0].shape[0]
    size = max(size for size in range(1, unroll + 1) if length % size == 0)
    if size == 1:
        return jax.lax.scan(body, carry, inputs, reverse=reverse)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inputs)
    read, written = Joined.of(first), Joined.of(jax.eval_shape(body, carry, first)[1])

    def iterate(carry: Tree, block: Tree) -> tuple[Tree, Tree]:
        if copy:
            block = read.split(jax.lax.optimization_barrier(block))
        outputs = []
        for index in reversed(range(size)) if reverse else range(size):
            now = jax.tree.map(operator.itemgetter(index), block)
            carry, output = body(carry, now)
            outputs.append(written.join(output, 0))
        outputs = outputs[::-1] if reverse else outputs
        return carry, jax.tree.map(lambda *steps: jnp.stack(steps), *outputs)

    def split(x: Array) -> Array:
        return x.reshape((length // size, size, *x.shape[1:]))

    blocks = jax.tree.map(split, read.join(inputs, 1) if copy else inputs)
    carry, outputs = jax.lax.scan(iterate, carry, blocks, reverse=reverse)
    outputs = jax.tree.map(lambda x: x.reshape((length, *x.shape[2:])), outputs)
    return carry, written.split(outputs)


@dataclasses.dataclass(frozen=True)
class Joined:
    """A tree of arrays [B, ...] as one array [B, units] for each dtype.

    Attributes:
      groups: indices of the leaves that are joined.
      shapes: shapes of the leaves.
      treedef: structure of the tree.
    """

    groups: list[list[int]]
    shapes: list[tuple[int, ...]]
    treedef: Any

    @classmethod
    def of(cls, tree: Tree) -> Joined:
        """Chooses the groups for a tree of arrays, or of their shapes and dtypes."""
        leaves, treedef = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            groups.setdefault((leaf.dtype, leaf.shape[:1]), []).append(index)
        return cls(list(groups.values()), [leaf.shape for leaf in leaves], treedef)

    def join(self, tree: Tree, lead: int) -> list[Array]:
        """Joins the arrays of a tree, which have `lead` more leading axes."""
        rows = [x.reshape((*x.shape[: lead + 1], -1)) for x in jax.tree.leaves(tree)]
        return [jnp.concatenate([rows[i] for i in group], -1) for group in self.groups]

    def split(self, arrays: Sequence[Array]) -> Tree:
        """Undoes `join`; the arrays have one more leading axis."""
        leaves: dict[int, Array] = {}
        for group, array in zip(self.groups, arrays):
            shapes = [self.shapes[index] for index in group]
            ends = itertools.accumulate(math.prod(shape[1:]) for shape in shapes)
            parts = jnp.split(array, list(ends)[:-1], -1)
            for index, shape, part in zip(group, shapes, parts):
                leaves[index] = part.reshape((*array.shape[:1], *shape))
        return jax.tree.unflatten(self.treedef, [leaves[i] for i in sorted(leaves)])
