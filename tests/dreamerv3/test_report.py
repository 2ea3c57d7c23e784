"""Reports show what the world model predicts, and the losses under their names."""

import agent_testing as testing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamerv3 import model
from dreamerv3.report import (
    PAUSE,
    open_loop_video,
    parameter_summary,
    report_step,
)
from embodied import Space

GREEN, RED = (0, 255, 0), (255, 0, 0)


def reference_video(truth: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """The same as `open_loop_video`, computed pixel by pixel."""
    rows, steps, height, width, channels = truth.shape
    video = np.zeros((steps + PAUSE, 3 * height + 4, rows * (width + 4), 3), np.uint8)
    for row, step in np.ndindex(rows, steps):
        left = row * (width + 4)
        frame = video[step, :, left : left + width + 4]
        frame[:] = GREEN if step < steps // 2 else RED
        for y, x, c in np.ndindex(height, width, 3):
            channel = c if channels == 3 else 0
            true = int(truth[row, step, y, x, channel])
            pred = int(np.clip(prediction[row, step, y, x, channel] * 255, 0, 255))
            values = (true, pred, (pred - true + 255) // 2)
            for index, value in enumerate(values):
                frame[2 + index * height + y, 2 + x, c] = value
    return video


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("steps", [4, 5])
def test_video_has_truth_prediction_error_and_borders(channels, steps):
    rng = np.random.default_rng(0)
    shape = (2, steps, 3, 4, channels)
    truth = rng.integers(0, 256, shape).astype(np.uint8)
    prediction = rng.uniform(-0.1, 1.1, shape).astype(np.float32)
    video = testing.compute(open_loop_video, truth, prediction)
    assert video.dtype == np.uint8
    np.testing.assert_array_equal(video, reference_video(truth, prediction))


def test_video_of_a_right_prediction_has_grey_errors_and_black_frames_at_the_end():
    truth = np.full((1, 2, 2, 2, 3), 51, np.uint8)
    prediction = np.full(truth.shape, 0.2, np.float32)
    video = testing.compute(open_loop_video, truth, prediction)
    assert (video[0, 6:8, 2:-2] == 127).all()
    assert (video[0, 0] == GREEN).all()
    assert (video[1, 0] == RED).all()
    assert video.shape[0] == 2 + PAUSE
    assert not video[2:].any()


@pytest.mark.parametrize("channels", [2, 4])
def test_images_with_other_numbers_of_channels_are_shown(channels):
    truth = jnp.zeros((1, 2, 2, 2, channels), jnp.uint8)
    assert open_loop_video(truth, truth / 255).shape[-1] == 3


def test_summary_counts_the_parameters_of_every_network():
    summary = parameter_summary(testing.make_state().model)
    total = sum(leaf.size for leaf in jax.tree.leaves(testing.make_state().model))
    assert summary.startswith(f"{total:,} parameters: enc ")
    assert all(f" {part} " in summary for part in ("dyn", "dec", "rew", "con", "val"))


LOSSES = ("vector", "token", "rew", "con", "dyn", "rep", "policy", "value", "repval")


def report_of_vectors(gradients: bool):
    """Reports on observations without images; returns both carries and the metrics."""
    state = testing.make_state(replay_context=testing.CONTEXT)
    step = testing.quick_jit(report_step, static_argnames="gradients")
    carry = model.init_carry(state.model, testing.BATCH)
    seed = np.array([1, 2], np.uint32)
    new, metrics = step(state, carry, testing.make_batch(), seed, gradients=gradients)
    return carry, new, jax.device_get(metrics)


@pytest.mark.timeout(300)
def test_vectors_have_losses_and_error_curves_instead_of_videos():
    before, after, metrics = report_of_vectors(gradients=False)
    assert all(np.isfinite(metrics[f"loss/{name}"]) for name in LOSSES)
    assert not any(name.startswith(("opt/", "gradnorm/")) for name in metrics)
    for key in ("vector", "token"):
        curve = metrics[f"openloop/{key}_error"]
        assert curve.shape == (testing.LENGTH,)
        assert (curve >= 0).all()
        half = testing.LENGTH // 2
        observed, imagined = curve[:half].mean(), curve[half:].mean()
        np.testing.assert_allclose(metrics[f"openloop/{key}_observed"], observed, 1e-5)
        np.testing.assert_allclose(metrics[f"openloop/{key}_imagined"], imagined, 1e-5)
    assert (metrics["openloop/token_error"] <= 1).all()
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert np.any(np.asarray(after["deter"]))


@pytest.mark.slow
def test_every_loss_has_a_gradient_norm_on_request():
    metrics = report_of_vectors(gradients=True)[2]
    for name in LOSSES:
        # The KL of an untrained prior may be within the free nats, without a gradient.
        free = name in ("dyn", "rep") and metrics[f"loss/{name}"] == 1.0
        assert (metrics[f"gradnorm/{name}"] > 0) != free, name


@given(st.lists(st.floats(-50, 50), min_size=6, max_size=6), st.integers(0, 5))
def test_error_curve_leaves_missing_steps_out(numbers, missing):
    from dreamerv3.report import _error_curve

    truth = np.array(numbers, np.float32).reshape(2, 3)
    prediction = truth[::-1].copy()
    row, step = divmod(missing, 3)
    shown = truth.copy()
    shown[row, step] = -np.inf
    symlog = np.sign(truth) * np.log1p(np.abs(truth))
    expected = np.abs(symlog[0] - symlog[1])  # Both rows have the same error.
    curve = _error_curve(Space(np.float32), jnp.asarray(shown), jnp.asarray(prediction))
    np.testing.assert_allclose(curve, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.timeout(300)
def test_images_have_a_video_and_no_curves():
    observations = {
        "image": Space(np.uint8, (48, 64, 3)),
        "vector": Space(np.float32, 3),
        **testing.SIGNALS,
    }
    config = testing.agent_config()
    shapes = jax.eval_shape(
        lambda key: model.init(key, observations, testing.ACT_SPACE, config),
        jax.random.key(0),
    )
    state = testing.fill(shapes)
    rows = 7
    batch = testing.make_batch(context=1, batch=rows, length=5)
    batch["image"] = jnp.zeros((rows, 6, 48, 64, 3), jnp.uint8)
    carry = model.init_carry(state.model, rows)
    step = testing.quick_jit(report_step, static_argnames="gradients")
    _, metrics = step(state, carry, batch, np.array([1, 2], np.uint32))
    video = metrics["openloop/image"]
    assert video.dtype == np.uint8
    assert video.shape == (5 + PAUSE, 3 * 48 + 4, 6 * (64 + 4), 3)
    assert not any("vector" in name and "openloop" in name for name in metrics)
