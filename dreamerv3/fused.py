"""The recurrent state-space model, arranged for loops over time. Agent process.

A loop launches thousands of small kernels, which take most of the time of a training
step. Therefore products that do not depend on the step before are moved out of the
loop, and products that read the same input are joined. `dreamerv3.rssm` has the model
in its plain form; tests compare values and gradients of the two.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dreamerv3.recurrence import Recurrence, scan_with_vjp
from dreamerv3.rssm import RSSM, Cell, Latent, flat, squash_action, time_first
from embodied.jax.nets import (
    ACTIVATIONS,
    Array,
    Norm,
    Tree,
    block_matmul,
    f32,
    rms_factor,
    whole_gradient,
    wide_matmul,
)

SUM_PARTS = 8  # Parts of a row that `sum_units` sums separately.


def observe(
    dyn: RSSM, latent: Latent, action: Array, tokens: Array, first: Array, noise: Array
) -> tuple[Latent, Array]:
    """Steps through sequences with their observations, as `RSSM.step` does.

    Args:
      dyn: dynamics.
      latent: state before the first step, [B, ...].
      action: [B, T, A] float32, the action before each step.
      tokens: [B, T, E] compute dtype.
      first: [B, T] bool, whether an episode begins; the state and action before such
        a step are replaced by zeros.
      noise: [T, B, S, C] float32, from `RSSM.noise`.

    Returns:
      States [B, T, ...] after each step, and their logits [B, T, S, C].
    """
    fused = FusedCell(dyn.cell)
    hidden = dyn.parts["dynhid0"]
    hidden = dataclasses.replace(hidden, kernel=whole_gradient(hidden.weight))
    parts = {**dyn.parts, "dynhid0": hidden}
    keep = 1 - first.astype(dyn.cell.dtype)[..., None]
    action = squash_action(action * f32(keep))
    inputs = {
        "keep": keep,
        "action": fused.action_term(fused.action_weights(parts), action),
        "tokens": fused.token_term(parts, tokens),
    }
    inputs = {**jax.tree.map(time_first, inputs), "noise": noise}
    weights = fused.observe_weights(parts)
    carry = fused.observe_carry(weights, latent["deter"], latent["stoch"])
    states, logits = scan_with_vjp(fused, dyn.scan_unroll, weights, carry, inputs)
    states = {"deter": states["deter"], "stoch": dyn.cell.grouped(states["stoch"])}
    return jax.tree.map(time_first, (states, logits))


@dataclasses.dataclass(frozen=True)
class FusedCell(Recurrence):
    """Steps of the model as functions of prepared weights.

    All arrays may have any leading axes.

    Attributes:
      cell: sizes of the model.
    """

    cell: Cell

    def action_weights(self, parts: Tree) -> Tree:
        """Weights of `action_term`, in the compute dtype."""
        # All blocks read the same inputs, so their kernels are joined into one.
        kernel = parts["dynhid0"].weight[:, self._own :].swapaxes(0, 1)
        return {
            "dynin2": parts["dynin2"].cast(),
            "dynin2norm": parts["dynin2norm"],
            "kernel": kernel.reshape((self.cell.hidden, self.cell.deter)),
            "bias": parts["dynhid0"].offset,
        }

    def action_term(self, weights: Tree, action: Array) -> Array:
        """Contribution of the action [..., A] to the output of `dynhid0`, with bias.

        In float32, like the product that it is added to.
        """
        x = self.cell.layer(weights, "dynin2", action)
        return wide_matmul(x, weights["kernel"]) + f32(weights["bias"])

    def token_term(self, parts: Tree, tokens: Array) -> Array:
        """Contribution of the tokens [..., E] to the output of `obs0`, with bias."""
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
        """Computes `RSSM.core` from the products of its inputs with their kernels.

        Args:
          weights: from `core_weights`.
          deter: [..., D].
          dynin0: [..., H], deter times the kernel of `dynin0`.
          dynin1: [..., H], flat stoch times the kernel of `dynin1`.
          action: [..., D], from `action_term`.
        """
        x0 = self.cell.activate(weights, "dynin0", dynin0 + weights["bias0"])
        x1 = self.cell.activate(weights, "dynin1", dynin1 + weights["bias1"])
        x = wide_matmul(self.cell.per_block(deter, [x0, x1]), weights["block"])
        x = self.cell.activate(weights, "dynhid0", x + action)
        for index in range(1, self.cell.dynlayers):
            x = self.cell.layer(weights, f"dynhid{index}", x)
        gru = weights["dyngru"]
        return self.cell.gates(block_matmul(x, gru.kernel), deter, gru.bias)

    def observe_weights(self, parts: Tree) -> Tree:
        """Weights of `step`, in the compute dtype."""
        # This step's posterior and the next step's core both read the new deter.
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
        """Carry of `step` for a state [..., D] and [..., S, C]."""
        kernel = weights["deter"][:, : self.cell.hidden]
        return {"deter": deter, "stoch": flat(stoch), "dynin0": deter @ kernel}

    def step(self, weights: Tree, carry: Tree, now: Tree) -> tuple[Tree, Tree]:
        """Computes core, posterior and sample.

        Args:
          weights: from `observe_weights`.
          carry: deter [..., D], flat stoch [..., S * C], and the product `dynin0`
            of that deter with the kernel of the same name.
          now: inputs of the step: keep [..., 1], 0 where an episode begins, else 1;
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
        """Computes the derivatives that `step_back` needs, for all steps at once.

        Args:
          weights: from `observe_weights`.
          before: carries [T, B, ...] before each step.
          inputs: inputs [T, B, ...] of all steps.
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
        x = wide_matmul(cell.per_block(deter, [x0, x1]), core["block"])
        x = x + inputs["action"]
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
        """Computes the gradient of the carry before a step from that after it.

        Args:
          weights: from `observe_weights`.
          slopes: those of this step.
          gradient: gradient of the carry after the step.
          logits_gradient: gradient of the logits of the step.
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
        """Number of inputs of a `dynhid0` block that precede those from the action."""
        return self.cell.deter // self.cell.blocks + 2 * self.cell.hidden


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slope:
    """The derivative of a norm with its activation, at given inputs.

    The gradient through a norm contains means, over units, of the gradient of its
    results. That gradient is a product of the gradient behind the next layer, which
    reads these results, with the kernel of that layer. The means can therefore be
    computed from the gradient behind the next layer, with weights that are known before
    the loop, and need not wait for the product.

    Attributes:
      slope: derivative of the activation, times the scale and the factor of the norm.
      along: the normed inputs times that factor; None without a norm.
      mean_along: weights of the mean of the gradient along the inputs; None without a
        norm.
      mean: weights of the mean of the gradient; None if the norm subtracts no mean.
      factor: factor of the norm, by which it multiplies its inputs; None if it
        subtracts no mean.
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
        """Computes the derivative of `activate(norm, x, act)`, all in float32.

        Args:
          norm: norm over the last axis.
          x: its inputs [..., units].
          act: name of the activation.
          read: multiplies by the kernel of the layer that reads the results.
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
        """Computes the gradient of the inputs from that of the results.

        Args:
          gradient: gradient of the results, [..., units].
          behind: gradient of the outputs of the layer that reads the results.
          dtype: dtype of the gradient of the inputs.
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

    A kernel sums each row on one processor. Rows are few and long here, so summing them
    in parts uses more of the device. The kernel that reads the result adds up the
    parts.
    """
    units = x.shape[-1]
    if units % SUM_PARTS:
        return x.sum(-1, keepdims=True)
    parts = x.reshape((*x.shape[:-1], SUM_PARTS, units // SUM_PARTS)).sum(-1)
    return functools.reduce(operator.add, jnp.split(parts, SUM_PARTS, -1))
