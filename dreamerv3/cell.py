"""One step of the recurrent model, as functions of its weights. Agent process.

`core`, `posterior` and `prior` are the model as it is described. `fused_core` and
`observe_step` are the same, arranged for scans over time: a scan launches thousands of
small kernels, and that is what a training step mostly waits for. So products that do
not depend on the step before are taken out of it, and products that read the same
input are joined.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from embodied.jax.distributions import Categorical
from embodied.jax.nets import Array, Tree, activate, block_matmul, f32, sg


@dataclasses.dataclass(frozen=True)
class Cell:
    """Sizes and functions of the model. All arrays may have any leading axes.

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
      absolute: whether the posterior does not see the deterministic state.
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

    def core(self, parts: Tree, deter: Array, stoch: Array, action: Array) -> Array:
        """Steps deter [..., D] on with stoch [..., S, C] and action [..., A]."""
        inputs = {"dynin0": deter, "dynin1": flat(stoch), "dynin2": action}
        shared = [self._layer(parts, name, x) for name, x in inputs.items()]
        x = self._per_block(deter, shared)
        for index in range(self.dynlayers):
            x = self._layer(parts, f"dynhid{index}", x)
        return self._gates(parts["dyngru"](x), deter)

    def posterior(self, parts: Tree, deter: Array, tokens: Array) -> Array:
        """Logits [..., S, C] given deter [..., D] and tokens [..., E]."""
        x = tokens if self.absolute else jnp.concatenate([deter, tokens], -1)
        for index in range(self.obslayers):
            x = self._layer(parts, f"obs{index}", x)
        return self.grouped(parts["obslogit"](x))

    def prior(self, parts: Tree, deter: Array) -> Array:
        """Logits [..., S, C] given deter [..., D] alone."""
        return self.prior_after_first(parts, parts["prior0"](deter))

    def prior_after_first(self, parts: Tree, x: Array) -> Array:
        """The prior's logits from the output of `prior0`, for who has it already."""
        for index in range(self.imglayers):
            if index:
                x = parts[f"prior{index}"](x)
            x = self._activate(parts, f"prior{index}", x)
        return self.grouped(parts["priorlogit"](x))

    def dist(self, logits: Array) -> Categorical:
        """Distribution of the stochastic state, from logits [..., S, C]."""
        return Categorical.of(logits, self.unimix, event=1)

    def sample(self, logits: Array, noise: Array) -> Array:
        """Draws one-hots [..., S, C], with the gradient of their probabilities."""
        dist = self.dist(logits)
        return dist.straight_through(dist.sample(noise)).astype(self.dtype)

    def grouped(self, x: Array) -> Array:
        """Splits [..., S * C] to [..., S, C]."""
        return x.reshape((*x.shape[:-1], self.stoch, self.classes))

    def action_weights(self, parts: Tree) -> Tree:
        """Weights of `action_term`, in the compute dtype."""
        # The same inputs meet all blocks, so that the blocks join to one kernel.
        kernel = parts["dynhid0"].weight[:, self._own :].swapaxes(0, 1)
        return {
            "dynin2": parts["dynin2"].cast(),
            "dynin2norm": parts["dynin2norm"],
            "kernel": kernel.reshape((self.hidden, self.deter)),
            "bias": parts["dynhid0"].offset,
        }

    def action_term(self, weights: Tree, action: Array) -> Array:
        """What the action [..., A] adds to the output of `dynhid0`, bias included."""
        x = self._layer(weights, "dynin2", action)
        return x @ weights["kernel"] + weights["bias"]

    def token_term(self, parts: Tree, tokens: Array) -> Array:
        """What the tokens [..., E] add to the output of `obs0`, bias included."""
        first = parts["obs0"]
        kernel = first.weight if self.absolute else first.weight[self.deter :]
        return tokens @ kernel + first.offset

    def core_weights(self, parts: Tree) -> Tree:
        """Weights of `fused_core`, in the compute dtype."""
        layers = [f"dynhid{index}" for index in range(1, self.dynlayers)]
        normed = ["dynin0", "dynin1", "dynhid0", *layers]
        return {
            "block": parts["dynhid0"].weight[:, : self._own],
            "bias0": parts["dynin0"].offset,
            "bias1": parts["dynin1"].offset,
            **{name: parts[name].cast() for name in [*layers, "dyngru"]},
            **{f"{name}norm": parts[f"{name}norm"] for name in normed},
        }

    def fused_core(
        self, weights: Tree, deter: Array, dynin0: Array, dynin1: Array, action: Array
    ) -> Array:
        """`core` from the products of its inputs with their kernels.

        Args:
          weights: from `core_weights`.
          deter: [..., D].
          dynin0: [..., H], deter times the kernel of `dynin0`.
          dynin1: [..., H], flat stoch times the kernel of `dynin1`.
          action: [..., D], from `action_term`.
        """
        x0 = self._activate(weights, "dynin0", dynin0 + weights["bias0"])
        x1 = self._activate(weights, "dynin1", dynin1 + weights["bias1"])
        x = block_matmul(self._per_block(deter, [x0, x1]), weights["block"])
        x = self._activate(weights, "dynhid0", x + action)
        for index in range(1, self.dynlayers):
            x = self._layer(weights, f"dynhid{index}", x)
        return self._gates(weights["dyngru"](x), deter)

    def observe_weights(self, parts: Tree) -> Tree:
        """Weights of `observe_step`, in the compute dtype."""
        # Both read the new deter: this step's posterior and the next step's core.
        readers = [parts["dynin0"].weight]
        if not self.absolute:
            readers.append(parts["obs0"].weight[: self.deter])
        layers = [f"obs{index}" for index in range(1, self.obslayers)]
        return {
            "core": self.core_weights(parts),
            "stoch": parts["dynin1"].weight,
            "deter": jnp.concatenate(readers, -1),
            **{name: parts[name].cast() for name in [*layers, "obslogit"]},
            **{f"{name}norm": parts[f"{name}norm"] for name in ["obs0", *layers]},
        }

    def observe_carry(self, weights: Tree, deter: Array, stoch: Array) -> Tree:
        """Carry of `observe_step` for a state [..., D] and [..., S, C]."""
        kernel = weights["deter"][:, : self.hidden]
        return {"deter": deter, "stoch": flat(stoch), "dynin0": deter @ kernel}

    def observe_step(self, weights: Tree, carry: Tree, now: Tree) -> tuple[Tree, Tree]:
        """Core, posterior and sample.

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
        deter = self.fused_core(
            weights["core"],
            carry["deter"] * keep,
            carry["dynin0"] * keep,
            (carry["stoch"] * keep) @ weights["stoch"],
            now["action"],
        )
        product = deter @ weights["deter"]
        dynin0, x = product[..., : self.hidden], product[..., self.hidden :]
        x = now["tokens"] if self.absolute else x + now["tokens"]
        x = self._activate(weights, "obs0", x)
        for index in range(1, self.obslayers):
            x = self._layer(weights, f"obs{index}", x)
        logits = self.grouped(weights["obslogit"](x))
        stoch = self.sample(logits, now["noise"])
        return {"deter": deter, "stoch": flat(stoch), "dynin0": dynin0}, logits

    @property
    def _own(self) -> int:
        """Inputs of a block of `dynhid0` before those from the action."""
        return self.deter // self.blocks + 2 * self.hidden

    def _layer(self, parts: Tree, name: str, x: Array) -> Array:
        return self._activate(parts, name, parts[name](x))

    def _activate(self, parts: Tree, name: str, x: Array) -> Array:
        return activate(parts[f"{name}norm"], x, self.act, self.dtype)

    def _per_block(self, deter: Array, shared: list[Array]) -> Array:
        """Gives each block its slice of deter and then all of `shared`, flat."""
        lead = deter.shape[:-1]
        own = deter.reshape((*lead, self.blocks, -1))
        both = jnp.concatenate(shared, -1)[..., None, :]
        both = jnp.broadcast_to(both, (*lead, self.blocks, both.shape[-1]))
        return jnp.concatenate([own, both], -1).reshape((*lead, -1))

    def _gates(self, x: Array, deter: Array) -> Array:
        """The GRU's update of deter [..., D] from [..., 3 D], in float32."""
        lead = deter.shape[:-1]
        x = f32(x).reshape((*lead, self.blocks, 3, -1))
        old = f32(deter).reshape((*lead, self.blocks, -1))
        reset = jax.nn.sigmoid(x[..., 0, :])
        candidate = jnp.tanh(reset * x[..., 1, :])
        update = jax.nn.sigmoid(x[..., 2, :] - 1)
        new = update * candidate + (1 - update) * old
        return new.reshape(deter.shape).astype(self.dtype)


def flat(stoch: Array) -> Array:
    """Joins the last two axes: [..., S, C] to [..., S * C]."""
    return stoch.reshape((*stoch.shape[:-2], -1))


def squash_action(action: Array) -> Array:
    """Divides by max(1, |a|), without gradient through the divisor."""
    return action / sg(jnp.maximum(1, jnp.abs(action)))
