"""The training step. Agent process.

Pure functions of arrays, to be compiled by the caller:

    state, carry, outputs, metrics = train_step(state, carry, batch, seed)

Batches hold arrays [B, K + T, ...], where K is the replay context, and latents
[B, K, ...], of which further steps are not read. All results refer to the T steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dreamerv3 import fused
from dreamerv3.imagination import imagine
from dreamerv3.losses import (
    Imagined,
    NormState,
    Replayed,
    continue_target,
    imag_loss,
    kl_losses,
    repl_loss,
    total,
)
from dreamerv3.model import (
    DETER,
    LOSSES,
    STOCH,
    Carry,
    Model,
    State,
    as_key,
    features,
    pack_latent,
    unpack_latent,
)
from dreamerv3.rssm import Latent, time_first
from embodied.jax.algorithm import Gather
from embodied.jax.distributions import TwoHot
from embodied.jax.heads import TwoHotHead, action_event, action_vector
from embodied.jax.nets import Array, known_linear, sg
from embodied.jax.optim import select_tree
from embodied.jax.param_names import apart

Batch = Mapping[str, Array]
Metrics = dict[str, Array]


def train_step(
    state: State,
    carry: Carry,
    batch: Batch,
    seed: Array,
    gather: Gather = lambda weights: weights,
) -> tuple[State, Carry, dict[str, Any], Metrics]:
    """Makes one update.

    Args:
      state: from `dreamerv3.model.init`.
      carry: of the last batch, or from `init_carry`.
      batch: arrays [B, K + T, ...] by key, latents [B, K, ...].
      seed: random key, or its data, or an integer.
      gather: brings weights from where they are stored to where they are used.

    Returns:
      The new state and carry; outputs, of which `replay` goes back to the replay
      buffer; and metrics.
    """

    def gathered_loss(params: Model) -> tuple[Array, Any]:
        weights = gather((params, state.slowval))
        return loss(weights[0], carry, batch, seed, weights[1], norm_states(state))

    grad = jax.value_and_grad(gathered_loss, has_aux=True)
    (value, (carry, outputs, metrics, norms)), grads = grad(state.model)
    opt = state.model.settings.opt
    updates, opt_state, opt_metrics = opt.update(grads, state.opt, state.model, value)
    model = optax.apply_updates(state.model, updates)
    slowval, count = slow_update(state, model.val)
    rest = {"slowval": slowval, "slowval_count": {"value": count}, **norms}
    before = {name: getattr(state, name) for name in rest}
    finite = opt_metrics["nonfinite"] == 0
    state = State(model=model, opt=opt_state, **select_tree(finite, rest, before))
    metrics["opt/loss"] = value
    metrics.update({f"opt/{key}": value for key, value in opt_metrics.items()})
    return state, carry, outputs, metrics


def loss(
    params: Model,
    carry: Carry,
    batch: Batch,
    seed: Array,
    slowval: TwoHotHead,
    norms: NormState,
) -> tuple[Array, tuple[Carry, dict[str, Any], Metrics, NormState]]:
    """Computes the sum of all scaled losses.

    Args:
      params: networks; the loss can be differentiated by them.
      carry: of the last batch.
      batch: arrays [B, K + T, ...] by key.
      seed: random key, or its data, or an integer.
      slowval: the slow value.
      norms: states of the normalisers.

    Returns:
      The loss, and the new carry, outputs, metrics and states of the normalisers.
    """
    means, aux = loss_terms(params, carry, batch, seed, slowval, norms)
    scale = params.settings.scale
    return total(scale(key) * mean for key, mean in means.items()), aux


def loss_terms(
    params: Model,
    carry: Carry,
    batch: Batch,
    seed: Array,
    slowval: TwoHotHead,
    norms: NormState,
    training: bool = True,
) -> tuple[dict[str, Array], tuple[Carry, dict[str, Any], Metrics, NormState]]:
    """Like `loss`, but returns the unscaled mean of each loss, by name.

    The normalisers are updated with this batch only if it is for `training`.
    """
    settings = params.settings
    observe_key, imagine_key = jax.random.split(as_key(seed))
    latent, action, data = split_context(params, carry, batch)
    states, logits = observe(params, latent, action, data, observe_key)
    losses, metrics = world_losses(params, states, logits, data)
    losses |= additional_losses(params, states, data, losses)
    outputs: dict[str, Any] = {}
    if settings.replay_context or settings.priority:
        outputs["replay"] = {"stepid": data["stepid"]}
    if settings.replay_context:
        outputs["replay"].update(pack_latent(sg(states)))
    if settings.priority:
        scaled = (settings.scale(key) * value for key, value in losses.items())
        priority = sg(total(scaled))
        # Training on a step whose loss is not finite is useless.
        priority = jnp.where(jnp.isfinite(priority), priority, 0)
        outputs["replay"]["priority"] = priority
    behavior, norms, more = behavior_losses(
        params, slowval, norms, states, data, imagine_key, training
    )
    means = {key: value.mean() for key, value in {**losses, **behavior}.items()}
    metrics.update(more)
    metrics.update({f"loss/{key}": value for key, value in means.items()})
    carry = next_carry(params, states, batch)
    return means, (carry, outputs, sg(metrics), norms)


def split_context(
    params: Model, carry: Carry, batch: Batch
) -> tuple[Latent, Array, dict[str, Array]]:
    """Separates the context of a batch from its T steps.

    Returns:
      The state before the first step, the actions before each step as vectors
      [B, T, A], and the arrays of the T steps.
    """
    context = params.settings.replay_context
    spaces = params.pol.spaces
    data = {
        key: value[:, context:]
        for key, value in batch.items()
        if key not in (DETER, STOCH)
    }
    latent = {"deter": carry["deter"], "stoch": carry["stoch"]}
    if not context:
        before = {
            key: jnp.concatenate([carry["action"][key][:, None], batch[key][:, :-1]], 1)
            for key, _ in spaces
        }
        return latent, action_vector(spaces, before), data
    stored = [batch[key][:, context - 1] for key in (DETER, STOCH)]
    begins = batch["consec"][:, 0] == 0

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(begins.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    latent = jax.tree.map(choose, unpack_latent(params, *stored), latent)
    before = {key: batch[key][:, context - 1 : -1] for key, _ in spaces}
    return latent, action_vector(spaces, before), data


def next_carry(params: Model, states: Latent, batch: Batch) -> Carry:
    """Returns the carry for the batch that follows."""
    # Values that are not finite must not spoil the batches that follow.
    latent = {
        name: jnp.where(jnp.isfinite(value[:, -1]), value[:, -1], 0)
        for name, value in states.items()
    }
    return sg(
        {
            **latent,
            "action": {key: batch[key][:, -1] for key, _ in params.pol.spaces},
        }
    )


def observe(
    params: Model, latent: Latent, action: Array, data: Batch, key: Array
) -> tuple[Latent, Array]:
    """States [B, T, ...] and posterior logits [B, T, S, C] of replayed steps."""
    first = data["is_first"]
    noise = params.dyn.noise(key, (first.shape[1], first.shape[0]))
    return fused.observe(params.dyn, latent, action, params.enc(data), first, noise)


def world_losses(
    params: Model, states: Latent, logits: Array, data: Batch
) -> tuple[dict[str, Array], Metrics]:
    """Losses [B, T] of the world model by name, and metrics."""
    settings, dyn = params.settings, params.dyn
    post, prior = dyn.cell.dist(logits), dyn.cell.dist(dyn.prior(states["deter"]))
    feat = features(states)
    losses = params.dec.losses(params.dec(states["deter"], states["stoch"]), data)
    losses["rew"] = params.rew(feat if settings.reward_grad else sg(feat)).loss(
        data["reward"]
    )
    losses["con"] = params.con(feat).loss(
        continue_target(data["is_terminal"], settings.horizon, settings.contdisc)
    )
    losses["dyn"], losses["rep"] = kl_losses(post, prior, settings.free_nats)
    metrics = {"dyn_ent": prior.entropy().mean(), "rep_ent": post.entropy().mean()}
    return losses, metrics


def additional_losses(
    params: Model, states: Latent, data: Batch, taken: Mapping[str, Array]
) -> dict[str, Array]:
    """Losses [B, T] of the agent's `extra_losses`, by name.

    Raises:
      ValueError: a name is already taken, or a loss is not of shape [B, T].
    """
    if params.settings.extra_losses is None:
        return {}
    losses = dict(params.settings.extra_losses(params, states, data))
    expected = data["is_first"].shape
    for name, value in losses.items():
        if name in taken or name in LOSSES:
            raise ValueError(f"extra_losses expected new names, got {name!r} again.")
        if value.shape != expected:
            raise ValueError(
                f"extra_losses expected {name!r} of shape {expected}, a value for each "
                f"step, got {value.shape}."
            )
    return losses


def behavior_losses(
    params: Model,
    slowval: TwoHotHead,
    norms: NormState,
    states: Latent,
    data: Batch,
    key: Array,
    training: bool,
) -> tuple[dict[str, Array], NormState, Metrics]:
    """Losses of policy and value by name, states of normalisers, and metrics."""
    settings = params.settings
    batch, steps = data["is_first"].shape
    last = min(settings.imag_last or steps, steps)
    states = jax.tree.map(lambda x: x[:, -last:], states)
    starts = jax.tree.map(lambda x: x.reshape((batch * last, *x.shape[2:])), states)
    # Time stays the first axis, as in the scan, until the outputs are small.
    feat, hidden, actions = imagine(
        params.dyn,
        params.pol,
        starts,
        settings.imag_length,
        key,
        settings.imagine_unroll,
    )
    if settings.ac_grads:
        feat = jnp.concatenate([features(starts)[None], feat[1:]], 0)
    # As rows, so that compilers cannot choose another order of the axes for norms.
    rows = flat_rows(feat)
    # Replayed states have products of their own with these weights, and gradients.
    rew, con, val = apart((params.rew, params.con, params.val), params.dyn.cell.dtype)
    outs = {
        "rew": rew(sg(rows)).pred(),
        "con": con(sg(rows)).prob(),
        "value": val(rows),
        "slow": slowval(sg(rows)),
        "policy": params.pol.after_first(
            known_linear(params.pol.mlp.parts["linear0"], rows, flat_rows(hidden))
        ),
    }
    outs = jax.tree.map(lambda x: x.reshape((-1, feat.shape[1], *x.shape[1:])), outs)
    outs["actions"] = {
        key: action_event(space, actions[key]) for key, space in params.pol.spaces
    }
    losses, ret, norms, metrics = imag_loss(
        Imagined(**jax.tree.map(time_first, outs)),
        settings.norms,
        norms,
        settings.imag_loss,
        disc=1.0 if settings.contdisc else 1 - 1 / settings.horizon,
        update=training,
    )
    if settings.repval_loss and last > 1:
        # The first imagined states are the replayed ones.
        boot, slow = jax.tree.map(
            lambda x: x.reshape((batch, last, *x.shape[1:])),
            (ret[:, 0], jax.tree.map(lambda x: x[0], outs["slow"])),
        )
        data = {key: value[:, -last:] for key, value in data.items()}
        losses["repval"], norms = _replay_value_loss(
            params, norms, states, data, boot, slow, training
        )
    return losses, norms, metrics


def flat_rows(x: Array) -> Array:
    """Joins the leading axes: [..., units] to [rows, units]."""
    return x.reshape((-1, x.shape[-1]))


def _replay_value_loss(
    params: Model,
    norms: NormState,
    states: Latent,
    data: Batch,
    boot: Array,
    slow: TwoHot,
    training: bool,
) -> tuple[Array, NormState]:
    """Loss [B, T - 1] of the value on replayed states, and states of normalisers."""
    settings = params.settings
    feat = features(states)
    replayed = Replayed(
        last=data["is_last"],
        term=data["is_terminal"],
        rew=data["reward"],
        boot=boot,
        value=params.val(feat if settings.repval_grad else sg(feat)),
        slow=slow,
    )
    loss, _, norms = repl_loss(
        replayed,
        settings.norms,
        norms,
        settings.repl_loss,
        horizon=settings.horizon,
        update=training,
    )
    return loss, norms


def slow_update(state: State, value: TwoHotHead) -> tuple[TwoHotHead, Array]:
    """Moves the slow value towards the value; returns it and the new count."""
    settings = state.model.settings
    count = state.slowval_count["value"]
    rate = jnp.where(count % settings.slow_every == 0, settings.slow_rate, 0.0)
    slow = jax.tree.map(
        lambda old, new: (1 - rate) * old + rate * new, state.slowval, value
    )
    return slow, count + 1


def norm_states(state: State) -> NormState:
    """States of the normalisers by name."""
    return {
        "retnorm": state.retnorm,
        "valnorm": state.valnorm,
        "advnorm": state.advnorm,
    }
