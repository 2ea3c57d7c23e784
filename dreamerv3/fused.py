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
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dreamerv3.rssm import RSSM, Cell, Latent, flat, squash_action, time_first
from embodied.jax.nets import (
    ACTIVATIONS,
    Array,
    Norm,
    Tree,
    block_matmul,
    f32,
    rms_factor,
)

SUM_PARTS = 8  # Shares of a row that `sum_units` sums apart.


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
    states, logits = recur(fused, dyn.scan_unroll, weights, carry, inputs)
    states = {"deter": states["deter"], "stoch": dyn.cell.grouped(states["stoch"])}
    return jax.tree.map(time_first, (states, logits))


class Recurrence:
    """Steps of a loop over time that `recur` can run."""

    def step(self, params: Tree, carry: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        """Returns the next carry, and outputs."""
        raise NotImplementedError

    def slopes(self, params: Tree, before: Tree, inputs: Tree) -> Tree:
        """Returns what `step_back` needs of each step; called once for all steps."""
        return before, inputs

    def step_back(
        self, params: Tree, slopes: Tree, gradient: Tree, outputs: Tree
    ) -> Tree:
        """Returns the gradient of the carry before a step.

        Args:
          params: the same for all steps.
          slopes: of this step.
          gradient: of the carry after it.
          outputs: gradient of the outputs.
        """
        before, inputs = slopes
        _, pull = jax.vjp(lambda carry: self.step(params, carry, inputs), before)
        return pull((gradient, outputs))[0]


@dataclasses.dataclass(frozen=True)
class FusedCell(Recurrence):
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

    def step(self, weights: Tree, carry: Tree, now: Tree) -> tuple[Tree, Tree]:
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
            carry["stoch"] @ weights["stoch"] * keep,
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

    def slopes(self, weights: Tree, before: Tree, inputs: Tree) -> Tree:
        """Computes what `step_back` needs of each step, for all of them at once.

        Args:
          weights: from `observe_weights`.
          before: carries [T, B, ...] before each step.
          inputs: of all steps.
        """
        cell, core, keep = self.cell, weights["core"], inputs["keep"]
        slopes: dict[str, Any] = {"keep": keep}

        def activate(
            parts: Tree, name: str, x: Array, read: Callable[[Array], Array]
        ) -> Array:
            slopes[name] = Slope.of(
                parts[f"{name}norm"], x, cell.act, lambda x: read(x.astype(cell.dtype))
            )
            return cell.activate(parts, name, x)

        def shared(index: int) -> Callable[[Array], Array]:
            start = cell.deter // cell.blocks + index * cell.hidden
            kernel = core["block"][:, start : start + cell.hidden]
            return lambda x: jnp.einsum("...i,gio->...go", x, kernel).reshape(
                (*x.shape[:-1], -1)
            )

        deter = before["deter"] * keep
        product = before["dynin0"] * keep
        x0 = activate(core, "dynin0", product + core["bias0"], shared(0))
        product = before["stoch"] @ weights["stoch"] * keep
        x1 = activate(core, "dynin1", product + core["bias1"], shared(1))
        x = (
            block_matmul(cell.per_block(deter, [x0, x1]), core["block"])
            + inputs["action"]
        )
        names = [*(f"dynhid{index}" for index in range(1, cell.dynlayers)), "dyngru"]
        for index, name in enumerate(names):
            read = functools.partial(block_matmul, kernel=core[name].kernel)
            x = core[name](activate(core, f"dynhid{index}", x, read))
        gates = x
        slopes["gates"], slopes["old"] = cell.gate_slopes(gates, deter)
        x = inputs["tokens"]
        if not cell.absolute:
            new = cell.gates(gates, deter)
            x = new @ weights["deter"][:, cell.hidden :] + x
        names = [*(f"obs{index}" for index in range(1, cell.obslayers)), "obslogit"]
        for index, name in enumerate(names):
            read = functools.partial(jnp.matmul, b=weights[name].kernel)
            x = weights[name](activate(weights, f"obs{index}", x, read))
        slopes["probs"] = jax.nn.softmax(f32(cell.grouped(x)))
        return slopes

    def step_back(
        self, weights: Tree, slopes: Tree, gradient: Tree, logits_gradient: Array
    ) -> Tree:
        """The gradient of the carry before a step from that of the carry after it.

        Args:
          weights: from `observe_weights`.
          slopes: of this step.
          gradient: of the carry after the step.
          logits_gradient: of its logits.
        """
        cell, core, keep = self.cell, weights["core"], slopes["keep"]
        probs = slopes["probs"]
        x = f32(cell.grouped(gradient["stoch"]))
        x = x - (x * probs).sum(-1, keepdims=True)
        x = (1 - cell.unimix) * probs * x
        x = flat(x.astype(cell.dtype) + logits_gradient)
        names = [*(f"obs{index}" for index in range(1, cell.obslayers)), "obslogit"]
        for index, name in reversed(list(enumerate(names))):
            x = slopes[f"obs{index}"](x @ weights[name].kernel.T, x, cell.dtype)
        read = [gradient["dynin0"]] if cell.absolute else [gradient["dynin0"], x]
        new = gradient["deter"] + jnp.concatenate(read, -1) @ weights["deter"].T
        x = f32(new).reshape((*new.shape[:-1], cell.blocks, 1, -1)) * slopes["gates"]
        x = x.astype(cell.dtype).reshape((*new.shape[:-1], -1))
        names = [*(f"dynhid{index}" for index in range(1, cell.dynlayers)), "dyngru"]
        for index, name in reversed(list(enumerate(names))):
            product = block_matmul(x, core[name].kernel.swapaxes(1, 2))
            x = slopes[f"dynhid{index}"](product, x, cell.dtype)
        product = block_matmul(x, core["block"].swapaxes(1, 2))
        product = product.reshape((*new.shape[:-1], cell.blocks, -1))
        own, shared = jnp.split(product, [cell.deter // cell.blocks], -1)
        first, second = jnp.split(shared.sum(-2), 2, -1)
        first = slopes["dynin0"](first, x, cell.dtype)
        second = slopes["dynin1"](second, x, cell.dtype)
        old = (f32(new) * slopes["old"]).astype(cell.dtype)
        return {
            "deter": (old + own.reshape(new.shape)) * keep,
            "stoch": second @ weights["stoch"].T * keep,
            "dynin0": first * keep,
        }

    @property
    def _own(self) -> int:
        """Inputs of a block of `dynhid0` before those from the action."""
        return self.cell.deter // self.cell.blocks + 2 * self.cell.hidden


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slope:
    """The derivative of a norm with its activation, at given inputs.

    The gradient of a norm has means over units in it, of the gradient of its results.
    That one is a product of the gradient behind the layer that reads these results, so
    the means are, too, with weights that are known before the loop: they need not wait
    for the product.

    Attributes:
      slope: of the activation, times the scale and the norm's factor.
      along: the normed inputs times that factor; None without a norm.
      mean_along: weights of the mean of the gradient along the inputs.
      mean: weights of the mean of the gradient; None if the norm subtracts no mean.
      factor: what the norm multiplied its inputs by; None if it subtracts no mean.
    """

    slope: Array
    along: Array | None = None
    mean_along: Array | None = None
    mean: Array | None = None
    factor: Array | None = None

    @classmethod
    def of(
        cls, norm: Norm, x: Array, act: str, read: Callable[[Array], Array]
    ) -> Slope:
        """The derivative of `activate(norm, x, act)`, all in float32.

        Args:
          norm: of the last axis.
          x: its inputs [..., units].
          act: name of the activation.
          read: the product of the layer that reads the results.
        """
        x = f32(x)
        y = norm(x)
        _, slope = jax.jvp(ACTIVATIONS[act], (y,), (jnp.ones_like(y),))
        if norm.scale is None:
            return cls(slope)
        units = x.shape[-1]
        centred = norm.kind == "layer"
        if centred:
            x = x - x.mean(-1, keepdims=True)
        factor = rms_factor(x)
        normed, slope = x * factor, slope * norm.scale
        return cls(
            slope=slope * factor,
            along=normed * factor,
            mean_along=read(slope * normed / units),
            mean=read(slope / units) if centred else None,
            factor=factor if centred else None,
        )

    def __call__(self, gradient: Array, behind: Array, dtype: str) -> Array:
        """Takes the gradient of the results to that of the inputs.

        Args:
          gradient: of the results, [..., units].
          behind: of what the layer that reads them computes from them.
          dtype: of the gradient of the inputs.
        """
        x = f32(gradient) * self.slope
        behind = f32(behind)
        if self.along is not None and self.mean_along is not None:
            x = x - self.along * sum_units(f32(self.mean_along) * behind)
        if self.mean is not None and self.factor is not None:
            x = x - self.factor * sum_units(f32(self.mean) * behind)
        return x.astype(dtype)


def sum_units(x: Array) -> Array:
    """Sums over the last axis, [..., units] to [..., 1], in two stages.

    A kernel sums a row in one place. Rows are few here, and long: as shorter ones more
    of the device works, and whoever reads the result adds up the rest.
    """
    units = x.shape[-1]
    if units % SUM_PARTS:
        return x.sum(-1, keepdims=True)
    parts = x.reshape((*x.shape[:-1], SUM_PARTS, units // SUM_PARTS)).sum(-1)
    return functools.reduce(operator.add, jnp.split(parts, SUM_PARTS, -1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recur(
    steps: Recurrence, unroll: int, params: Tree, carry: Tree, inputs: Tree
) -> tuple[Tree, Tree]:
    """Scans `carry, outputs = steps.step(params, carry, inputs)` over the first axis.

    Args:
      steps: works on rows, whatever axes are before them: [B, ...] in the scan and
        [T, B, ...] in the backward pass. A function of its arguments alone.
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
    carry_gradient, carries_gradient = jax.lax.scan(
        body, none, (*gradients, slopes), reverse=True, unroll=unroll
    )

    def all_steps(params: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        return steps.step(params, before, inputs)

    _, pull = jax.vjp(all_steps, params, inputs)
    params_gradient, inputs_gradient = pull((carries_gradient, gradients[1]))
    return params_gradient, carry_gradient, inputs_gradient


recur.defvjp(_forward, _backward)


def scan_blocks(
    body: Callable[[Tree, Tree], tuple[Tree, Tree]],
    carry: Tree,
    inputs: Tree,
    unroll: int,
) -> tuple[Tree, Tree]:
    """`jax.lax.scan` with some steps per iteration, whose inputs are copied together.

    A kernel that normalises or draws cannot read its inputs at a place that is only
    known as it runs, and falls into three or four. From a copy of an iteration's inputs
    it can.

    Args:
      body: a step, carry and inputs to carry and outputs.
      carry: before the first step.
      inputs: [T, ...].
      unroll: most steps per iteration; it takes as many as divide T.

    Returns:
      The last carry, and outputs [T, ...].
    """
    length = jax.tree.leaves(inputs)[0].shape[0]
    size = max(size for size in range(1, unroll + 1) if length % size == 0)
    if size == 1:
        return jax.lax.scan(body, carry, inputs)

    def iterate(carry: Tree, block: Tree) -> tuple[Tree, Tree]:
        block = jax.lax.optimization_barrier(block)  # The copy.
        outputs = []
        for index in range(size):
            now = jax.tree.map(operator.itemgetter(index), block)
            carry, output = body(carry, now)
            outputs.append(output)
        return carry, jax.tree.map(lambda *steps: jnp.stack(steps), *outputs)

    def split(x: Array) -> Array:
        return x.reshape((length // size, size, *x.shape[1:]))

    carry, outputs = jax.lax.scan(iterate, carry, jax.tree.map(split, inputs))
    return carry, jax.tree.map(lambda x: x.reshape((length, *x.shape[2:])), outputs)
