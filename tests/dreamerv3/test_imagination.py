import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import KEY, compute, make_state, quick_jit

from dreamerv3.imagination import imagine
from dreamerv3.model import features
from embodied import Space
from embodied.jax.heads import action_vector

COUNT, LENGTH = 5, 3
# Spaces of a single action; contributions of the first two are looked up.
SINGLE = [
    Space(np.int32, (), 2, 6),
    Space(bool),
    Space(np.int32, (2,), 0, 3),
    Space(np.float32, (2,), -1, 1),
]


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def start(dyn):
    rng = np.random.default_rng(0)
    cell = dyn.cell
    index = rng.integers(0, cell.classes, (COUNT, cell.stoch))
    return {
        "deter": jnp.asarray(rng.normal(size=(COUNT, cell.deter)), jnp.float32),
        "stoch": jax.nn.one_hot(jnp.asarray(index), cell.classes),
    }


@pytest.mark.parametrize("action", [None, *SINGLE], ids=str)
def test_the_scan_equals_policy_and_model_in_turn(action):
    model = make_state(action=action).model
    dyn, pol = model.dyn, model.pol
    latent = start(dyn)

    @quick_jit
    def run(dyn, pol, latent):
        return imagine(dyn, pol, latent, LENGTH, KEY, unroll=LENGTH)

    @quick_jit
    def step(latent, noise):
        actions = pol.sample(pol(features(latent)), noise["action"])
        deter = dyn.core(latent, action_vector(pol.spaces, actions))
        stoch = dyn.cell.sample(dyn.prior(deter), noise["stoch"])
        return {"deter": deter, "stoch": stoch}, actions

    imagined, hidden, actions = run(dyn, pol, latent)
    assert imagined.shape[:2] == (LENGTH + 1, COUNT)
    np.testing.assert_array_equal(imagined[0], features(latent))

    def draw(key):
        state_key, action_key = jax.random.split(key)
        return {
            "stoch": dyn.noise(state_key, (LENGTH, COUNT)),
            "action": pol.noise(action_key, (LENGTH, COUNT)),
        }

    noise = compute(draw, KEY)
    for t in range(LENGTH):
        known = pol.mlp.parts["linear0"](features(latent))
        np.testing.assert_allclose(hidden[t], known, rtol=1e-4, atol=1e-5)
        latent, action = step(latent, jax.tree.map(lambda x, t=t: x[t], noise))
        expected = features(latent)
        np.testing.assert_allclose(imagined[t + 1], expected, rtol=1e-4, atol=1e-5)
        for name, value in action.items():
            np.testing.assert_allclose(actions[name][t], value, rtol=1e-4, atol=1e-5)
            assert actions[name].dtype == value.dtype


def test_no_gradient_flows_through_imagined_steps():
    model = make_state().model

    def total(dyn, pol, latent):
        imagined, hidden, actions = imagine(dyn, pol, latent, LENGTH, KEY)
        return imagined.sum() + hidden.sum() + actions["force"].sum()

    text = str(
        jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(
            model.dyn, model.pol, start(model.dyn)
        )
    )
    assert text.count("scan[") == 1


def test_imagination_keeps_the_compute_dtype():
    model = make_state(compute_dtype="bfloat16").model
    latent = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start(model.dyn))
    imagined, hidden, actions = jax.eval_shape(
        lambda: imagine(model.dyn, model.pol, latent, LENGTH, KEY)
    )
    assert imagined.dtype == hidden.dtype == jnp.bfloat16
    assert actions["force"].dtype == jnp.float32
    assert actions["move"].dtype == jnp.int32
