import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_testing import compute

from embodied.jax import heads
from embodied.jax.nets import Builder, draw
from embodied.jax.param_names import flat_params, with_flat_params
from embodied.space import Space

SPACES = (
    ("force", Space(np.float32, (2, 2), -1, 1)),
    ("jump", Space(bool)),
    ("move", Space(np.int32, 2, 5, 8)),
)
CONFIG = {
    "layers": 2,
    "units": 6,
    "outscale": 1.0,
    "bins": 5,
    "unimix": 0.1,
    "minstd": 0.2,
    "maxstd": 0.9,
}

KEY = jax.random.key(0, impl="rbg")  # Faster to compile than the default.


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def filled(name, make):
    recipes = {}
    head = make(Builder(recipes, name, "normal_in", "rms", "silu", "float32"))
    head = jax.tree.map(jnp.asarray, {name: head})
    return with_flat_params(head, draw(KEY, recipes))[name]


@pytest.fixture(scope="module")
def policy():
    with jax.numpy_dtype_promotion("strict"):
        yield filled("pol", lambda b: heads.policy_head(b, 4, SPACES, CONFIG))


@pytest.fixture(scope="module")
def feat():
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)


def test_joined_outputs_equal_those_of_each_layer(policy, feat):
    def joined(policy, feat):
        dists = policy(feat)
        force, move = dists["force"], dists["move"]
        return force.mean, force.std, move.probs, move.entropy()

    def each(policy, feat):
        x = policy.mlp(feat)
        force, move = policy.head["force"], policy.head["move"]
        mean = jnp.tanh(force["mean"](x)).reshape(3, 2, 2)
        std = 0.7 * jax.nn.sigmoid(force["stddev"](x) + 2) + 0.2
        logits = move["logits"](x).reshape(3, 2, 3)
        probs = 0.9 * jax.nn.softmax(logits) + 0.1 / 3
        return mean, std.reshape(3, 2, 2), probs

    *found, entropy = compute(joined, policy, feat)
    for value, expected in zip(found, compute(each, policy, feat), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert entropy.shape == (3,)


def test_samples_are_values_of_their_spaces(policy, feat):
    actions = policy.sample(policy(feat), policy.noise(KEY, (3,)))
    for key, space in SPACES:
        assert actions[key].shape == (3, *space.shape)
        assert actions[key].dtype == space.dtype
    assert np.all((actions["move"] >= 5) & (actions["move"] < 8))
    # Normal samples are neither squashed nor clipped.
    large = policy(feat)["force"].sample(jnp.full((3, 2, 2), 9.0))
    assert np.all(large > 1)


def test_the_mode_is_the_most_likely_action(policy, feat):
    dists = policy(feat)
    actions = policy.mode(dists)
    np.testing.assert_array_equal(actions["force"], dists["force"].mean)
    np.testing.assert_array_equal(
        actions["move"], 5 + np.argmax(dists["move"].logprobs, -1)
    )
    assert actions["jump"].dtype == bool


def test_action_vectors_are_sorted_one_hots_and_values():
    actions = {
        "force": jnp.array([[[1.0, 2.0], [3.0, 4.0]]]),
        "jump": jnp.array([True]),
        "move": jnp.array([[5, 7]], jnp.int32),
    }
    vector = heads.action_vector(SPACES, actions)
    expected = [1, 2, 3, 4, 0, 1, 1, 0, 0, 0, 0, 1]
    np.testing.assert_array_equal(vector, [expected])
    assert heads.action_size(SPACES) == len(expected)
    missing = {**actions, "force": actions["force"].at[0, 0, 0].set(-jnp.inf)}
    vector = heads.action_vector(SPACES, missing)
    np.testing.assert_array_equal(vector, [[0] * 4 + expected[4:]])


def test_events_are_the_inverse_of_actions(policy, feat):
    dists = policy(feat)
    noise = policy.noise(KEY, (3,))
    actions = policy.sample(dists, noise)
    for key, space in SPACES:
        event = heads.action_event(space, actions[key])
        np.testing.assert_array_equal(event, dists[key].sample(noise[key]))


def test_names_and_scalar_heads(policy, feat):
    reward = filled("rew", lambda b: heads.twohot_head(b, 4, CONFIG))
    cont = filled("con", lambda b: heads.binary_head(b, 4, CONFIG))
    assert reward(feat).pred().shape == (3,)
    assert cont(feat).prob().shape == (3,)
    names = set(flat_params({"rew": reward, "con": cont, "pol": policy}))
    assert {
        "rew/head/logits/kernel",
        "rew/mlp/linear1/kernel",
        "con/head/logit/bias",
        "pol/head/force/mean/kernel",
        "pol/head/force/stddev/bias",
        "pol/head/move/logits/kernel",
        "pol/mlp/norm1/scale",
    } <= names


def test_value_starts_at_exactly_zero(feat):
    config = {**CONFIG, "outscale": 0.0}
    value = filled("val", lambda b: heads.twohot_head(b, 4, config))
    np.testing.assert_array_equal(value(feat).pred(), 0)
