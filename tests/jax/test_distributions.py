import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from embodied.jax.distributions import (
    Binary,
    BoundedNormal,
    Categorical,
    TwoHot,
    squared_error,
    twohot_bins,
)
from embodied.jax.nets import symexp, symlog

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def golden():
    path = pathlib.Path(__file__).parents[1] / "golden" / "functions.npz"
    with np.load(path) as file:
        return {key: jnp.asarray(file[key]) for key in file}


def test_symlog_and_symexp_equal_golden(golden):
    np.testing.assert_allclose(symlog(golden["sym_x"]), golden["symlog"], **TOLERANCE)
    np.testing.assert_allclose(
        symexp(golden["sym_x"] / 50), golden["symexp"], **TOLERANCE
    )


def test_twohot_equals_golden(golden):
    head = TwoHot(golden["th_logits"])
    np.testing.assert_allclose(twohot_bins(255), golden["th_bins"], **TOLERANCE)
    np.testing.assert_allclose(head.pred(), golden["th_pred"], **TOLERANCE)
    loss = head.loss(golden["th_target"])
    np.testing.assert_allclose(loss, golden["th_loss"], **TOLERANCE)


def test_categorical_equals_golden(golden):
    post = Categorical.of(golden["kl_post"], 0.01, event=1)
    prior = Categorical.of(golden["kl_prior"], 0.01, event=1)
    np.testing.assert_allclose(post.kl(prior), golden["kl"], **TOLERANCE)
    np.testing.assert_allclose(post.entropy(), golden["kl_entropy"], **TOLERANCE)


@pytest.mark.parametrize("count", [3, 5, 21, 255])
def test_bins_are_mirrored_and_rising(count):
    bins = twohot_bins(count)
    assert bins.shape == (count,)
    np.testing.assert_array_equal(bins, -bins[::-1])
    assert np.all(np.diff(bins) > 0)
    np.testing.assert_allclose(bins[-1], np.expm1(20), rtol=1e-5)


@pytest.mark.parametrize("count", [5, 255])
def test_prediction_is_exactly_zero_for_equal_logits(count):
    pred = TwoHot(jnp.full((2, count), 1.7)).pred()
    np.testing.assert_array_equal(pred, 0)


def test_twohot_target_between_two_bins_has_their_distances_as_weights():
    low, high = float(twohot_bins(5)[2]), float(twohot_bins(5)[3])
    logits = jnp.array([0.1, 0.2, 0.3, 0.4, 0.5])
    logp = np.asarray(jax.nn.log_softmax(logits))
    target = jnp.array(low + 0.25 * (high - low))
    expected = -(0.75 * logp[2] + 0.25 * logp[3])
    np.testing.assert_allclose(TwoHot(logits).loss(target), expected, rtol=1e-4)


def test_twohot_target_on_a_bin_and_outside_of_all_bins():
    logits = jnp.array([0.1, 0.2, 0.3, 0.4, 0.5])
    logp = jax.nn.log_softmax(logits)
    head = TwoHot(logits)
    for index, target in [(2, 0.0), (0, -1e9), (4, 1e9), (4, twohot_bins(5)[4])]:
        np.testing.assert_allclose(
            head.loss(jnp.array(target, jnp.float32)), -logp[index], rtol=1e-6
        )


def test_the_best_twohot_distribution_predicts_its_target():
    target = jnp.array([0.0, 1.0, -3.5, 1234.5])
    logits = jnp.zeros((4, 255))
    # The gradient of a cross-entropy is the difference of the probabilities.
    weights = jax.nn.softmax(logits) - jax.grad(lambda x: TwoHot(x).loss(target).sum())(
        logits
    )
    best = TwoHot(jnp.log(jnp.maximum(weights, 1e-30)))
    np.testing.assert_allclose(best.pred(), target, rtol=1e-3, atol=1e-3)


def test_mixed_probabilities_have_a_floor_and_sum_to_one():
    dist = Categorical.of(jnp.array([50.0, 0.0, 0.0, -50.0]), 0.01)
    np.testing.assert_allclose(dist.probs, [0.9925, 0.0025, 0.0025, 0.0025], rtol=1e-5)
    plain = Categorical.of(jnp.array([50.0, 0.0, 0.0, -50.0]))
    assert plain.probs[3] < 1e-30


def test_samples_have_the_mixed_probabilities():
    logits = jnp.array([2.0, 0.0, -30.0])
    dist = Categorical.of(jnp.broadcast_to(logits, (20000, 3)), 0.3)
    noise = jax.random.gumbel(jax.random.key(0), (20000, 3))
    counts = np.bincount(dist.sample(noise), minlength=3) / 20000
    np.testing.assert_allclose(counts, dist.probs[0], atol=0.01)


def test_straight_through_samples_are_one_hot_with_the_gradient_of_mixed_probs():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
    noise = jnp.asarray(np.random.default_rng(2).gumbel(size=(2, 3, 5)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 5)), jnp.float32)

    def through(logits):
        return Categorical.of(logits, 0.1).straight_through(noise)

    index = Categorical.of(logits, 0.1).sample(noise)
    np.testing.assert_array_equal(through(logits), np.eye(5)[np.asarray(index)])
    grad = jax.grad(lambda x: (through(x) * weights).sum())(logits)
    expected = jax.grad(lambda x: ((0.9 * jax.nn.softmax(x) + 0.02) * weights).sum())(
        logits
    )
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def test_one_class_is_drawn_where_several_are_equally_good():
    drawn = Categorical.of(jnp.zeros((2, 4))).straight_through(jnp.zeros((2, 4)))
    np.testing.assert_array_equal(drawn, [[1, 0, 0, 0]] * 2)


def test_events_of_several_variables_sum():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), jnp.float32)
    joint, single = Categorical.of(logits, 0.01, event=1), Categorical.of(logits, 0.01)
    index = jnp.array([[0, 1], [2, 2], [1, 0], [0, 0]])
    np.testing.assert_allclose(joint.logp(index), single.logp(index).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(joint.entropy(), single.entropy().sum(-1), rtol=1e-5)


@pytest.mark.parametrize("unimix", [0.0, 0.01, 0.5])
def test_categorical_entropy_stays_within_its_bounds(unimix):
    sure = Categorical.of(jnp.array([[100.0, 0.0, 0.0]] * 2), unimix, event=1)
    even = Categorical.of(jnp.zeros((2, 3)), unimix, event=1)
    low, high = even.entropy_bounds()
    np.testing.assert_allclose(sure.entropy(), low, atol=1e-5)
    np.testing.assert_allclose(even.entropy(), high, rtol=1e-5)
    np.testing.assert_allclose(high, 2 * math.log(3))


def test_mode_is_the_most_likely_class():
    dist = Categorical.of(jnp.array([[0.0, 3.0, 1.0]]), 0.5)
    np.testing.assert_array_equal(dist.mode(), [1])


def test_bounded_normal_by_hand():
    dist = BoundedNormal.of(jnp.array([0.5]), jnp.array([-1.0]), 1, 0.1, 1.0)
    mean, std = np.tanh(0.5), 0.9 / (1 + np.exp(-1)) + 0.1
    np.testing.assert_allclose(dist.mean, [mean], rtol=1e-6)
    np.testing.assert_allclose(dist.std, [std], rtol=1e-6)
    logp = -0.5 * ((2 - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(dist.logp(jnp.array([2.0])), logp, rtol=1e-5)
    entropy = 0.5 * np.log(2 * np.pi * np.e * std**2)
    np.testing.assert_allclose(dist.entropy(), entropy, rtol=1e-5)
    np.testing.assert_allclose(dist.sample(jnp.array([3.0])), [mean + 3 * std], 1e-5)


def test_bounded_normal_entropy_stays_within_its_bounds():
    raw = jnp.array([[-100.0, -100.0], [100.0, 100.0]])
    dist = BoundedNormal.of(jnp.zeros((2, 2)), raw, 1, 0.1, 1.0)
    np.testing.assert_allclose(dist.entropy(), dist.entropy_bounds(), rtol=1e-5)


def test_binary_loss_equals_the_cross_entropy_to_a_soft_target():
    logit, target = jnp.array([-2.0, 0.5, 60.0]), jnp.array([0.0, 0.997, 1.0])
    prob = 1 / (1 + np.exp(-np.asarray(logit[:2], np.float64)))
    soft = np.asarray(target[:2])
    expected = -(soft * np.log(prob) + (1 - soft) * np.log(1 - prob))
    loss = Binary(logit).loss(target)
    np.testing.assert_allclose(loss[:2], expected, rtol=1e-5)
    np.testing.assert_allclose(loss[2], 0, atol=1e-20)
    np.testing.assert_allclose(Binary(logit).prob()[:2], prob, rtol=1e-5)


def test_binary_loss_is_lowest_at_its_target():
    target = jnp.array(0.997)
    grad = jax.grad(lambda x: Binary(x).loss(target))(jnp.log(0.997 / (1 - target)))
    np.testing.assert_allclose(grad, 0, atol=1e-6)


def test_squared_error_sums_over_the_event_and_trains_the_prediction_alone():
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    np.testing.assert_array_equal(squared_error(x, y, 1), [2, 29])
    assert not np.any(jax.grad(lambda y: squared_error(x, y, 1).sum())(y))


def test_distributions_compute_in_float32():
    logits = jnp.zeros((2, 5), jnp.bfloat16)
    assert TwoHot(logits).pred().dtype == jnp.float32
    assert TwoHot(logits).loss(jnp.zeros(2)).dtype == jnp.float32
    assert Categorical.of(logits, 0.01).entropy().dtype == jnp.float32
    assert Binary(logits[0]).prob().dtype == jnp.float32
    assert BoundedNormal.of(logits, logits, 1, 0.1, 1.0).std.dtype == jnp.float32


@pytest.mark.parametrize("unimix", [0.0, 0.1])
def test_classes_that_a_variable_lacks_have_no_probability(unimix):
    counts = np.array([2, 4])
    logits = jax.random.normal(jax.random.key(0), (5, 2, 4))
    dist = Categorical.of(logits, unimix, event=1, counts=counts)
    np.testing.assert_allclose(dist.probs[:, 0, 2:], 0)
    np.testing.assert_allclose(dist.probs.sum(-1), 1, rtol=1e-6)
    alone = [
        Categorical.of(logits[:, 0, :2], unimix),
        Categorical.of(logits[:, 1], unimix),
    ]
    np.testing.assert_allclose(
        dist.entropy(), sum(part.entropy() for part in alone), rtol=1e-5
    )
    index = jnp.array([[1, 3]] * 5)
    np.testing.assert_allclose(
        dist.logp(index),
        alone[0].logp(index[:, 0]) + alone[1].logp(index[:, 1]),
        rtol=1e-5,
    )
    bounds = [part.entropy_bounds() for part in alone]
    np.testing.assert_allclose(dist.entropy_bounds(), np.sum(bounds, 0), rtol=1e-6)
    noise = jax.random.gumbel(jax.random.key(1), (200, 5, 2, 4))
    drawn = dist.sample(noise)
    assert int(drawn[..., 0].max()) == 1
    assert int(drawn[..., 1].max()) == 3
    gradient = jax.grad(lambda x: Categorical.of(x, unimix, 1, counts).entropy().sum())(
        logits
    )
    assert bool(jnp.isfinite(gradient).all())
    np.testing.assert_array_equal(gradient[:, 0, 2:], 0)
