import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import (
    agent_config,
    assert_golden,
    fill,
    golden_inputs,
    golden_state,
    quick_jit,
)

from dreamerv3 import model
from dreamerv3.encoder import make_encoder
from embodied import Space
from embodied.jax.param_names import flat_params

IMAGE = Space(np.uint8, (48, 48, 3))


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def encoder(spaces, dtype="float32", **changes):
    config = {**agent_config().enc.simple, "depth": 1, **changes}
    enc, size = make_encoder({}, tuple(sorted(spaces.items())), config, dtype)
    return fill(enc), size


def images(*lead, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, 256, (*lead, *IMAGE.shape), np.uint8))


@pytest.mark.parametrize("tuning", [model.CPU, model.ACCELERATOR])
@pytest.mark.parametrize("acting", [False, True])
def test_tokens_equal_golden(tuning, acting):
    enc = golden_state(tuning).model.enc
    tokens = quick_jit(enc.for_acting() if acting else enc)(golden_inputs())
    assert_golden(tokens, "tokens")


def test_vectors_come_before_images():
    enc, size = encoder({"a_image": IMAGE, "z_vector": Space(np.float32, 2)})
    obs = {"a_image": images(2), "z_vector": jnp.ones((2, 2))}
    function = quick_jit(enc)
    tokens = function(obs)
    assert tokens.shape == (2, size)
    units = agent_config().enc.simple.units
    changed = function({**obs, "z_vector": jnp.zeros((2, 2))})
    moved = np.any(tokens != changed, 0)
    assert np.any(moved[:units])
    assert not np.any(moved[units:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_symlog_is_taken_before_the_cast(dtype):
    enc, _ = encoder({"x": Space(np.float32, 1)}, dtype, layers=1)
    x = jnp.array([[1e30], [1e20]])
    inputs = jnp.log1p(x).astype(dtype)
    layer, norm = enc.parts["mlp0"], enc.parts["mlp0norm"]
    expected = jax.nn.silu(norm(layer(inputs))).astype(dtype)
    result = enc({"x": x})
    assert result.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(
        result.astype(jnp.float32), expected.astype(jnp.float32)
    )


def test_symlog_can_be_turned_off():
    on, _ = encoder({"x": Space(np.float32, 1)}, symlog=True)
    off, _ = encoder({"x": Space(np.float32, 1)}, symlog=False)
    x = jnp.array([[5.0]])
    np.testing.assert_allclose(on({"x": x}), off({"x": jnp.log1p(x)}), rtol=1e-6)


def test_missing_values_are_encoded_as_zeros():
    enc, _ = encoder({"x": Space(np.float32, 2), "n": Space(np.int32, (), 0, 3)})
    present = {"x": jnp.zeros((2, 2)), "n": jnp.array([1, 1], jnp.int32)}
    missing = {"x": jnp.array([[0, 0], [-jnp.inf, 7]]), "n": present["n"]}
    np.testing.assert_array_equal(enc(present), enc(missing))
    missing = {**present, "n": jnp.array([1, -1], jnp.int32)}
    first, second = enc(missing)
    np.testing.assert_array_equal(first, enc(present)[0])
    assert np.any(second != first)


@pytest.mark.parametrize(
    ("changes", "side"),
    [({}, 3), ({"outer": True}, 6), ({"strided": True}, 3)],
)
def test_stages_halve_images(changes, side):
    enc, size = encoder({"image": IMAGE}, **changes)
    assert size == side * side * 4
    shape = jax.eval_shape(enc, {"image": images(2, 3)}).shape
    assert shape == (2, 3, size)
    kernels = flat_params({"enc": enc})
    assert kernels["enc/cnn0/kernel"].shape == (5, 5, 3, 2)


def test_images_are_encoded_in_the_compute_dtype():
    enc, size = encoder({"image": IMAGE}, "bfloat16")
    tokens = jax.eval_shape(enc, {"image": images(2)})
    assert (tokens.shape, tokens.dtype) == ((2, size), jnp.bfloat16)


def test_image_keys_are_stacked_on_channels():
    spaces = {"left": IMAGE, "right": Space(np.uint8, (48, 48, 1))}
    enc, _ = encoder(spaces)
    assert enc.parts["cnn0"].kernel.shape[2] == 4


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Space(np.uint8, (64, 64)), "'x' expected an image .* grayscale"),
        (Space(np.float32, (8, 8, 3)), "'x' expected an image"),
        (Space(np.float32, (2, 2, 2, 2)), "'x' expected an image"),
        (Space(np.str_, ()), "'x' expected an image"),
        (Space(np.uint8, (84, 84, 3)), "multiples of 16 from 48 to 256.* got 84x84"),
        (Space(np.uint8, (32, 64, 3)), "multiples of 16 from 48 to 256.* got 32x64"),
        (Space(np.uint8, (64, 272, 3)), "got 64x272"),
    ],
)
def test_what_cannot_be_encoded_is_refused(space, message):
    with pytest.raises(ValueError, match=message):
        encoder({"x": space})


def test_images_of_different_sizes_and_no_observations_are_refused():
    with pytest.raises(ValueError, match="one size for all keys"):
        encoder({"a": IMAGE, "b": Space(np.uint8, (64, 64, 3))})
    with pytest.raises(ValueError, match="at least one observation"):
        encoder({})


@pytest.mark.parametrize("side", [48, 64, 96, 256])
def test_supported_image_sizes(side):
    _, size = encoder({"x": Space(np.uint8, (side, 64, 1))})
    assert size == (side // 16) * 4 * 4


@pytest.mark.parametrize("norm", ["rms", "layer", "none"])
def test_norms_of_the_encoder(norm):
    enc, _ = encoder({"x": Space(np.float32, 2)}, norm=norm, act="tanh")
    names = {name.rpartition("/")[2] for name in flat_params(enc)}
    extra = {"rms": {"scale"}, "layer": {"scale", "shift"}, "none": set()}[norm]
    assert names == {"kernel", "bias"} | extra
    assert np.all(np.abs(enc({"x": jnp.ones((1, 2))})) <= 1)
