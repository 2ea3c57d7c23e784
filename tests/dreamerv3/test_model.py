import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import (
    ACT_SPACE,
    OBS_SPACE,
    SIGNALS,
    agent_config,
    assert_golden,
    compute,
    differing,
    golden,
    golden_inputs,
    golden_state,
    make_batch,
    make_state,
    quick_jit,
)

from dreamerv3 import model
from dreamerv3.cli.config import load_config
from embodied import Space
from embodied.jax.param_names import flat_params, with_flat_params

MODULES = ("enc", "dyn", "dec", "rew", "con", "pol", "val")
IMAGE_TASK = (
    {"image": Space(np.uint8, (64, 64, 3)), **SIGNALS},
    {"action": Space(np.int32, (), 0, 17), "reset": Space(bool)},
)
VECTOR_TASK = (
    {
        "position": Space(np.float32, 14),
        "height": Space(np.float32),
        "velocity": Space(np.float32, 9),
        **SIGNALS,
    },
    {"action": Space(np.float32, 6, -1, 1), "reset": Space(bool)},
)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def observation(seed=0, **changes):
    batch = make_batch(seed)
    obs = {key: batch[key][:, 2] for key in OBS_SPACE}
    return {**obs, **changes}


@pytest.fixture(scope="module")
def policy():
    with jax.numpy_dtype_promotion("strict"):
        yield quick_jit(model.policy, static_argnames="mode")


@pytest.mark.parametrize(
    ("task", "size", "counts"),
    [
        (
            IMAGE_TASK,
            "size1m",
            (14_304, 377_408, 80_595, 57_663, 41_153, 50_641, 66_111),
        ),
        (
            IMAGE_TASK,
            "size12m",
            (220_416, 5_982_464, 1_272_003, 721_407, 656_129, 792_337, 853_503),
        ),
        (
            IMAGE_TASK,
            "size50m",
            (
                *(876_032, 23_892_480, 5_076_355, 2_753_279),
                *(2_622_977, 3_157_521, 3_279_615),
            ),
        ),
        (
            IMAGE_TASK,
            "size200m",
            (
                *(3_492_864, 95_495_168, 20_282_115, 10_749_183),
                *(10_488_833, 12_606_481, 12_850_431),
            ),
        ),
        (
            VECTOR_TASK,
            "size1m",
            (10_112, 364_416, 51_096, 57_663, 41_153, 50_316, 66_111),
        ),
    ],
)
def test_parameter_counts(task, size, counts):
    config = load_config(["--configs", size], {}).agent
    key = jax.random.key(0)
    state = jax.eval_shape(lambda key: model.init(key, *task, config), key)
    found = dict.fromkeys(MODULES, 0)
    for name, leaf in flat_params(state.model).items():
        found[name.split("/")[0]] += math.prod(leaf.shape)
        assert leaf.dtype == jnp.float32
    assert found == dict(zip(MODULES, counts))


def test_heads_equal_golden():
    networks, inputs = golden_state().model, golden_inputs()
    feat = model.features(inputs)
    assert_golden(feat, "feat")
    raw = golden("modules")["out:policy_disc_logits"]

    def heads(networks, feat):
        rew, pol = networks.rew(feat), networks.pol(feat)
        return {
            "reward_pred": rew.pred(),
            "reward_logits": rew.logits,
            "continue_prob": networks.con(feat).prob(),
            "value_pred": networks.val(feat).pred(),
            "policy_cont_mean": pol["act_cont"].mean,
            "policy_cont_std": pol["act_cont"].std,
        }, (pol["act_disc"].logprobs, jax.nn.log_softmax(raw))

    found, (logprobs, expected) = compute(heads, networks, feat)
    for name, value in found.items():
        assert_golden(value, name)
    np.testing.assert_allclose(logprobs, expected, rtol=1e-4, atol=1e-5)


def test_reference_parameters_load_by_name():
    values = golden("reference_params")
    state = golden_state()
    names = {name for name in flat_params(state) if not name.startswith("opt/")}
    assert names == set(values)
    loaded = flat_params(with_flat_params(state, values))
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name], value)


def test_the_slow_value_starts_as_a_copy_in_its_own_buffers():
    config = agent_config()
    init = quick_jit(lambda key: model.init(key, OBS_SPACE, ACT_SPACE, config))
    state = init(jax.random.key(0))
    fast, slow = flat_params(state.model.val), flat_params(state.slowval)
    assert differing(fast, slow) == set()
    for name in fast:
        pointers = [x[name].unsafe_buffer_pointer() for x in (fast, slow)]
        assert pointers[0] != pointers[1]


def test_the_same_key_makes_the_same_weights():
    config = agent_config()
    init = quick_jit(lambda key: model.init(key, OBS_SPACE, ACT_SPACE, config))
    first, second, other = (init(jax.random.key(seed)) for seed in (1, 1, 2))
    assert differing(first, second) == set()
    assert differing(first, other) == {
        name
        for name in flat_params(first)
        if name.endswith("/kernel")
        and not name.startswith(("opt/", "rew/head", "val/head", "slowval/head"))
    }


@pytest.mark.parametrize(
    ("obs_space", "act_space", "message"),
    [
        ({**OBS_SPACE, "policy": Space(np.float32)}, ACT_SPACE, "other names.*policy"),
        (SIGNALS, ACT_SPACE, "at least one observation"),
        (OBS_SPACE, {"reset": Space(bool)}, "at least one action"),
        (
            {**OBS_SPACE, "image": Space(np.uint8, (84, 84, 3))},
            ACT_SPACE,
            "multiples of 16",
        ),
    ],
)
def test_spaces_that_cannot_work_are_refused_when_built(obs_space, act_space, message):
    with pytest.raises(ValueError, match=message):
        model.init(jax.random.key(0), obs_space, act_space, agent_config())


def test_log_keys_are_not_encoded():
    spaces = {**OBS_SPACE, "log/image": Space(np.uint8, (7, 7, 3))}
    config = agent_config()
    state = jax.eval_shape(
        lambda key: model.init(key, spaces, ACT_SPACE, config), jax.random.key(0)
    )
    assert flat_params(state).keys() == flat_params(make_state()).keys()


def test_policy_steps_the_model_and_stores_latents(policy):
    networks = make_state().model
    carry = model.init_carry(networks, 2)
    obs = observation()
    new, actions, outputs = policy(networks, carry, obs, jax.random.key(0))
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, carry)
    jax.tree.map(np.testing.assert_array_equal, new["action"], actions)
    for key in ("force", "move"):
        assert actions[key].shape == (2, *ACT_SPACE[key].shape)
        assert actions[key].dtype == ACT_SPACE[key].dtype
    np.testing.assert_array_equal(outputs["dyn/deter"], new["deter"])
    assert outputs["dyn/stoch"].dtype == np.uint8
    back = model.unpack_latent(networks, outputs["dyn/deter"], outputs["dyn/stoch"])
    np.testing.assert_array_equal(back["stoch"], new["stoch"])
    same = model.unpack_latent(networks, new["deter"], new["stoch"])
    np.testing.assert_array_equal(same["stoch"], new["stoch"])


def test_an_episode_start_forgets_the_carry(policy):
    networks = make_state().model
    obs = observation(is_first=jnp.array([True, False]))
    fresh = model.init_carry(networks, 2)
    used, _, _ = policy(networks, fresh, observation(1), jax.random.key(1))
    first, _, _ = policy(networks, fresh, obs, jax.random.key(0))
    second, _, _ = policy(networks, used, obs, jax.random.key(0))
    np.testing.assert_array_equal(first["deter"][0], second["deter"][0])
    assert np.all(np.any(first["deter"][1] != second["deter"][1]))


def test_seeds_decide_the_actions_in_any_form(policy):
    networks, obs = make_state().model, observation()
    carry = model.init_carry(networks, 2)
    key = jax.random.key(5)
    results = [
        policy(networks, carry, obs, seed)[1]["force"]
        for seed in (key, jax.random.key_data(key), jnp.array(5), jax.random.key(6))
    ]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert np.all(results[0] != results[3])


def test_eval_samples_by_default_and_takes_the_mode_on_demand(policy):
    obs, key = observation(), jax.random.key(0)
    sampling = make_state().model
    carry = model.init_carry(sampling, 2)
    _, train, _ = policy(sampling, carry, obs, key, mode="train")
    _, evaluation, _ = policy(sampling, carry, obs, key, mode="eval")
    jax.tree.map(np.testing.assert_array_equal, train, evaluation)
    networks = make_state("--agent.eval_mode", "mode").model
    new, modes, _ = policy(networks, carry, obs, key, mode="eval")
    dists = networks.pol(model.features(new))
    np.testing.assert_allclose(modes["force"], dists["force"].mean, rtol=1e-5)
    with pytest.raises(ValueError, match="train or eval, got 'test'"):
        model.policy(sampling, carry, obs, key, "test")


def test_policy_parameters_act_like_the_whole_model(policy):
    networks = make_state(compute_dtype="bfloat16").model
    chosen = model.policy_params(networks)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(t)) for t in (networks, chosen)]
    assert sizes[1] < sizes[0] / 2
    carry, obs = model.init_carry(networks, 2), observation()
    assert carry["deter"].dtype == jnp.bfloat16
    whole = policy(networks, carry, obs, jax.random.key(0))
    part = policy(chosen, carry, obs, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, whole, part)
    assert part[2]["dyn/deter"].dtype == jnp.bfloat16


def test_policy_mixes_in_the_uniform_distribution():
    logits = [50.0, 0.0, 0.0]
    probs = []
    for unimix in ("0.01", "0"):
        pol = make_state("--agent.policy.unimix", unimix).model.pol
        weights = {
            "head/move/logits/kernel": np.zeros((8, 3)),
            "head/move/logits/bias": np.array(logits),
        }
        pol = with_flat_params(pol, weights)
        dists = quick_jit(pol)(jnp.zeros((1, 28)))
        probs.append(np.asarray(dists["move"].probs[0]))
    np.testing.assert_allclose(probs[0][1:], 0.01 / 3, rtol=1e-4)
    np.testing.assert_allclose(probs[1][1:], 0, atol=1e-10)


def test_without_context_the_policy_stores_nothing():
    networks = make_state(replay_context=0).model
    carry = model.init_carry(networks, 2)
    outputs = jax.eval_shape(
        model.policy, networks, carry, observation(), jax.random.key(0)
    )[2]
    assert outputs == {}


def test_many_classes_need_two_bytes():
    latent = {"deter": jnp.zeros((1, 2)), "stoch": jnp.zeros((1, 2, 300))}
    latent["stoch"] = latent["stoch"].at[..., 299].set(1)
    packed = model.pack_latent(latent)["dyn/stoch"]
    assert packed.dtype == np.uint16
    np.testing.assert_array_equal(packed, 299)


def test_latents_that_are_not_finite_are_not_stored():
    latent = {"deter": jnp.array([[1.0, jnp.nan]]), "stoch": jnp.zeros((1, 2, 3))}
    np.testing.assert_array_equal(model.pack_latent(latent)["dyn/deter"], [[1, 0]])
