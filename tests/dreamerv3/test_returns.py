import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import TOLERANCE, golden
from hypothesis import given
from hypothesis import strategies as st

from dreamerv3.losses import imagined_weight, lambda_return

DISC, LAM = 1 - 1 / 333, 0.95


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def slow_return(last, term, rew, boot, disc, lam):
    """The recursion of the return, one step at a time."""
    batch, steps = rew.shape
    result = np.zeros((batch, steps - 1))
    for row in range(batch):
        future = boot[row, -1]
        for t in reversed(range(steps - 1)):
            live = (1 - term[row, t + 1]) * disc
            cont = (1 - last[row, t + 1]) * lam
            mixed = (1 - cont) * boot[row, t + 1] + cont * future
            future = rew[row, t + 1] + live * mixed
            result[row, t] = future
    return result


def random_inputs(seed, batch=3, steps=7):
    rng = np.random.default_rng(seed)
    last, term = rng.random((2, batch, steps)) < 0.2
    rew, boot = rng.normal(size=(2, batch, steps)).astype(np.float32)
    return last, term, rew, boot


@pytest.mark.parametrize("compiled", [False, True])
def test_lambda_return_equals_golden(compiled):
    data = golden("functions")
    inputs = [jnp.asarray(data[f"lr_{k}"]) for k in ("last", "term", "rew", "boot")]

    def function(*inputs):
        return lambda_return(*inputs, DISC, LAM)

    function = jax.jit(function) if compiled else function
    np.testing.assert_allclose(function(*inputs), data["lr_out"], **TOLERANCE)


def test_lambda_return_by_hand():
    zeros = jnp.zeros((1, 3))
    rew = jnp.array([[9.0, 1.0, 2.0]])
    boot = jnp.array([[9.0, 10.0, 20.0]])
    # R_1 = 2 + 0.5 * 20 = 12;  R_0 = 1 + 0.5 * (0.75 * 10 + 0.25 * 12) = 6.25
    result = lambda_return(zeros, zeros, rew, boot, 0.5, 0.25)
    np.testing.assert_allclose(result, [[6.25, 12.0]])


@given(seed=st.integers(0, 2**32 - 1), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_lambda_return_equals_a_loop(seed, lam):
    inputs = random_inputs(seed)
    expected = slow_return(*inputs, DISC, lam)
    result = lambda_return(*map(jnp.asarray, inputs), DISC, lam)
    np.testing.assert_allclose(result, expected, **TOLERANCE)


def test_lambda_zero_bootstraps_from_the_next_step():
    last, term, rew, boot = random_inputs(0)
    result = lambda_return(*map(jnp.asarray, (last, term, rew, boot)), DISC, 0.0)
    expected = rew[:, 1:] + DISC * ~term[:, 1:] * boot[:, 1:]
    np.testing.assert_allclose(result, expected, **TOLERANCE)


def test_lambda_one_is_the_discounted_sum_and_the_last_bootstrap():
    _, _, rew, boot = random_inputs(1)
    zeros = jnp.zeros_like(jnp.asarray(rew))
    result = lambda_return(zeros, zeros, jnp.asarray(rew), jnp.asarray(boot), 0.9, 1.0)
    powers = 0.9 ** np.arange(rew.shape[1] - 1)
    expected = (powers * rew[:, 1:]).sum(1) + 0.9 * powers[-1] * boot[:, -1]
    np.testing.assert_allclose(result[:, 0], expected, **TOLERANCE)


def test_nothing_after_a_terminal_step_matters():
    last, term, rew, boot = random_inputs(2)
    term[:, 3] = True
    first = lambda_return(*map(jnp.asarray, (last, term, rew, boot)), DISC, LAM)
    rew[:, 4:], boot[:, 3:] = 99, 99
    second = lambda_return(*map(jnp.asarray, (last, term, rew, boot)), DISC, LAM)
    np.testing.assert_array_equal(first[:, :3], second[:, :3])


def test_lambda_return_refuses_different_shapes():
    with pytest.raises(ValueError, match="one shape"):
        lambda_return(*[jnp.zeros((2, 3))] * 3, jnp.zeros((2, 4)), DISC, LAM)


def test_weight_is_the_probability_to_get_there():
    con = jnp.array([[0.5, 0.25, 1.0]])
    # The first weight is the first probability, not one.
    np.testing.assert_allclose(imagined_weight(con, 1.0), [[0.5, 0.125, 0.125]])


def test_weight_equals_a_loop_and_leaves_out_the_first_discount():
    con = np.random.default_rng(0).random((2, 5)).astype(np.float32)
    expected = np.zeros_like(con)
    for row in range(2):
        weight = 1.0
        for t in range(5):
            weight *= con[row, t] * (0.9 if t else 1.0)
            expected[row, t] = weight
    np.testing.assert_allclose(imagined_weight(jnp.asarray(con), 0.9), expected, 1e-5)


def test_weight_is_one_while_nothing_ends():
    np.testing.assert_array_equal(imagined_weight(jnp.ones((2, 4)), 1.0), 1)
