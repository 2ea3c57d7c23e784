import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from embodied.jax.normalize import Normalizer


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def run(normalizer, batches):
    state = normalizer.init()
    for batch in batches:
        state = normalizer.update(state, jnp.asarray(batch, jnp.float32))
    return state


def test_percentiles_equal_golden():
    path = pathlib.Path(__file__).parents[1] / "golden" / "functions.npz"
    with np.load(path) as file:
        golden = {key: file[key] for key in file if key.startswith("norm_")}
    normalizer = Normalizer("perc", rate=0.01, limit=1.0, debias=False)
    state = run(normalizer, golden["norm_x"])
    np.testing.assert_allclose(state["lo"]["value"], golden["norm_lo"], rtol=1e-4)
    np.testing.assert_allclose(state["hi"]["value"], golden["norm_hi"], rtol=1e-4)
    offset, scale = normalizer.stats(state)
    np.testing.assert_allclose(offset, golden["norm_lo"], rtol=1e-4)
    np.testing.assert_allclose(scale, golden["norm_scale"], rtol=1e-4)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("impl", ["meanstd", "perc"])
def test_statistics_equal_a_loop(impl, debias):
    batches = np.random.default_rng(0).normal(3, 2, size=(5, 4, 10))
    normalizer = Normalizer(impl, 0.1, 1e-8, 20.0, 70.0, debias)
    first = second = weight = 0.0
    for x in batches:
        new = np.percentile(x, [20, 70])
        if impl == "meanstd":
            new = (x.mean(), (x**2).mean())
        first = 0.9 * first + 0.1 * new[0]
        second = 0.9 * second + 0.1 * new[1]
        weight = 0.9 * weight + 0.1
    if debias:
        first, second = first / weight, second / weight
    scale = second - first
    if impl == "meanstd":
        scale = np.sqrt(second - first**2)
    result = normalizer.stats(run(normalizer, batches))
    np.testing.assert_allclose(result, (first, scale), rtol=1e-4)


def test_bias_correction_makes_the_first_batch_count_fully():
    normalizer = Normalizer("meanstd", 0.01)
    offset, scale = normalizer.stats(run(normalizer, [[1.0, 5.0]]))
    np.testing.assert_allclose([offset, scale], [3, 2], rtol=1e-5)


def test_scale_has_a_lower_limit():
    normalizer = Normalizer("perc", limit=1.0)
    _, scale = normalizer.stats(run(normalizer, [[0.5, 0.5]]))
    np.testing.assert_array_equal(scale, 1)


def test_none_has_no_state_and_no_effect():
    normalizer = Normalizer("none")
    state = run(normalizer, [[5.0]])
    assert state == {}
    np.testing.assert_array_equal(normalizer.stats(state), (0, 1))


def test_statistics_have_no_gradient():
    normalizer = Normalizer("meanstd")

    def scale(x):
        return normalizer.stats(normalizer.update(normalizer.init(), x))[1]

    assert not np.any(jax.grad(scale)(jnp.array([1.0, 2.0])))


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="none, meanstd or perc, got 'max'"):
        Normalizer("max").init()
