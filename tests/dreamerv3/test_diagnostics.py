import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import (
    BATCH,
    CONTEXT,
    KEY,
    LENGTH,
    make_batch,
    make_state,
    quick_jit,
)

from dreamerv3 import model, report
from embodied.jax.nets import symexp
from embodied.jax.param_names import with_flat_params


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@functools.cache
def open_loop():
    return quick_jit(report.open_loop)


def predict(batch):
    networks = make_state(replay_context=CONTEXT).model
    # Large posterior logits, so that observations decide the state despite the noise.
    sure = {"dyn/obslogit/kernel": 100 * networks.dyn.parts["obslogit"].kernel}
    networks = with_flat_params(networks, sure)
    carry = model.init_carry(networks, BATCH)
    return open_loop()(networks, carry, batch, KEY)


def test_truth_and_prediction_have_the_shape_of_the_steps():
    batch = make_batch()
    truth, prediction = predict(batch)
    assert set(truth) == set(prediction) == {"vector", "token"}
    np.testing.assert_array_equal(truth["vector"], batch["vector"][:, CONTEXT:])
    assert prediction["vector"].shape == (BATCH, LENGTH, 3)
    assert prediction["token"].dtype == np.int32
    assert np.all((prediction["token"] >= 0) & (prediction["token"] < 4))


def test_the_second_half_sees_actions_but_neither_observations_nor_starts():
    batch = make_batch()
    _, first = predict(batch)
    half = CONTEXT + LENGTH // 2
    hidden = {
        **batch,
        "vector": batch["vector"].at[:, half:].set(9),
        "is_first": batch["is_first"].at[:, half:].set(True),
    }
    _, same = predict(hidden)
    np.testing.assert_array_equal(first["vector"], same["vector"])
    moved = {**batch, "force": batch["force"].at[:, half].add(1)}
    _, other = predict(moved)
    changed = np.any(first["vector"] != other["vector"], (0, 2))
    np.testing.assert_array_equal(changed, [False, False, False, True])
    seen = {**batch, "vector": batch["vector"].at[:, half - 1].multiply(-9)}
    _, other = predict(seen)
    changed = np.any(first["vector"] != other["vector"], (0, 2))
    np.testing.assert_array_equal(changed, [False, True, True, True])


def test_few_sequences_are_enough():
    batch = make_batch()
    networks = make_state(replay_context=CONTEXT).model
    carry = model.init_carry(networks, BATCH)
    truth, prediction = jax.eval_shape(
        lambda *args: report.open_loop(*args, limit=1),
        *(networks, carry, batch, KEY),
    )
    assert truth["vector"].shape == prediction["vector"].shape == (1, LENGTH, 3)


def test_predictions_are_in_the_units_of_the_environment():
    networks = make_state().model
    raw = {"vector": jnp.full((1, 3), 2.0), "token": jnp.eye(4)[:1]}
    np.testing.assert_allclose(
        networks.dec.predictions(raw)["vector"], symexp(jnp.array(2.0)), rtol=1e-6
    )


def test_gradient_norms_are_those_of_each_loss():
    state = make_state(replay_context=CONTEXT)
    carry = model.init_carry(state.model, BATCH)
    norms = quick_jit(report.gradient_norms)(state, carry, make_batch(), KEY)
    names = ("vector", "token", "rew", "con", "dyn", "rep", "policy", "value", "repval")
    assert set(norms) == {f"gradnorm/{name}" for name in names}
    assert all(np.isfinite(value) and value >= 0 for value in norms.values())
    assert norms["gradnorm/vector"] > 0
