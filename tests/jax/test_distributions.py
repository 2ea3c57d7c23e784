import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_testing import compute

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
        return {key: file[key] for key in file}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_symlog_and_symexp_equal_golden(golden):
    x = golden["sym_x"]
    found = compute(lambda: [symlog(jnp.asarray(x)), symexp(jnp.asarray(x) / 50)])
    np.testing.assert_allclose(found[0], golden["symlog"], **TOLERANCE)
    np.testing.assert_allclose(found[1], golden["symexp"], **TOLERANCE)


def test_twohot_equals_golden(golden):
    np.testing.assert_allclose(twohot_bins(255), golden["th_bins"], **TOLERANCE)
    head, target = TwoHot(golden["th_logits"]), golden["th_target"]
    pred, loss = compute(lambda head: (head.pred(), head.loss(target)), head)
    np.testing.assert_allclose(pred, golden["th_pred"], **TOLERANCE)
    np.testing.assert_allclose(loss, golden["th_loss"], **TOLERANCE)


def test_categorical_equals_golden(golden):
    def measures(post, prior):
        post, prior = (Categorical.of(x, 0.01, event=1) for x in (post, prior))
        return post.kl(prior), post.entropy()

    divergence, entropy = compute(measures, golden["kl_post"], golden["kl_prior"])
    np.testing.assert_allclose(divergence, golden["kl"], **TOLERANCE)
    np.testing.assert_allclose(entropy, golden["kl_entropy"], **TOLERANCE)


@pytest.mark.parametrize("count", [3, 5, 21, 255])
def test_bins_are_mirrored_and_rising(count):
    bins = twohot_bins(count)
    assert bins.shape == (count,)
    np.testing.assert_array_equal(bins, -bins[::-1])
    assert np.all(np.diff(bins) > 0)
    np.testing.assert_allclose(bins[-1], np.expm1(20), rtol=1e-5)


@pytest.mark.parametrize("count", [5, 255])
def test_prediction_is_exactly_zero_for_equal_logits(count):
    def pred(logits):
        return TwoHot(logits).pred()

    logits = jnp.full((2, count), 1.7)
    np.testing.assert_array_equal(pred(logits), 0)
    # Compilers join products and sums, which rounds them differently.
    np.testing.assert_array_equal(jax.jit(pred)(logits), 0)


def test_twohot_target_between_two_bins_has_their_distances_as_weights():
    low, high = float(twohot_bins(5)[2]), float(twohot_bins(5)[3])
    logits = jnp.array([0.1, 0.2, 0.3, 0.4, 0.5])
    logp = np.asarray(jax.nn.log_softmax(logits))
    target = np.float32(low + 0.25 * (high - low))
    expected = -(0.75 * logp[2] + 0.25 * logp[3])
    loss = compute(lambda x: TwoHot(logits).loss(x), target)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_twohot_target_on_a_bin_and_outside_of_all_bins():
    logits = jnp.array([0.1, 0.2, 0.3, 0.4, 0.5])
    logp = np.asarray(jax.nn.log_softmax(logits))
    targets = np.array([0.0, -1e9, 1e9, twohot_bins(5)[4]], np.float32)
    head = TwoHot(jnp.broadcast_to(logits, (4, 5)))
    loss = compute(head.loss, targets)
    np.testing.assert_allclose(loss, -logp[[2, 0, 4, 4]], rtol=1e-6)


def test_the_best_twohot_distribution_predicts_its_target():
    target = np.array([0.0, 1.0, -3.5, 1234.5], np.float32)

    def best_prediction(logits):
        # The gradient of a cross-entropy is the difference of the probabilities.
        gradient = jax.grad(lambda x: TwoHot(x).loss(target).sum())(logits)
        weights = jax.nn.softmax(logits) - gradient
        return TwoHot(jnp.log(jnp.maximum(weights, 1e-30))).pred()

    best = compute(best_prediction, np.zeros((4, 255), np.float32))
    np.testing.assert_allclose(best, target, rtol=1e-3, atol=1e-3)


def test_mixed_probabilities_have_a_floor_and_sum_to_one():
    dist = Categorical.of(jnp.array([50.0, 0.0, 0.0, -50.0]), 0.01)
    np.testing.assert_allclose(dist.probs, [0.9925, 0.0025, 0.0025, 0.0025], rtol=1e-5)
    plain = Categorical.of(jnp.array([50.0, 0.0, 0.0, -50.0]))
    assert plain.probs[3] < 1e-30


def test_samples_have_the_mixed_probabilities():
    noise = np.random.default_rng(0).gumbel(size=(20000, 3)).astype(np.float32)

    def sample(logits):
        dist = Categorical.of(jnp.broadcast_to(logits, noise.shape), 0.3)
        return dist.sample(jnp.asarray(noise)), dist.probs[0]

    drawn, probs = compute(sample, np.array([2, 0, -30], np.float32))
    counts = np.bincount(drawn, minlength=3) / 20000
    np.testing.assert_allclose(counts, probs, atol=0.01)


def test_the_first_of_the_largest_is_drawn_and_always_a_class():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [jnp.nan] * 4])
    assert Categorical(logits).sample(jnp.zeros(logits.shape)).tolist() == [1, 0, 3]


def test_straight_through_samples_are_one_hot_with_the_gradient_of_mixed_probs():
    logits, weights = draw(2, 3, 5), draw(2, 3, 5, seed=1)
    noise = np.random.default_rng(2).gumbel(size=(2, 3, 5)).astype(np.float32)

    def through(logits):
        return Categorical.of(logits, 0.1).straight_through(noise)

    def mixed(logits):
        return 0.9 * jax.nn.softmax(logits) + 0.02

    @compute
    def found():
        gradients = [
            jax.grad(lambda x, of=function: (of(x) * weights).sum())(logits)
            for function in (through, mixed)
        ]
        index = Categorical.of(logits, 0.1).sample(noise)
        return index, through(logits), *gradients

    index, samples, grad, expected = found
    np.testing.assert_array_equal(samples, np.eye(5)[index])
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def test_one_class_is_drawn_where_several_are_equally_good():
    drawn = Categorical.of(jnp.zeros((2, 4))).straight_through(jnp.zeros((2, 4)))
    np.testing.assert_array_equal(drawn, [[1, 0, 0, 0]] * 2)


def test_events_of_several_variables_sum():
    index = np.array([[0, 1], [2, 2], [1, 0], [0, 0]], np.int32)

    def measures(logits):
        dists = Categorical.of(logits, 0.01, event=1), Categorical.of(logits, 0.01)
        return [(dist.logp(index), dist.entropy()) for dist in dists]

    joint, single = compute(measures, draw(4, 2, 3))
    for found, parts in zip(joint, single, strict=True):
        np.testing.assert_allclose(found, parts.sum(-1), rtol=1e-5)


@pytest.mark.parametrize("unimix", [0.0, 0.01, 0.5])
def test_categorical_entropy_stays_within_its_bounds(unimix):
    # A distribution with one certain class, and a uniform one.
    logits = np.array([[[100, 0, 0]] * 2, [[0, 0, 0]] * 2], np.float32)
    dist = compute(lambda x: Categorical.of(x, unimix, event=1), logits)
    low, high = dist.entropy_bounds()
    sure, even = compute(Categorical.entropy, dist)
    np.testing.assert_allclose(sure, low, atol=1e-5)
    np.testing.assert_allclose(even, high, rtol=1e-5)
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

    def results(logits):
        return {
            "prediction": TwoHot(logits).pred(),
            "loss": TwoHot(logits).loss(jnp.zeros(2)),
            "entropy": Categorical.of(logits, 0.01).entropy(),
            "probability": Binary(logits[0]).prob(),
            "deviation": BoundedNormal.of(logits, logits, 1, 0.1, 1.0).std,
        }

    for name, found in jax.eval_shape(results, logits).items():
        assert found.dtype == jnp.float32, name


@pytest.mark.parametrize("unimix", [0.0, 0.1])
def test_classes_that_a_variable_lacks_have_no_probability(unimix):
    counts, logits = np.array([2, 4]), draw(5, 2, 4)
    index = np.array([[1, 3]] * 5, np.int32)
    noise = np.random.default_rng(1).gumbel(size=(200, 5, 2, 4)).astype(np.float32)

    def whole(logits):
        return Categorical.of(logits, unimix, event=1, counts=counts)

    def parts(logits):
        each = logits[:, 0, :2], logits[:, 1]
        return [Categorical.of(x, unimix) for x in each]

    def measures(logits):
        dist, alone = whole(logits), parts(logits)
        return {
            "probs": dist.probs,
            "drawn": dist.sample(jnp.asarray(noise)),
            "entropy": dist.entropy(),
            "entropies": [part.entropy() for part in alone],
            "logp": dist.logp(index),
            "logps": [part.logp(index[:, i]) for i, part in enumerate(alone)],
            "gradient": jax.grad(lambda x: whole(x).entropy().sum())(logits),
            "dists": (dist, alone),
        }

    found = compute(measures, logits)
    np.testing.assert_allclose(found["probs"][:, 0, 2:], 0)
    np.testing.assert_allclose(found["probs"].sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(found["entropy"], sum(found["entropies"]), rtol=1e-5)
    np.testing.assert_allclose(found["logp"], sum(found["logps"]), rtol=1e-5)
    dist, alone = found["dists"]
    bounds = [part.entropy_bounds() for part in alone]
    np.testing.assert_allclose(dist.entropy_bounds(), np.sum(bounds, 0), rtol=1e-6)
    assert found["drawn"][..., 0].max() == 1
    assert found["drawn"][..., 1].max() == 3
    assert np.isfinite(found["gradient"]).all()
    np.testing.assert_array_equal(found["gradient"][:, 0, 2:], 0)
