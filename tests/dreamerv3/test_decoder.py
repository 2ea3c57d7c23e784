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
from dreamerv3.decoder import make_decoder
from embodied import Space


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


SPACES = {
    "vector": Space(np.float32, (2, 2)),
    "token": Space(np.int32, (), 0, 3),
    "flags": Space(bool, 2),
}


def decoder(spaces, dtype="float32", **changes):
    config = {**agent_config().dec.simple, **changes}
    named = tuple(sorted(spaces.items()))
    return fill(make_decoder({}, named, 16, 12, config, dtype))


def states(*lead):
    rng = np.random.default_rng(0)
    deter = jnp.asarray(rng.normal(size=(*lead, 16)), jnp.float32)
    stoch = jnp.asarray(rng.normal(size=(*lead, 3, 4)), jnp.float32)
    return deter, stoch


@pytest.mark.parametrize("tuning", [model.CPU, model.ACCELERATOR])
def test_outputs_equal_golden(tuning):
    dec, inputs = golden_state(tuning).model.dec, golden_inputs()
    outputs = quick_jit(dec)(inputs["deter"], inputs["stoch"])
    assert_golden(outputs["image"], "dec_image")
    assert_golden(outputs["vector"], "dec_vector_symlog")
    assert_golden(outputs["token"], "dec_token_logits")
    assert_golden(outputs["int2d"], "dec_int2d_logits")


def test_losses_by_hand():
    dec = decoder(SPACES)
    outputs = {
        "vector": jnp.zeros((1, 2, 2)),
        "token": jnp.array([[0.0, 1.0, 2.0]]),
        "flags": jnp.zeros((1, 2, 2)),
    }
    obs = {
        "vector": jnp.array([[[0.0, 1.0], [-3.0, 0.0]]]),
        "token": jnp.array([1], jnp.int32),
        "flags": jnp.array([[True, False]]),
    }
    losses = quick_jit(dec.losses)(outputs, obs)
    np.testing.assert_allclose(
        losses["vector"], [np.log(2) ** 2 + np.log(4) ** 2], rtol=1e-5
    )
    expected = np.log(np.exp([0, 1, 2]).sum()) - 1
    np.testing.assert_allclose(losses["token"], [expected], rtol=1e-5)
    np.testing.assert_allclose(losses["flags"], [2 * np.log(2)], rtol=1e-5)


def test_image_loss_sums_squared_errors_of_scaled_pixels():
    dec = decoder({"image": Space(np.uint8, (48, 48, 1))})
    image = jnp.zeros((1, 48, 48, 1), jnp.uint8).at[0, 0, 0, 0].set(255)
    losses = dec.losses({"image": jnp.zeros((1, 48, 48, 1))}, {"image": image})
    np.testing.assert_allclose(losses["image"], [1.0])


def test_missing_values_have_no_loss_and_no_gradient():
    dec = decoder(SPACES)
    outputs = {
        "vector": jnp.ones((2, 2, 2)),
        "token": jnp.ones((2, 3)),
        "flags": jnp.ones((2, 2, 2)),
    }
    obs = {
        "vector": jnp.zeros((2, 2, 2)).at[1, 0, 1].set(-jnp.inf),
        "token": jnp.array([0, -1], jnp.int32),
        "flags": jnp.zeros((2, 2), bool),
    }

    def total(outputs):
        losses = dec.losses(outputs, obs)
        return sum(loss.sum() for loss in losses.values()), losses

    grads, losses = quick_jit(jax.grad(total, has_aux=True))(outputs)
    for key in ("vector", "token"):
        assert losses[key][0] > 0
        assert losses[key][1] == 0
        assert not np.any(grads[key][1])
        assert np.all(np.isfinite(grads[key]))
    assert np.all(losses["flags"] > 0)


def test_predictions_are_values_of_the_spaces():
    dec = decoder(SPACES)
    outputs = {
        "vector": jnp.full((1, 2, 2), np.log(3.0)),
        "token": jnp.array([[0.0, 5.0, 2.0]]),
        "flags": jnp.array([[[0.0, 1.0], [1.0, 0.0]]]),
    }
    result = dec.predictions(outputs)
    np.testing.assert_allclose(result["vector"], 2, rtol=1e-5)
    np.testing.assert_array_equal(result["token"], [1])
    np.testing.assert_array_equal(result["flags"], [[True, False]])
    plain = decoder(SPACES, symlog=False)
    np.testing.assert_allclose(plain.predictions(outputs)["vector"], np.log(3.0), 1e-6)


def test_without_symlog_the_target_is_the_value_itself():
    dec = decoder({"x": Space(np.float32, 1)}, symlog=False)
    losses = dec.losses({"x": jnp.zeros((1, 1))}, {"x": jnp.full((1, 1), 3.0)})
    np.testing.assert_array_equal(losses["x"], [9])


@pytest.mark.parametrize("changes", [{}, {"outer": True}, {"strided": True}])
def test_image_outputs_have_the_size_of_their_keys(changes):
    spaces = {"a": Space(np.uint8, (48, 64, 3)), "b": Space(np.uint8, (48, 64, 1))}
    dec = decoder(spaces, **changes)
    shapes = jax.eval_shape(dec, *states(2, 3))
    assert shapes["a"].shape == (2, 3, 48, 64, 3)
    assert shapes["b"].shape == (2, 3, 48, 64, 1)


def test_outputs_are_float32_in_any_compute_dtype():
    dec = decoder({**SPACES, "image": Space(np.uint8, (48, 48, 1))}, "bfloat16")
    deter, stoch = (x.astype(jnp.bfloat16) for x in states(1))
    outputs = jax.eval_shape(dec, deter, stoch)
    assert {x.dtype for x in outputs.values()} == {jnp.dtype("float32")}


def test_blocks_must_divide_the_channels():
    with pytest.raises(ValueError, match=r"bspace expected a divisor.* got 16"):
        decoder({"image": Space(np.uint8, (48, 48, 1))}, bspace=16)


def test_output_scale_is_that_of_the_output_layers():
    recipes = {}
    spaces = (("image", Space(np.uint8, (48, 48, 1))), ("x", Space(np.float32)))
    config = {**agent_config().dec.simple, "outscale": 0.5}
    make_decoder(recipes, spaces, 16, 12, config, "float32")
    scaled = {name for name, recipe in recipes.items() if recipe.scale == 0.5}
    assert scaled == {"dec/imgout/kernel", "dec/vec/x/pred/kernel"}
