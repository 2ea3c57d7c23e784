import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import compute

from dreamerv3.fused import sum_units
from dreamerv3.recurrence import Recurrence, scan_blocks, scan_with_vjp


class Network(Recurrence):
    """A small recurrent network with an output that does not feed back."""

    def step(self, params, carry, inputs):
        hidden = jnp.tanh(carry["h"] @ params["w"] + inputs["x"] @ params["u"])
        new = {"h": hidden, "c": carry["c"] * inputs["keep"] + jnp.sin(hidden)}
        return new, new["c"] @ params["v"]


NETWORK = Network()


def ordinary(params, carry, inputs, unroll=1):
    def body(carry, inputs):
        carry, outputs = NETWORK.step(params, carry, inputs)
        return carry, (carry, outputs)

    return jax.lax.scan(body, carry, inputs, unroll=unroll)[1]


@pytest.fixture(scope="module")
def arguments():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {"w": normal(4, 4), "u": normal(3, 4), "v": normal(4, 2)}
    carry = {"h": normal(2, 4), "c": normal(2, 4)}
    keep = jnp.asarray(rng.random((6, 2, 1)) > 0.3, jnp.float32)
    return params, carry, {"x": normal(6, 2, 3), "keep": keep}


@pytest.mark.parametrize("unroll", [1, 3])
def test_values_equal_those_of_a_scan(arguments, unroll):
    result = scan_with_vjp(NETWORK, unroll, *arguments)
    # Unrolled alike, since the compiler may round differently otherwise.
    expected = ordinary(*arguments, unroll=unroll)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
        *(result, expected),
    )


@pytest.mark.parametrize(
    ("unroll", "iterations"), [(1, 6), (2, 3), (4, 2), (6, 1), (9, 1)]
)
def test_iterations_take_as_many_steps_as_divide_all(unroll, iterations):
    inputs = {"a": jnp.arange(6), "b": jnp.arange(12.0).reshape(6, 2)}

    def body(carry, now):
        return carry * 2 + now["a"], {"sum": now["b"] + carry.astype(jnp.float32)}

    def run(scan):
        return scan(body, jnp.array(1), inputs, unroll)

    carry, outputs = run(scan_blocks)
    expected_carry, expected = jax.lax.scan(body, jnp.array(1), inputs)
    assert carry == expected_carry
    np.testing.assert_array_equal(outputs["sum"], expected["sum"])
    assert f"length={iterations}\n" in str(jax.make_jaxpr(lambda: run(scan_blocks))())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_outputs_of_all_shapes_and_dtypes_keep_their_places(reverse, copy):
    rng = np.random.default_rng(0)
    inputs = {
        "wide": jnp.asarray(rng.normal(size=(6, 2, 3, 2)), jnp.float32),
        "narrow": jnp.asarray(rng.normal(size=(6, 2)), jnp.float32),
        "count": jnp.arange(6),
        "flag": jnp.asarray(rng.random((6, 2)) > 0.5),
    }

    def body(carry, now):
        carry = carry + now["wide"].sum((1, 2)) * now["count"] + now["narrow"]
        outputs = {**now, "carry": carry, "half": now["wide"].astype(jnp.bfloat16)}
        return carry, (outputs, {})

    def run(scan, *options):
        return scan(body, jnp.zeros(2), inputs, *options)

    carry, outputs = run(scan_blocks, 3, reverse, copy)
    expected = jax.lax.scan(body, jnp.zeros(2), inputs, reverse=reverse)
    np.testing.assert_allclose(carry, expected[0], rtol=1e-6)
    assert jax.tree.structure(outputs) == jax.tree.structure(expected[1])
    for one, other in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected[1])):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("joined", [False, True])
def test_an_iteration_writes_and_copies_once_for_each_dtype(joined):
    inputs = [jnp.ones((6, 2, 3)), jnp.ones((6, 2)), jnp.arange(12).reshape((6, 2))]

    def body(carry, now):
        return carry, [*now, now[0] * 2]

    def run():
        return scan_blocks(body, 0.0, inputs, 3, copy=joined)

    (loop,) = (
        equation
        for equation in jax.make_jaxpr(run)().jaxpr.eqns
        if equation.primitive.name == "scan"
    )
    written = [x.aval.shape for x in loop.outvars if x.aval.ndim]
    assert sorted(written) == [(2, 3, 2, 1), (2, 3, 2, 3 + 1 + 3)]
    text = str(loop.params["jaxpr"])
    assert text.count("optimization_barrier") == joined
    read = [x.aval.shape for x in loop.invars if len(x.aval.shape) > 2]
    assert len(read) == (2 if joined else 3)


@pytest.mark.parametrize("unroll", [1, 3])
def test_gradients_equal_those_of_a_scan(arguments, unroll):
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(ordinary, *arguments)
    weights = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes
    )

    def total(function, *arguments):
        products = jax.tree.map(
            lambda x, y: (x * y).sum(), function(*arguments), weights
        )
        return sum(jax.tree.leaves(products))

    def ours(*arguments):
        return scan_with_vjp(NETWORK, unroll, *arguments)

    expected, result = (
        compute(jax.grad(lambda *a, of=function: total(of, *a), (0, 1, 2)), *arguments)
        for function in (ordinary, ours)
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        result,
        expected,
    )


def loops(jaxpr):
    """Shapes of the results of each loop in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield [out.aval.shape for out in equation.outvars]


def test_the_backward_loop_holds_no_gradient_of_weights(arguments):
    def gradient(function):
        def total(params):
            return function(params, *arguments[1:])[1].sum()

        return list(loops(jax.make_jaxpr(jax.grad(total))(arguments[0]).jaxpr))

    weights = {x.shape for x in arguments[0].values()}
    _, ordinary_backward = gradient(ordinary)
    assert weights <= set(ordinary_backward)
    _, backward = gradient(lambda *arguments: scan_with_vjp(NETWORK, 1, *arguments))
    assert not weights & set(backward)


@pytest.mark.parametrize("units", [1, 8, 12, 64])
def test_sums_in_two_stages_equal_sums(units):
    x = np.random.default_rng(units).normal(size=(3, 2, units)).astype(np.float32)
    result = compute(sum_units, x)
    assert result.shape == (3, 2, 1)
    np.testing.assert_allclose(result, x.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)
