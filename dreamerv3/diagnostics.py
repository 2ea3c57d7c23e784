"""What reports are made of: gradient norms and open-loop predictions. Agent process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from dreamerv3.model import Carry, Model, State, as_key
from dreamerv3.training import (
    Batch,
    Metrics,
    loss_terms,
    norm_states,
    observe,
    open_batch,
)
from embodied.jax.nets import Array


def gradient_norms(state: State, carry: Carry, batch: Batch, seed: Array) -> Metrics:
    """Norm of the gradient of each unscaled mean loss over all modules, by name."""

    def terms(params: Model) -> dict[str, Array]:
        norms = norm_states(state)
        return loss_terms(params, carry, batch, seed, state.slowval, norms, False)[0]

    means, pull = jax.vjp(terms, state.model)
    names = sorted(means)

    def norm(chosen: Array) -> Array:
        seeds = dict(zip(names, chosen))
        return optax.tree.norm(pull(seeds)[0])

    # One after the other, so that the gradients of one loss are in memory at a time.
    norms = jax.lax.map(norm, jnp.eye(len(names)))
    return {f"gradnorm/{name}": value for name, value in zip(names, norms)}


def open_loop(
    params: Model, carry: Carry, batch: Batch, seed: Array, limit: int = 6
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Predicts the second half of sequences from the first.

    The second half uses the recorded actions and ignores where episodes begin.

    Args:
      params: networks.
      carry: of the last batch.
      batch: arrays [B, K + T, ...] by key.
      seed: random key, or its data, or an integer.
      limit: most sequences to predict.

    Returns:
      Truth and prediction by key, [min(B, limit), T, ...]. Images are uint8 in the
      truth and float32 in 0..1 in the prediction.
    """
    carry, batch = jax.tree.map(lambda x: x[:limit], (carry, dict(batch)))
    observe_key, imagine_key = jax.random.split(as_key(seed))
    latent, action, data = open_batch(params, carry, batch)
    rows, steps = data["is_first"].shape
    half = steps // 2
    seen = {key: value[:, :half] for key, value in data.items()}
    states, _ = observe(params, latent, action[:, :half], seen, observe_key)
    noise = params.dyn.noise(imagine_key, (steps - half, rows))
    start = jax.tree.map(lambda x: x[:, -1], states)
    imagined = params.dyn.imagine(start, action[:, half:], noise)
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), states, imagined)
    outputs = params.dec(both["deter"], both["stoch"])
    prediction = params.dec.predictions(outputs)
    return {key: data[key] for key in prediction}, prediction
