"""Imagined trajectories: the world model under the policy. Agent process.

No gradient flows through them. The loop is arranged like those of `dreamerv3.fused`:
all noise is drawn before it, and products that read the same input are joined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dreamerv3.fused import FusedCell
from dreamerv3.recurrence import scan_blocks
from dreamerv3.rssm import RSSM, Latent, flat, squash_action
from embodied.jax import values
from embodied.jax.heads import PolicyHead, action_vector
from embodied.jax.nets import Array, Tree, sg
from embodied.jax.param_names import cast_matrices

Actions = dict[str, Array]


def imagine(
    dyn: RSSM, pol: PolicyHead, latent: Latent, length: int, key: Array, unroll: int = 1
) -> tuple[Array, Array, Actions]:
    """Follows the policy for some steps from each state.

    Args:
      dyn: dynamics.
      pol: policy on the features [deter, flat stoch].
      latent: states to start from, [N, ...].
      length: number of steps H.
      key: random key of actions and states.
      unroll: steps per iteration of the loop.

    Returns:
      Features [deter, flat stoch] of the first states and of those after each step,
      [H + 1, N, F]; the outputs [H, N, units] of the policy's first layer for all but
      the last; and the actions [H, N, ...] that it chose. All without gradient.
    """
    cell, fused = dyn.cell, FusedCell(dyn.cell)
    # Everything that is the same in all steps is computed before the loop.
    dyn, pol = cast_matrices(sg((dyn, pol)), cell.dtype)
    parts, latent = dyn.parts, sg(latent)
    core, action_term = fused.core_weights(parts), _action_term(fused, dyn, pol)
    head = pol.output_weights()
    first = pol.mlp.parts["linear0"]
    # The core of the next step and the policy read both parts of the state; the prior
    # reads deter, too.
    deter_readers = [parts["dynin0"].weight, first.weight[: cell.deter]]
    stoch_readers = [parts["dynin1"].weight, first.weight[cell.deter :]]
    read_deter = jnp.concatenate([*deter_readers, parts["prior0"].weight], -1)
    read_stoch = jnp.concatenate(stoch_readers, -1)
    ends = [cell.hidden, cell.hidden + first.bias.shape[0]]

    def close(feat: Array, index: Any, deter: Array, by: Array, stoch: Array) -> Tree:
        # Written into the result here: joining arrays after the loop would copy them.
        row = jnp.concatenate([deter, flat(stoch)], -1)
        feat = jax.lax.dynamic_update_index_in_dim(feat, row, index, 0)
        return feat, deter, by, flat(stoch) @ read_stoch

    def step(carry: Tree, now: tuple[Array, Tree]) -> tuple[Tree, Any]:
        feat, deter, by_deter, by_stoch = carry
        index, noise = now
        dynin0, policy0, _ = jnp.split(by_deter, ends, -1)
        dynin1, policy1 = jnp.split(by_stoch, ends[:1], -1)
        hidden = policy0 + policy1 + first.offset
        x = pol.mlp.after_first(hidden)
        actions = pol.sample(pol.outputs(x, head), noise["action"])
        deter = fused.core(core, deter, dynin0, dynin1, action_term(actions))
        # Otherwise the compiler keeps the new deter in float32, too, for the next step.
        deter = jax.lax.optimization_barrier(deter)
        by_deter = deter @ read_deter
        x = by_deter[:, ends[1] :] + parts["prior0"].offset
        stoch = cell.sample(dyn.prior_after_first(x), noise["stoch"])
        # And makes the one-hots of the sample in a kernel of their own.
        stoch = jax.lax.optimization_barrier(stoch)
        return close(feat, index, deter, by_deter, stoch), (hidden, actions)

    deter, stoch = latent["deter"], latent["stoch"]
    size = cell.deter + cell.stoch * cell.classes
    feat = jnp.zeros((length + 1, deter.shape[0], size), cell.dtype)
    carry = close(feat, 0, deter, deter @ read_deter, stoch)
    state_key, action_key = jax.random.split(key)
    lead = (length, deter.shape[0])
    noise = {
        "stoch": dyn.noise(state_key, lead),
        "action": pol.noise(action_key, lead),
    }
    steps = (jnp.arange(1, length + 1), noise)
    (feat, *_), (hidden, actions) = scan_blocks(step, carry, steps, unroll)
    return feat, hidden, actions


def _action_term(
    fused: FusedCell, dyn: RSSM, pol: PolicyHead
) -> Callable[[Actions], Array]:
    """Returns a function from actions to `FusedCell.action_term`.

    It looks up the result where there is a single discrete action.
    """
    weights = fused.action_weights(dyn.parts)

    def compute(actions: Actions) -> Array:
        action = squash_action(action_vector(pol.spaces, actions))
        return fused.action_term(weights, action)

    key, space = pol.spaces[0]
    if len(pol.spaces) > 1 or not space.discrete or space.shape:
        return compute
    index = jnp.arange(values.classes(space, key))
    table = compute({key: values.class_value(space, index)})
    return lambda actions: table[values.class_index(space, actions[key])]
