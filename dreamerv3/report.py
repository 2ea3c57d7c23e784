"""Reports: losses, gradient norms, open-loop predictions. Agent process.

Pure functions of arrays, to be compiled by the caller:

    carry, metrics = report_step(state, carry, batch, seed)

An open-loop video, for one image key:

    sequence 0   sequence 1   ...
    truth        truth             green border while observed,
    prediction   prediction        red while imagined,
    error        error             black frames at the end
"""

from __future__ import annotations

import math

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
    split_context,
)
from embodied.jax import values
from embodied.jax.nets import Array, Tree, f32, symlog
from embodied.jax.param_names import flat_params

SEQUENCES = 6  # Side by side in a video.
BORDER = 2  # Pixels.
PAUSE = 10  # Black frames.
GREEN, RED = (0, 255, 0), (255, 0, 0)


def report_step(
    state: State,
    carry: Carry,
    batch: Batch,
    seed: Array,
    gradients: bool = False,
) -> tuple[Carry, Metrics]:
    """Computes metrics on a batch without training.

    Args:
      state: from `dreamerv3.model.init`.
      carry: of the last batch of the report, or from `init_carry`.
      batch: arrays [B, K + T, ...] by key, latents [B, K, ...].
      seed: random key, or its data, or an integer.
      gradients: whether to report the norm of each loss's gradient.

    Returns:
      The new carry, and metrics: those of training except the optimiser's, and
      `openloop/KEY`, a video [frames, height, width, 3] uint8 for images. If no
      observation is an image, there are `openloop/KEY_error` [T] for vectors, and its
      means over the two halves, `openloop/KEY_observed` and `openloop/KEY_imagined`.
    """
    loss_key, loop_key = jax.random.split(as_key(seed))
    _, (new_carry, _, metrics, _) = loss_terms(
        state.model, carry, batch, loss_key, state.slowval, norm_states(state), False
    )
    if gradients:
        metrics.update(gradient_norms(state, carry, batch, loss_key))
    steps = batch["is_first"].shape[1] - state.model.settings.replay_context
    if steps > 1:  # A single step has no two halves.
        metrics.update(_open_loop_metrics(state.model, carry, batch, loop_key))
    return new_carry, metrics


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

    # One loss at a time, so that only its gradients are in memory.
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
    latent, action, data = split_context(params, carry, batch)
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


def open_loop_video(truth: Array, prediction: Array) -> Array:
    """Draws images and their predictions.

    Args:
      truth: [B, T, H, W, C] uint8.
      prediction: [B, T, H, W, C] float32 in 0..1; the first half of the steps was
        observed, the second imagined.

    Returns:
      [T + PAUSE, 3 H + 4, B (W + 4), 3] uint8.
    """
    truth = _in_colour(truth).astype(jnp.int32)
    pixels = jnp.clip(_in_colour(prediction) * 255, 0, 255).astype(jnp.int32)
    error = (pixels - truth + 255) // 2
    column = jnp.concatenate([truth, pixels, error], 2).astype(jnp.uint8)
    rows, steps, height, width, _ = column.shape
    colours = [GREEN if step < steps // 2 else RED for step in range(steps)]
    frame = (height + 2 * BORDER, width + 2 * BORDER, 3)
    colour = jnp.array(colours, jnp.uint8)[None, :, None, None, :]
    video = jnp.broadcast_to(colour, (rows, steps, *frame))
    inside = slice(BORDER, -BORDER)
    video = video.at[:, :, inside, inside].set(column)
    video = jnp.pad(video, [(0, 0), (0, PAUSE), (0, 0), (0, 0), (0, 0)])
    video = jnp.moveaxis(video, 0, 2)  # Time, height, sequence, width.
    return video.reshape((steps + PAUSE, frame[0], rows * frame[1], 3))


def parameter_summary(model: Tree) -> str:
    """Returns the number of parameters of each network, as text; also takes shapes."""
    sizes: dict[str, int] = {}
    for name, leaf in flat_params(model).items():
        part = name.partition("/")[0]
        sizes[part] = sizes.get(part, 0) + math.prod(leaf.shape)
    parts = ", ".join(f"{part} {size:,}" for part, size in sizes.items())
    return f"{sum(sizes.values()):,} parameters: {parts}."


def _open_loop_metrics(
    params: Model, carry: Carry, batch: Batch, seed: Array
) -> Metrics:
    truth, prediction = open_loop(params, carry, batch, seed, SEQUENCES)
    images = [key for key, _ in params.dec.images]
    if images:
        return {
            f"openloop/{key}": open_loop_video(truth[key], prediction[key])
            for key in images
        }
    metrics = {}
    for key, space in params.dec.vectors:
        curve = _error_curve(space, truth[key], prediction[key])
        half = len(curve) // 2
        metrics[f"openloop/{key}_error"] = curve
        metrics[f"openloop/{key}_observed"] = curve[:half].mean()
        metrics[f"openloop/{key}_imagined"] = curve[half:].mean()
    return metrics


def _error_curve(space: values.Space, truth: Array, prediction: Array) -> Array:
    """Mean error [T] of vectors [B, T, ...], over the values that are not missing.

    For categories it is the share of wrong ones, for numbers the distance of symlogs.
    """
    there = values.present(space, truth)
    axes = tuple(range(2, truth.ndim))
    if space.discrete:
        error = f32(truth != prediction)
    else:
        mask = there.reshape(there.shape + (1,) * len(axes))
        known = jnp.where(mask, f32(truth), 0)
        error = jnp.abs(symlog(f32(prediction)) - symlog(known))
    error = jnp.where(there, error.mean(axes), 0)
    return error.sum(0) / jnp.maximum(1, there.sum(0))


def _in_colour(image: Array) -> Array:
    """Returns images with three channels: the first three, or grey from the first."""
    if image.shape[-1] >= 3:
        return image[..., :3]
    return jnp.repeat(image[..., :1], 3, -1)
