import jax
import jax.numpy as jnp
import numpy as np
import pytest

from embodied.jax.nets import (
    ACTIVATIONS,
    Builder,
    Conv,
    Linear,
    Norm,
    Recipe,
    activate,
    block_matmul,
    draw,
    known_linear,
    rms_silu,
    symexp,
    symlog,
    whole_gradient,
    wide_matmul,
)
from embodied.jax.param_names import (
    apart,
    cast_matrices,
    flat_params,
    with_flat_params,
)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


def builder(norm="rms", winit="trunc_normal_in", act="silu", dtype="float32"):
    return Builder({}, "net", winit, norm, act, dtype)


def test_linear_multiplies_and_adds_its_bias():
    layer = Linear(normal(4, 3), normal(3, seed=1), "float32")
    x = normal(2, 5, 4, seed=2)
    expected = np.asarray(x) @ np.asarray(layer.kernel) + np.asarray(layer.bias)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_a_known_result_of_a_layer_has_the_gradient_of_the_layer():
    layer = Linear(normal(4, 3), normal(3, seed=1), "float32")
    x, weights = normal(7, 4, seed=2), normal(5, 3, seed=3)

    def plain(layer, x):
        return (layer(x[:5]) * weights).sum()

    def known(layer, x):
        return (known_linear(layer, x, jnp.ones((5, 3))) * weights).sum()

    np.testing.assert_allclose(known(layer, x), weights.sum(), rtol=1e-5)
    expected, result = (jax.grad(of, (0, 1))(layer, x) for of in (plain, known))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        result,
        expected,
    )


def test_gradients_of_slices_are_computed_as_one():
    def total(x):
        y = whole_gradient(x)
        return (y[:2] * 2).sum() + (y[1:] * 3).sum()

    np.testing.assert_array_equal(jax.grad(total)(normal(3)), [2, 5, 3])
    text = str(jax.make_jaxpr(jax.grad(total))(normal(3)))
    assert "optimization_barrier" in text


def test_weights_apart_give_the_same_results_and_gradients():
    layers = {"a": builder().linear("a", 4, 4), "anorm": builder().scale(4)}
    layers = with_flat_params(layers, {"a/kernel": normal(4, 4)})
    x = normal(2, 4, seed=1)

    def total(layers, hide):
        used = apart(layers, "float32") if hide else layers
        return activate(used["anorm"], used["a"](x), "silu", "float32").sum()

    expected, result = (
        jax.value_and_grad(total)(layers, hide) for hide in (False, True)
    )
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    hidden = apart(layers, "bfloat16")
    assert hidden["a"].kernel.dtype == jnp.bfloat16
    assert hidden["a"].bias.dtype == hidden["anorm"].scale.dtype == jnp.float32


def test_blocks_of_the_input_meet_their_own_block_of_the_kernel():
    layer = builder().block("b", 6, 4, 2)
    layer = with_flat_params(layer, {"kernel": normal(2, 3, 2), "bias": normal(4)})
    x = normal(5, 6, seed=1)
    parts = [np.asarray(x)[:, 3 * g : 3 * g + 3] @ layer.kernel[g] for g in range(2)]
    expected = np.concatenate(parts, -1) + layer.bias
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_blocks_must_divide_the_sizes():
    with pytest.raises(ValueError, match=r"net/b expected .* divides .* got 4"):
        builder().block("b", 6, 4, 4)


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 2)], ids=["dense", "blocks"])
def test_wide_products_are_not_rounded_and_their_gradients_are(shape):
    x = normal(5, 6).astype(jnp.bfloat16)
    kernel = normal(*shape, seed=1).astype(jnp.bfloat16)
    plain = jnp.matmul if kernel.ndim == 2 else block_matmul
    wide, pull = jax.vjp(wide_matmul, x, kernel)
    exact = plain(x.astype(jnp.float32), kernel.astype(jnp.float32))
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, rtol=1e-6, atol=1e-6)
    gradient = normal(*wide.shape, seed=2)
    expected = jax.vjp(plain, x, kernel)[1](gradient.astype(jnp.bfloat16))
    for one, other in zip(pull(gradient), expected, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(one, other)


def test_convolution_equals_a_loop():
    layer = Conv(normal(3, 3, 2, 4), normal(4, seed=1), "float32")
    x = np.asarray(normal(1, 2, 5, 6, 2, seed=2))
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)])
    expected = np.zeros((1, 2, 5, 6, 4))
    for row, column in np.ndindex(5, 6):
        window = padded[:, :, row : row + 3, column : column + 3]
        expected[:, :, row, column] = np.einsum("abijc,ijco->abo", window, layer.kernel)
    result = layer(jnp.asarray(x))
    np.testing.assert_allclose(result, expected + layer.bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("transposed", "side"), [(False, 4), (True, 16)])
def test_strided_convolutions_halve_and_double(transposed, side):
    layer = Conv(normal(5, 5, 2, 3), normal(3), "float32", 2, transposed)
    assert layer(normal(1, 8, 8, 2)).shape == (1, side, side, 3)


def test_rms_norm_by_hand():
    norm = Norm(jnp.array([1.0, 2.0]), None, "rms")
    x = jnp.array([3.0, 4.0])
    expected = np.array([3.0, 8.0]) / np.sqrt(12.5 + 1e-4)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-4), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_gradients_of_norm_and_silu_are_the_ordinary_ones(dtype, rtol, size):
    x = (size * normal(4, 3, 16)).astype(dtype).at[0, 0].set(0)
    scale = 1 + normal(16, seed=1)
    gradient = normal(4, 3, 16, seed=2).astype(dtype)

    def ordinary(x, scale):
        return jax.nn.silu(Norm(scale, None, "rms")(x)).astype(dtype)

    def ours(x, scale):
        return rms_silu(x, scale, dtype)

    results = []
    for function in (ours, ordinary):
        value, pull = jax.vjp(function, x, scale)
        by_x, by_scale = pull(gradient)
        assert (by_x.dtype, by_scale.dtype) == (x.dtype, scale.dtype)
        results.append([np.asarray(y, np.float32) for y in (value, by_x, by_scale)])
    for found, expected in zip(*results):
        atol = rtol * max(1e-3, np.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def test_norm_and_silu_far_from_zero_have_finite_gradients():
    x = jnp.array([[1e4, -1e4, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])

    def total(x, scale):
        return rms_silu(x, scale, "float32").sum()

    gradients = jax.grad(total, (0, 1))(x, jnp.full(4, 1e3))
    assert all(np.isfinite(y).all() for y in gradients)


def test_layer_norm_has_mean_zero_and_variance_one():
    norm = builder("layer").scale(64)
    y = norm(normal(3, 64) * 5 + 7)
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(y.std(-1), 1, rtol=1e-4)


def test_no_norm_has_no_parameters_and_no_effect():
    norm = builder("none").scale(4)
    assert flat_params(norm) == {}
    x = normal(2, 4)
    np.testing.assert_array_equal(norm(x), x)


def test_norms_run_in_float32_and_layers_in_the_compute_dtype():
    build = builder(dtype="bfloat16")
    layer, norm = build.linear("a", 3, 4), build.scale(4)
    assert layer(normal(2, 3)).dtype == jnp.bfloat16
    assert norm(layer(normal(2, 3))).dtype == jnp.float32
    assert activate(norm, layer(normal(2, 3)), "silu", "bfloat16").dtype == jnp.bfloat16
    assert all(x.dtype == np.float32 for x in flat_params((layer, norm)).values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("relu", lambda x: np.maximum(x, 0)),
        ("elu", lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
        ("tanh", np.tanh),
        (
            "gelu",
            lambda x: (
                0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            ),
        ),
    ],
)
def test_activations(name, expected):
    x = np.linspace(-3, 3, 13, dtype=np.float32)
    np.testing.assert_allclose(
        ACTIVATIONS[name](jnp.asarray(x)), expected(x), rtol=1e-5, atol=1e-6
    )


def test_symlog_and_symexp_are_inverse_and_odd():
    x = jnp.asarray(np.linspace(-1e4, 1e4, 101), jnp.float32)
    np.testing.assert_allclose(symexp(symlog(x)), x, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(symlog(-x), -symlog(x))


@pytest.mark.parametrize("distribution", ["trunc_normal", "normal", "uniform"])
@pytest.mark.parametrize(("fan", "count"), [("in", 900), ("out", 400), ("avg", 650)])
def test_weights_have_the_variance_of_their_fan(distribution, fan, count):
    # The shape of a block kernel, whose fans count all blocks.
    recipe = Recipe((2, 450, 200), distribution, fan, 2.0)
    weights = draw(jax.random.key(0), {"c": recipe})["c"]
    # For the uniform distribution, the scale is the bound, not the deviation.
    scale = np.sqrt(1 / 3) if distribution == "uniform" else 1.0
    np.testing.assert_allclose(weights.std(), scale * 2 / np.sqrt(count), rtol=0.02)
    np.testing.assert_allclose(weights.mean(), 0, atol=1e-3)


def test_default_initialisation_is_a_truncated_normal():
    build = builder()
    build.linear("a", 100, 300)
    (weights,) = draw(jax.random.key(0), build.recipes).values()
    limit = 2 * 1.1368 * np.sqrt(1 / 100)
    assert 0.99 * limit < np.abs(weights).max() <= limit


def test_kernels_differ_and_the_scale_zero_makes_zeros():
    build = builder()
    build.linear("a", 4, 4)
    build.linear("b", 4, 4)
    build.linear("zero", 4, 4, 0.0)
    weights = draw(jax.random.key(0), build.recipes)
    assert sorted(weights) == ["net/a/kernel", "net/b/kernel", "net/zero/kernel"]
    assert not np.any(weights["net/a/kernel"] == weights["net/b/kernel"])
    np.testing.assert_array_equal(weights["net/zero/kernel"], 0)


def test_unknown_initialisations_are_refused():
    with pytest.raises(ValueError, match="got 'xavier_in'"):
        builder(winit="xavier_in").linear("a", 2, 2)


def test_flat_names_follow_the_structure():
    mlp = builder().mlp(3, 4, 2)
    names = {
        *("linear0/kernel", "linear0/bias", "norm0/scale"),
        *("linear1/kernel", "linear1/bias", "norm1/scale"),
    }
    assert set(flat_params(mlp)) == names
    assert "a/b/0/kernel" in flat_params({"a": {"b": (mlp.parts["linear0"],)}})


def test_named_values_replace_arrays_and_the_rest_stays():
    mlp = jax.tree.map(jnp.asarray, builder().mlp(3, 4, 1))
    new = with_flat_params(mlp, {"linear0/bias": np.arange(4.0)})
    np.testing.assert_array_equal(new.parts["linear0"].bias, [0, 1, 2, 3])
    assert new.parts["linear0"].bias.dtype == jnp.float32
    assert new.parts["linear0"].kernel is mlp.parts["linear0"].kernel


def test_values_that_do_not_fit_are_refused():
    mlp = builder().mlp(3, 4, 1)
    with pytest.raises(ValueError, match="do not exist here: linear7/bias"):
        with_flat_params(mlp, {"linear7/bias": np.zeros(4)})
    with pytest.raises(ValueError, match=r"expected shape \(4,\), got \(5,\)"):
        with_flat_params(mlp, {"linear0/bias": np.zeros(5)})


def test_casting_matrices_leaves_norms_alone_and_results_the_same():
    build = builder(dtype="bfloat16")
    mlp = {"mlp": build.mlp(3, 4, 2)}
    mlp = with_flat_params(
        mlp, {k: normal(*v.shape) for k, v in flat_params(mlp).items()}
    )
    cast = cast_matrices(mlp, "bfloat16")
    dtypes = {k.rpartition("/")[2]: v.dtype for k, v in flat_params(cast).items()}
    assert dtypes == {"kernel": "bfloat16", "bias": "bfloat16", "scale": "float32"}
    x = normal(5, 3, seed=3)
    np.testing.assert_array_equal(
        mlp["mlp"](x).astype(jnp.float32), cast["mlp"](x).astype(jnp.float32)
    )
