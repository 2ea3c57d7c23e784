import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from embodied.jax import optim
from embodied.jax.optim import (
    LARGE_TENSOR,
    SMALL_TENSOR,
    Optimizer,
    clip_adaptively,
    tensor_norms,
)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def test_updates_equal_golden():
    path = pathlib.Path(__file__).parents[1] / "golden" / "functions.npz"
    with np.load(path) as file:
        golden = {k: jnp.asarray(file[k]) for k in file if k.startswith("opt_")}
    optimizer = Optimizer()
    params = {"a": golden["opt_a0"], "b": golden["opt_b0"]}
    state = optimizer.init(params)
    for step in range(3):
        grads = {key: golden[f"opt_g{key}{step}"] for key in params}
        updates, state, _ = optimizer.update(grads, state, params)
        for key, update in updates.items():
            expected = golden[f"opt_u{key}{step}"]
            np.testing.assert_allclose(update, expected, rtol=1e-4, atol=2e-12)
        params = jax.tree.map(jnp.add, params, updates)


def slow_updates(optimizer, params, gradients):
    """The optimiser in NumPy and float64, one tensor at a time."""
    square = {key: np.zeros(x.shape) for key, x in params.items()}
    mean = {key: np.zeros(x.shape) for key, x in params.items()}
    params = {key: np.asarray(x, np.float64) for key, x in params.items()}
    history = []
    for step, grads in enumerate(gradients):
        updates = {}
        for key, weight in params.items():
            grad = np.asarray(grads[key], np.float64)
            limit = optimizer.agc * max(1e-3, np.sqrt((weight**2).sum()))
            norm = np.sqrt((grad**2).sum())
            grad = grad * min(1, limit / norm)
            square[key] = 0.999 * square[key] + 0.001 * grad**2
            root = np.sqrt(square[key] / (1 - 0.999 ** (step + 1)))
            mean[key] = 0.9 * mean[key] + 0.1 * grad / (root + 1e-20)
            update = mean[key] / (1 - 0.9 ** (step + 1))
            if key.endswith("/kernel"):
                update = update + optimizer.wd * weight
            rate = optimizer.lr * min(1, step / optimizer.warmup)
            updates[key] = -rate * update
            params[key] = weight + updates[key]
        history.append(updates)
    return history


def random_trees(steps):
    rng = np.random.default_rng(0)
    shapes = {"x/kernel": (3, 4), "x/bias": (4,)}
    trees = [
        {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
        for _ in range(steps + 1)
    ]
    return trees[0], trees[1:]


@pytest.mark.parametrize("large", [2, LARGE_TENSOR], ids=["large", "small"])
def test_updates_equal_a_loop(large, monkeypatch):
    monkeypatch.setattr(optim, "LARGE_TENSOR", large)
    optimizer = Optimizer(lr=0.01, wd=0.1, warmup=3)
    params, gradients = random_trees(6)
    expected = slow_updates(optimizer, params, gradients)
    state = optimizer.init(params)
    for grads, wanted in zip(gradients, expected):
        updates, state, _ = optimizer.update(grads, state, params)
        for key in updates:
            np.testing.assert_allclose(updates[key], wanted[key], rtol=1e-3, atol=1e-8)
        params = jax.tree.map(jnp.add, params, updates)


def test_first_update_is_zero_and_counts():
    params, (grads,) = random_trees(1)
    optimizer = Optimizer()
    updates, state, metrics = optimizer.update(grads, optimizer.init(params), params)
    assert not any(map(np.any, updates.values()))
    assert metrics["updates"] == 1
    assert np.any(state["momentum"]["x/bias"])


def test_clipping_bounds_the_norm_relative_to_the_weights():
    weights = {"a": jnp.array([[3.0, 4.0]]), "b": jnp.array([3.0, 4.0, 0.0])}
    weights["new"] = jnp.zeros(2)
    grads = {"a": jnp.array([[30.0, 40.0]]), "b": jnp.array([0.0, 0.3, 0.4])}
    grads["new"] = jnp.array([30.0, 40.0])
    clipped = clip_adaptively(grads, tensor_norms(grads), tensor_norms(weights), 0.3)
    np.testing.assert_allclose(clipped["a"], [[0.9, 1.2]], 1e-6)
    np.testing.assert_array_equal(clipped["b"], grads["b"])
    # Weights that are zero may still move.
    np.testing.assert_allclose(jnp.linalg.norm(clipped["new"]), 0.3e-3, rtol=1e-5)


def test_norms_are_those_of_each_tensor():
    rng = np.random.default_rng(0)
    shapes = [(), (1,), (3, 0), (SMALL_TENSOR - 1,), (SMALL_TENSOR,), (70, 80)]
    shapes += [(int(size),) for size in rng.integers(1, 50, 75)]
    order = rng.permutation(len(shapes))
    tree = {str(i): rng.normal(size=shapes[i]).astype(np.float32) for i in order}
    norms = tensor_norms(jax.tree.map(jnp.asarray, tree))
    assert norms.keys() == tree.keys()
    for name, value in tree.items():
        assert norms[name].shape == ()
        expected = np.linalg.norm(value.astype(np.float64).ravel())
        np.testing.assert_allclose(norms[name], expected, rtol=1e-5)


@pytest.mark.parametrize("size", [5, SMALL_TENSOR])
def test_norms_show_what_is_not_finite(size):
    tree = {"a": jnp.ones(3), "b": jnp.ones(size).at[1].set(jnp.nan), "c": jnp.ones(7)}
    norms = tensor_norms(tree)
    assert [bool(jnp.isfinite(norms[name])) for name in "abc"] == [True, False, True]


def test_zero_turns_clipping_off():
    params, (grads,) = random_trees(1)
    grads = jax.tree.map(lambda x: 1e3 * x, grads)
    optimizer = Optimizer(agc=0.0, momentum=False)
    _, state, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(
        state["square"]["x/bias"], 0.001 * grads["x/bias"] ** 2, rtol=1e-5
    )
    assert state["momentum"] == {}


def test_without_momentum_the_first_direction_is_the_sign():
    params, (grads,) = random_trees(1)
    optimizer = Optimizer(lr=0.5, momentum=False, warmup=0)
    updates, _, _ = optimizer.update(grads, optimizer.init(params), params)
    for key in grads:
        np.testing.assert_allclose(updates[key], -0.5 * np.sign(grads[key]), rtol=1e-5)


@pytest.mark.parametrize("large", [2, LARGE_TENSOR], ids=["large", "small"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_updates_that_are_not_finite_are_skipped_and_counted(bad, large, monkeypatch):
    monkeypatch.setattr(optim, "LARGE_TENSOR", large)
    params, gradients = random_trees(3)
    optimizer = Optimizer(warmup=0)
    state = optimizer.init(params)
    _, state, _ = optimizer.update(gradients[0], state, params)
    broken = {**gradients[1], "x/bias": gradients[1]["x/bias"].at[0].set(bad)}
    updates, skipped, metrics = optimizer.update(broken, state, params)
    assert not any(map(np.any, updates.values()))
    assert metrics["nonfinite"] == 1
    assert metrics["updates"] == 1
    for key in ("square", "momentum", "step"):
        jax.tree.map(np.testing.assert_array_equal, skipped[key], state[key])
    _, skipped, metrics = optimizer.update(broken, skipped, params)
    assert metrics["nonfinite"] == 2
    updates, skipped, metrics = optimizer.update(gradients[2], skipped, params, bad)
    assert not any(map(np.any, updates.values()))
    assert metrics["nonfinite"] == 3
    _, _, metrics = optimizer.update(gradients[2], skipped, params, 1.0)
    assert metrics["nonfinite"] == 0
    assert metrics["updates"] == 2


@pytest.mark.parametrize("large", [2, LARGE_TENSOR], ids=["large", "small"])
def test_a_step_that_is_not_finite_is_skipped_although_its_gradients_are(
    large, monkeypatch
):
    monkeypatch.setattr(optim, "LARGE_TENSOR", large)
    params, gradients = random_trees(2)
    optimizer = Optimizer(warmup=0)
    _, state, _ = optimizer.update(gradients[0], optimizer.init(params), params)
    momentum = {**state["momentum"]}
    momentum["x/bias"] = momentum["x/bias"].at[0].set(np.inf)
    state = {**state, "momentum": momentum}
    updates, skipped, metrics = optimizer.update(gradients[1], state, params)
    assert np.isfinite(metrics["grad_norm"]) and metrics["nonfinite"] == 1
    assert metrics["updates"] == 1 and metrics["update_rms"] == 0
    assert updates["x/bias"][0] == 0
    assert all(np.isfinite(update).all() for update in updates.values())
    if large > 2:
        assert not any(map(np.any, updates.values()))
        jax.tree.map(np.testing.assert_array_equal, skipped["square"], state["square"])
    assert np.isfinite(skipped["square"]["x/bias"]).all()


def test_metrics_describe_all_parameters():
    params = {"a": jnp.full((2, 2), 3.0)}
    optimizer = Optimizer(lr=0.5, warmup=0, momentum=False, agc=0.0)
    grads = {"a": jnp.full((2, 2), 2.0)}
    _, _, metrics = optimizer.update(grads, optimizer.init(params), params)
    values = {key: float(value) for key, value in metrics.items()}
    assert values == pytest.approx(
        {
            "updates": 1,
            "grad_norm": 4,
            "grad_rms": 2,
            "update_rms": 0.5,
            "param_rms": 3,
            "param_count": 4,
            "nonfinite": 0,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("const", 0, 0.0),
        ("const", 5, 0.5),
        ("const", 10, 1.0),
        ("const", 99, 1.0),
        ("linear", 5, 0.5),
        ("linear", 10, 1.0),
        ("linear", 20, 0.55),
        ("linear", 30, 0.1),
        ("linear", 99, 0.1),
        ("cosine", 10, 1.0),
        ("cosine", 15, 0.1 + 0.9 * (0.5 + 0.5 * np.cos(np.pi / 4))),
        ("cosine", 20, 0.55),
        ("cosine", 99, 0.1),
    ],
)
def test_schedules(schedule, step, expected):
    optimizer = Optimizer(lr=2.0, schedule=schedule, warmup=10, anneal=30)
    np.testing.assert_allclose(optimizer.rate(jnp.array(step)), 2 * expected, 1e-5)


def test_without_warmup_the_first_update_has_the_full_rate():
    np.testing.assert_allclose(Optimizer(warmup=0).rate(jnp.array(0)), 4e-5, rtol=1e-6)


def test_schedules_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="const, linear or cosine, got 'step'"):
        Optimizer(schedule="step")
    with pytest.raises(ValueError, match=r"anneal above warmup \(1000\).* got 10"):
        Optimizer(schedule="linear", anneal=10)
