"""Losses and returns, pure functions of arrays and distributions. Agent process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

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


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Keys of `agent.imag_loss` and `agent.repl_loss`.

    Attributes:
      lam: lambda of the returns.
      slowreg: weight of the cross-entropy to the slow value's predictions.
      slowtar: whether returns use the slow value.
      actent: weight of the policy's entropy; only used by `imag_loss`.
    """

    lam: float
    slowreg: float
    slowtar: bool
    actent: float = 0.0


@dataclasses.dataclass(frozen=True)
class Imagined:
    """Predictions along imagined trajectories."""

    rew: Array  # [B, T] rewards
    con: Array  # [B, T] probability to continue
    value: TwoHot  # [B, T, bins]
    slow: TwoHot  # [B, T, bins], of the slow value
    policy: Mapping[str, ActionDist]  # [B, T - 1, ...] by key
    actions: Mapping[str, Array]  # [B, T - 1, ...] events of the policy


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Replayed sequences, and predictions along them."""

    last: Array  # [B, T] bool
    term: Array  # [B, T] bool
    rew: Array  # [B, T] rewards
    boot: Array  # [B, T] returns imagined from each step
    value: TwoHot  # [B, T, bins]
    slow: TwoHot  # [B, T, bins], of the slow value


def kl_losses(
    post: Categorical, prior: Categorical, free_nats: float
) -> tuple[Array, Array]:
    """Divergences of posterior and prior; each loss trains one of the two.

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
    """Target of the continue head, [...] float32.

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
    # One cross-entropy to the sum of both targets reads the bins once.
    both = value.twohot(target) + slowreg * value.twohot(slow)
    return sg(f32(weight)) * value.cross_entropy(both)


def imag_loss(
    imagined: Imagined,
    norms: Norms,
    states: NormState,
    settings: LossSettings,
    *,
    disc: float,
    update: bool,
) -> tuple[dict[str, Array], Array, NormState, dict[str, Array]]:
    """Losses of policy and value on imagined trajectories.

    Args:
      imagined: predictions along trajectories of T states.
      norms: normalisers.
      states: their states.
      settings: keys of `agent.imag_loss`.
      disc: discount that is not part of `imagined.con`.
      update: whether to update the normalisers with this batch.

    Returns:
      Losses `policy` and `value` [B, T - 1], returns [B, T - 1], the normalisers'
      states, and metrics.
    """
    states = dict(states)
    rew, con, value, slow = imagined.rew, imagined.con, imagined.value, imagined.slow
    policy = imagined.policy

    def normalize(name: str, x: Array) -> tuple[Array, Array]:
        normalizer: Normalizer = getattr(norms, name)
        if update:
            states[name] = normalizer.update(states[name], x)
        return normalizer.stats(states[name])

    offset, scale = norms.valnorm.stats(states["valnorm"])
    val, slowval = value.pred() * scale + offset, slow.pred() * scale + offset
    target = slowval if settings.slowtar else val
    weights = imagined_weight(con, disc)
    weight = weights[:, :-1]
    last = jnp.zeros_like(con)
    ret = lambda_return(last, 1 - con, rew, target, disc, settings.lam)

    ret_offset, ret_scale = normalize("retnorm", ret)
    adv = (ret - target[:, :-1]) / ret_scale
    adv_offset, adv_scale = normalize("advnorm", adv)
    adv_normed = (adv - adv_offset) / adv_scale
    logp = total(policy[key].logp(sg(imagined.actions[key])) for key in policy)
    entropies = {key: dist.entropy() for key, dist in policy.items()}
    entropy = total(entropies.values())

    offset, scale = normalize("valnorm", ret)
    tar = (ret - offset) / scale
    inner = TwoHot(value.logits[:, :-1])
    losses = {
        "policy": policy_loss(logp, entropy, adv_normed, weight, settings.actent),
        "value": value_loss(inner, tar, slow.pred()[:, :-1], weight, settings.slowreg),
    }
    means = {"rew": rew, "con": con, "val": val, "tar": tar, "weight": weights}
    means.update({"slowval": slowval, "adv": adv, "adv_mag": jnp.abs(adv)})
    metrics = {
        **{name: x.mean() for name, x in means.items()},
        "adv_std": adv.std(),
        **return_metrics((ret - ret_offset) / ret_scale),
        **entropy_metrics(policy, entropies),
    }
    return losses, sg(ret), states, sg(metrics)


def total(arrays: Iterable[Array]) -> Array:
    """Sum of arrays of one shape."""
    return functools.reduce(jnp.add, arrays)


def return_metrics(ret: Array) -> dict[str, Array]:
    """Mean, extremes and share of large values of normalised returns [B, T]."""
    return {
        "ret": ret.mean(),
        "ret_min": ret.min(),
        "ret_max": ret.max(),
        "ret_rate": (jnp.abs(ret) >= 1).mean(),
    }


def entropy_metrics(
    policy: Mapping[str, ActionDist], entropies: Mapping[str, Array]
) -> dict[str, Array]:
    """Mean entropy of each action, unscaled and scaled to 0..1 by its bounds."""
    metrics = {}
    for key, dist in policy.items():
        low, high = dist.entropy_bounds()
        mean = entropies[key].mean()
        metrics[f"ent/{key}"] = mean
        metrics[f"rand/{key}"] = (mean - low) / max(high - low, 1e-8)
    return metrics


def repl_loss(
    replayed: Replayed,
    norms: Norms,
    states: NormState,
    settings: LossSettings,
    *,
    horizon: int,
    update: bool,
) -> tuple[Array, Array, NormState]:
    """Loss of the value on replayed sequences.

    Args:
      replayed: sequences of T steps, and predictions along them. With `slowtar`,
        returns bootstrap from the slow value instead of `boot`.
      norms: normalisers.
      states: their states.
      settings: keys of `agent.repl_loss`.
      horizon: discount horizon.
      update: whether to update the normaliser of values with this batch.

    Returns:
      The loss [B, T - 1], returns [B, T - 1], and the normalisers' states.
    """
    valnorm, state = norms.valnorm, states["valnorm"]
    offset, scale = valnorm.stats(state)
    last, boot, slow = replayed.last, replayed.boot, replayed.slow.pred()
    if settings.slowtar:
        boot = slow * scale + offset
    disc = 1 - 1 / horizon
    ret = sg(lambda_return(last, replayed.term, replayed.rew, boot, disc, settings.lam))
    if update:
        state = valnorm.update(state, ret)
        offset, scale = valnorm.stats(state)
    target = (ret - offset) / scale
    weight = 1 - f32(last)[:, :-1]
    inner = TwoHot(replayed.value.logits[:, :-1])
    loss = value_loss(inner, target, slow[:, :-1], weight, settings.slowreg)
    return loss, ret, {**states, "valnorm": state}


def lambda_return(
    last: Array, term: Array, rew: Array, boot: Array, disc: float, lam: float
) -> Array:
    """Computes lambda returns, which mix bootstraps at all distances.

        R_T = boot_T
        live_t = (1 - term_t) disc
        cont_t = (1 - last_t) lam
        R_t = r_{t+1} + live_{t+1} ((1 - cont_{t+1}) boot_{t+1} + cont_{t+1} R_{t+1})

    Args:
      last: [B, T] in 0..1, whether the sequence breaks off after the step.
      term: [B, T] in 0..1, the probability that the episode has ended.
      rew: [B, T] reward that came with the step.
      boot: [B, T] value of the future after the step.
      disc: discount.
      lam: lambda; 0 bootstraps from the next step, 1 from the last.

    Returns:
      [B, T - 1] float32.
    """
    if not last.shape == term.shape == rew.shape == boot.shape or last.ndim != 2:
        raise ValueError(
            "lambda_return expected last, term, rew and boot of one shape [B, T], got "
            f"{last.shape}, {term.shape}, {rew.shape} and {boot.shape}."
        )
    live = (1 - f32(term)[:, 1:]) * disc
    cont = (1 - f32(last)[:, 1:]) * lam
    rew, boot = f32(rew)[:, 1:], f32(boot)[:, 1:]
    # R_t = base_t + gain_t R_{t+1} is linear, so two steps can be combined into one.
    base, gain = rew + live * (1 - cont) * boot, live * cont

    def combine(
        later: tuple[Array, Array], earlier: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        base, gain = earlier
        return base + gain * later[0], gain * later[1]

    base, gain = jax.lax.associative_scan(combine, (base, gain), reverse=True, axis=1)
    return base + gain * boot[:, -1:]


def imagined_weight(con: Array, disc: float) -> Array:
    """Probability that an imagined step is reached.

    Args:
      con: [B, T] probability that the episode goes on after each step.
      disc: discount that is not part of `con`; 1 if there is none.

    Returns:
      [B, T] float32, the cumulative product of `disc * con`, without the first
      discount.
    """
    return jnp.cumprod(disc * f32(con), axis=1) / disc
