"""Lambda returns, pure functions of arrays. Agent process."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from embodied.jax.nets import Array, f32


def lambda_return(
    last: Array, term: Array, rew: Array, boot: Array, disc: float, lam: float
) -> Array:
    """Computes returns that mix bootstraps of all distances.

        R_T = boot_T
        live_t = (1 - term_t) disc
        cont_t = (1 - last_t) lam
        R_t = r_{t+1} + live_{t+1} ((1 - cont_{t+1}) boot_{t+1} + cont_{t+1} R_{t+1})

    Args:
      last: [B, T] in 0..1, whether the sequence breaks off after the step.
      term: [B, T] in 0..1, the probability that the episode has ended.
      rew: [B, T] reward that came with the step.
      boot: [B, T] value that stands for the future of the step.
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
    # R_t = base_t + gain_t R_{t+1} is linear, so that pairs of steps combine to one.
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
