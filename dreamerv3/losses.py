"""The losses, pure functions of arrays and distributions. Agent process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from dreamerv3.returns import imagined_weight, lambda_return
from embodied.jax.distributions import Categorical, TwoHot
from embodied.jax.heads import ActionDist
from embodied.jax.nets import Array, f32, sg
from embodied.jax.normalize import Normalizer

NormState = dict[str, Any]  # States of retnorm, valnorm and advnorm by name.


@dataclasses.dataclass(frozen=True)
class Norms:
    """Normalisers of returns, values and advantages."""

    retnorm: Normalizer
    valnorm: Normalizer
    advnorm: Normalizer

    def init(self) -> NormState:
        """States before the first update, by name."""
        return {
            "retnorm": self.retnorm.init(),
            "valnorm": self.valnorm.init(),
            "advnorm": self.advnorm.init(),
        }


def kl_losses(
    post: Categorical, prior: Categorical, free_nats: float
) -> tuple[Array, Array]:
    """Divergence of posterior and prior, each side trained by its own loss.

        dyn = max(free, KL(sg(post) || prior))
        rep = max(free, KL(post || sg(prior)))

    Args:
      post: [..., S, C] posterior with one event axis.
      prior: the same shape.
      free_nats: lower bound, below which there is no gradient.

    Returns:
      dyn and rep, [...] float32.
    """
    fixed_post = dataclasses.replace(post, logprobs=sg(post.logprobs))
    fixed_prior = dataclasses.replace(prior, logprobs=sg(prior.logprobs))
    dyn = jnp.maximum(free_nats, fixed_post.kl(prior))
    rep = jnp.maximum(free_nats, post.kl(fixed_prior))
    return dyn, rep


def continue_target(terminal: Array, horizon: int, contdisc: bool) -> Array:
    """What the continue head predicts, [...] float32.

    Args:
      terminal: [...] bool, whether the episode has ended for good.
      horizon: discount horizon.
      contdisc: whether the discount 1 - 1 / horizon is part of the target.
    """
    target = 1 - terminal.astype(jnp.float32)
    return target * (1 - 1 / horizon) if contdisc else target


def policy_loss(
    logp: Array, entropy: Array, adv: Array, weight: Array, actent: float
) -> Array:
    """Reinforce with entropy: sg(weight) (-(logp sg(adv) + actent entropy)), [B, T]."""
    return sg(weight) * -(logp * sg(adv) + actent * entropy)


def value_loss(
    value: TwoHot, target: Array, slow: Array, weight: Array, slowreg: float
) -> Array:
    """Cross-entropy to returns and to the slow value's predictions.

    Args:
      value: [B, T, bins].
      target: [B, T] returns.
      slow: [B, T] predictions of the slow value.
      weight: [B, T].
      slowreg: weight of the second part.

    Returns:
      [B, T] float32.
    """
    loss = value.loss(sg(target)) + slowreg * value.loss(sg(slow))
    return sg(f32(weight)) * loss


def imag_loss(
    rew: Array,
    con: Array,
    value: TwoHot,
    slow: TwoHot,
    policy: Mapping[str, ActionDist],
    actions: Mapping[str, Array],
    norms: Norms,
    states: NormState,
    *,
    disc: float,
    lam: float,
    actent: float,
    slowreg: float,
    slowtar: bool,
    update: bool,
) -> tuple[dict[str, Array], Array, NormState, dict[str, Array]]:
    """Losses of policy and value on imagined trajectories.

    Args:
      rew: [B, T] predicted rewards.
      con: [B, T] predicted probability to go on.
      value: [B, T, bins].
      slow: [B, T, bins].
      policy: distributions [B, T - 1, ...] by key.
      actions: events [B, T - 1, ...] of these distributions.
      norms: normalisers.
      states: their states.
      disc: discount that is not part of `con`.
      lam: lambda of the returns.
      actent: weight of the entropy.
      slowreg: weight of the slow value's predictions.
      slowtar: whether returns use the slow value.
      update: whether the normalisers take in this batch.

    Returns:
      Losses `policy` and `value` [B, T - 1], returns [B, T - 1], the normalisers'
      states, and metrics.
    """
    states = dict(states)

    def normalize(name: str, x: Array) -> tuple[Array, Array]:
        normalizer: Normalizer = getattr(norms, name)
        if update:
            states[name] = normalizer.update(states[name], x)
        return normalizer.stats(states[name])

    offset, scale = norms.valnorm.stats(states["valnorm"])
    val, slowval = value.pred() * scale + offset, slow.pred() * scale + offset
    target = slowval if slowtar else val
    weight = imagined_weight(con, disc)[:, :-1]
    last = jnp.zeros_like(con)
    ret = lambda_return(last, 1 - con, rew, target, disc, lam)

    ret_offset, ret_scale = normalize("retnorm", ret)
    adv = (ret - target[:, :-1]) / ret_scale
    adv_offset, adv_scale = normalize("advnorm", adv)
    adv_normed = (adv - adv_offset) / adv_scale
    logp = total(policy[key].logp(sg(actions[key])) for key in policy)
    entropies = {key: dist.entropy() for key, dist in policy.items()}
    entropy = total(entropies.values())

    offset, scale = normalize("valnorm", ret)
    tar = (ret - offset) / scale
    inner = TwoHot(value.logits[:, :-1])
    losses = {
        "policy": policy_loss(logp, entropy, adv_normed, weight, actent),
        "value": value_loss(inner, tar, slow.pred()[:, :-1], weight, slowreg),
    }
    normed = (ret - ret_offset) / ret_scale
    metrics = {
        "adv": adv.mean(),
        "adv_std": adv.std(),
        "adv_mag": jnp.abs(adv).mean(),
        "rew": rew.mean(),
        "con": con.mean(),
        "val": val.mean(),
        "tar": tar.mean(),
        "weight": weight.mean(),
        "slowval": slowval.mean(),
        "ret": normed.mean(),
        "ret_min": normed.min(),
        "ret_max": normed.max(),
        "ret_rate": (jnp.abs(normed) >= 1).mean(),
        **entropy_metrics(policy, entropies),
    }
    return losses, sg(ret), states, sg(metrics)


def total(arrays: Iterable[Array]) -> Array:
    """Sum of arrays of one shape."""
    return functools.reduce(jnp.add, arrays)


def entropy_metrics(
    policy: Mapping[str, ActionDist], entropies: Mapping[str, Array]
) -> dict[str, Array]:
    """Mean entropy of each action, as it is and scaled to 0..1 between its bounds."""
    metrics = {}
    for key, dist in policy.items():
        low, high = dist.entropy_bounds()
        mean = entropies[key].mean()
        metrics[f"ent/{key}"] = mean
        metrics[f"rand/{key}"] = (mean - low) / max(high - low, 1e-8)
    return metrics


def repl_loss(
    last: Array,
    term: Array,
    rew: Array,
    boot: Array,
    value: TwoHot,
    slow: TwoHot,
    norms: Norms,
    states: NormState,
    *,
    horizon: int,
    lam: float,
    slowreg: float,
    slowtar: bool,
    update: bool,
) -> tuple[Array, Array, NormState]:
    """Loss of the value on replayed sequences.

    Args:
      last: [B, T] bool.
      term: [B, T] bool.
      rew: [B, T] replayed rewards.
      boot: [B, T] returns imagined from each step.
      value: [B, T, bins].
      slow: [B, T, bins].
      norms: normalisers.
      states: their states.
      horizon: discount horizon.
      lam: lambda of the returns.
      slowreg: weight of the slow value's predictions.
      slowtar: whether returns bootstrap from the slow value instead of `boot`.
      update: whether the normaliser of values takes in this batch.

    Returns:
      The loss [B, T - 1], returns [B, T - 1], and the normalisers' states.
    """
    valnorm, state = norms.valnorm, states["valnorm"]
    offset, scale = valnorm.stats(state)
    if slowtar:
        boot = slow.pred() * scale + offset
    ret = sg(lambda_return(last, term, rew, boot, 1 - 1 / horizon, lam))
    if update:
        state = valnorm.update(state, ret)
        offset, scale = valnorm.stats(state)
    target = (ret - offset) / scale
    weight = 1 - f32(last)[:, :-1]
    inner = TwoHot(value.logits[:, :-1])
    loss = value_loss(inner, target, slow.pred()[:, :-1], weight, slowreg)
    return loss, ret, {**states, "valnorm": state}
