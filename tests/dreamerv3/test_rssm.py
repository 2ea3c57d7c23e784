import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import (
    KEY,
    agent_config,
    assert_golden,
    compute,
    fill,
    golden,
    golden_inputs,
    golden_state,
    quick_jit,
)

from dreamerv3.fused import observe
from dreamerv3.rssm import make_rssm, squash_action
from embodied.jax.heads import action_vector
from embodied.jax.param_names import flat_params

ACTIONS, TOKENS, BATCH, LENGTH = 3, 5, 2, 4
VARIANTS = [
    {},
    {"absolute": True, "obslayers": 2, "dynlayers": 2, "imglayers": 1, "norm": "layer"},
    {"norm": "none", "obslayers": 2},
]


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def rssm(dtype="float32", unroll=1, **changes):
    config = {**agent_config().dyn.rssm, **changes}
    return fill(make_rssm({}, ACTIONS, TOKENS, config, dtype, unroll))


def sequences(dyn, seed=0):
    rng = np.random.default_rng(seed)
    dtype = dyn.cell.dtype

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    first = np.zeros((BATCH, LENGTH), bool)
    first[0, 2] = True
    shape = (BATCH, dyn.cell.stoch, dyn.cell.classes)
    return {
        "latent": {
            "deter": normal(BATCH, dyn.cell.deter, dtype=dtype),
            "stoch": normal(*shape, dtype=dtype),
        },
        "action": normal(BATCH, LENGTH, ACTIONS) * 2,
        "tokens": normal(BATCH, LENGTH, TOKENS, dtype=dtype),
        "first": jnp.asarray(first),
        "noise": dyn.noise(KEY, (LENGTH, BATCH)),
    }


def plain_scan(dyn, latent, action, tokens, first, noise):
    """`observe` by single steps, with ordinary gradients."""

    def body(latent, now):
        latent, logits = dyn.step(latent, *now)
        return latent, (latent, logits)

    action, tokens, first = (x.swapaxes(0, 1) for x in (action, tokens, first))
    _, result = jax.lax.scan(body, latent, (action, tokens, first, noise))
    return jax.tree.map(lambda x: x.swapaxes(0, 1), result)


def assert_close(first, second, rtol=1e-4, atol=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), first, second
    )


def test_one_step_equals_golden():
    model, inputs = golden_state().model, golden_inputs()

    def step(dyn, inputs, tokens):
        action = action_vector(model.pol.spaces, inputs)
        latent = {"deter": inputs["deter"], "stoch": inputs["stoch"]}
        deter = dyn.core(latent, action)
        return {
            "action_embed": action,
            "core_deter": deter,
            "post_logit": dyn.posterior(deter, tokens),
            "prior_logit": dyn.prior(deter),
        }

    for name, value in compute(step, model.dyn, inputs, golden_tokens()).items():
        assert_golden(value, name)


def golden_tokens():
    return jnp.asarray(golden("modules")["out:tokens"])


def test_the_scan_equals_golden():
    dyn, inputs = golden_state().model.dyn, golden_inputs()
    action = action_vector(golden_state().model.pol.spaces, inputs)
    latent = {"deter": inputs["deter"], "stoch": inputs["stoch"]}
    first = jnp.zeros((5, 1), bool)
    noise = dyn.noise(KEY, (1, 5))
    states, logits = quick_jit(observe)(
        dyn, latent, action[:, None], golden_tokens()[:, None], first, noise
    )
    assert_golden(states["deter"][:, 0], "core_deter")
    assert_golden(logits[:, 0], "post_logit")


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_scan_equals_single_steps_and_so_do_its_gradients(changes):
    dyn = rssm(unroll=2, **changes)
    data = sequences(dyn)
    floats = {key: data[key] for key in ("latent", "action", "tokens")}
    rest = {key: data[key] for key in ("first", "noise")}
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: observe(dyn, **data))
    weights = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes
    )

    def total(function, dyn, floats):
        result = function(dyn, **floats, **rest)
        products = jax.tree.map(lambda x, y: (x * y).sum(), result, weights)
        return sum(jax.tree.leaves(products)), result

    @quick_jit
    def both(dyn, floats):
        return [
            jax.grad(total, (1, 2), has_aux=True)(function, dyn, floats)
            for function in (observe, plain_scan)
        ]

    (scan_grads, scan), (loop_grads, loop) = both(dyn, floats)
    assert_close(scan, loop)
    assert_close(scan_grads, loop_grads, 1e-3, 1e-4)
    moved = [name for name, x in flat_params(scan_grads[0]).items() if np.any(x)]
    expected = [name for name in flat_params(dyn) if not name.startswith("prior")]
    assert moved == expected


def test_resets_in_the_middle_forget_state_and_action():
    dyn = rssm()
    data = sequences(dyn)
    run = quick_jit(observe)
    states, _ = run(dyn, **data)
    assert np.all(np.sort(states["stoch"], -1) == [0, 0, 0, 1])
    changed = {**data, "action": data["action"].at[:, :3].add(1.0)}
    changed["latent"] = jax.tree.map(lambda x: x + 1, data["latent"])
    others, _ = run(dyn, **changed)
    same = np.all(states["deter"] == others["deter"], -1)
    # Row 0 begins an episode at step 2, row 1 never does.
    np.testing.assert_array_equal(same, [[0, 0, 1, 1], [0, 0, 0, 0]])


def test_a_reset_step_is_a_step_from_zeros():
    dyn = rssm()
    data = sequences(dyn)
    now = (data["tokens"][:, 0], data["noise"][0])
    started = jnp.ones(BATCH, bool)
    step = quick_jit(dyn.step)
    reset, _ = step(data["latent"], data["action"][:, 0], now[0], started, now[1])
    zeros = jnp.zeros((BATCH, ACTIONS))
    fresh, _ = step(dyn.initial(BATCH), zeros, now[0], ~started, now[1])
    assert_close(reset, fresh, 0, 0)


def test_actions_are_divided_without_gradient_through_the_divisor():
    action = jnp.array([0.5, -4.0, 2.0])
    np.testing.assert_allclose(squash_action(action), [0.5, -1, 1])
    grad = jax.grad(lambda x: squash_action(x).sum())(action)
    np.testing.assert_allclose(grad, [1, 0.25, 0.5])


def test_imagination_with_given_actions_follows_the_prior():
    dyn = rssm()
    data = sequences(dyn)

    @quick_jit
    def step(latent, action, noise):
        deter = dyn.core(latent, action)
        return {"deter": deter, "stoch": dyn.cell.sample(dyn.prior(deter), noise)}

    states = quick_jit(dyn.imagine)(data["latent"], data["action"], data["noise"])
    latent = data["latent"]
    for t in range(LENGTH):
        latent = step(latent, data["action"][:, t], data["noise"][t])
        assert_close(jax.tree.map(lambda x, t=t: x[:, t], states), latent)


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_scan_keeps_the_compute_dtype(changes):
    dyn = rssm("bfloat16", **changes)
    states, logits = jax.eval_shape(lambda: observe(dyn, **sequences(dyn)))
    dtypes = {x.dtype for x in jax.tree.leaves((states, logits, dyn.initial(1)))}
    assert dtypes == {jnp.dtype("bfloat16")}
    latent = sequences(dyn)["latent"]
    deter = jax.eval_shape(dyn.core, latent, jnp.zeros((BATCH, ACTIONS)))
    assert deter.dtype == jnp.bfloat16


def test_blocks_must_divide_deter():
    with pytest.raises(ValueError, match="dyn/dynhid0 expected"):
        rssm(blocks=5)


def test_the_absolute_posterior_does_not_see_deter():
    dyn = rssm(absolute=True)
    data = sequences(dyn)
    deter, tokens = data["latent"]["deter"], data["tokens"][:, 0]
    np.testing.assert_array_equal(
        dyn.posterior(deter, tokens), dyn.posterior(deter + 1, tokens)
    )
    assert flat_params(dyn)["obs0/kernel"].shape[0] == TOKENS
