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
    arrays,
    compute,
    differing,
    flags,
    make_batch,
    make_state,
    module_of,
    quick_jit,
    train_step,
)

from dreamerv3 import model, training
from embodied.jax.param_names import flat_params, with_flat_params

WORLD = {"enc", "dyn"}
METRICS = {
    *("dyn_ent", "rep_ent", "adv", "adv_std", "adv_mag", "rew", "con", "ret", "val"),
    *("tar", "weight", "slowval", "ret_min", "ret_max", "ret_rate"),
    *("ent/force", "ent/move", "rand/force", "rand/move"),
    *("loss/vector", "loss/token", "loss/rew", "loss/con", "loss/dyn", "loss/rep"),
    *("loss/policy", "loss/value", "loss/repval"),
    *("opt/loss", "opt/updates", "opt/grad_norm", "opt/grad_rms", "opt/update_rms"),
    *("opt/param_rms", "opt/param_count", "opt/nonfinite"),
}


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def state_with(**options):
    # Without free nats, the prior is trained even if it is close to the posterior.
    # Without warm-up, the second update is large enough to change all weights.
    argv = flags(**{"agent.dyn.rssm.free_nats": 0, "agent.opt.warmup": 1})
    return make_state(*argv, replay_context=CONTEXT, **options)


@functools.cache
def trained():
    """A state, a batch, and the results of one step on them."""
    with jax.numpy_dtype_promotion("strict"):
        state, batch = state_with(priority=True), make_batch()
        carry = model.init_carry(state.model, BATCH)
        return state, batch, train_step()(state, carry, batch, KEY)


def terms(state, carry, batch, training_=False):
    norms = training.norm_states(state)
    return training.loss_terms(
        state.model, carry, batch, KEY, state.slowval, norms, training_
    )


def shapes_of(state, batch):
    carry = model.init_carry(state.model, BATCH)
    return jax.eval_shape(training.train_step, state, carry, batch, KEY)


def loss_shapes(state, batch):
    """Shapes of the outputs and metrics, without those of the optimiser."""
    carry = model.init_carry(state.model, BATCH)
    _, (_, outputs, metrics, _) = jax.eval_shape(terms, state, carry, batch)
    return outputs, metrics


@functools.cache
def compiled_open_batch():
    return quick_jit(training.split_context)


def split_context(state, carry, batch):
    return jax.device_get(compiled_open_batch()(state.model, carry, batch))


def test_metrics_have_their_names():
    _, _, (_, _, _, metrics) = trained()
    assert set(metrics) == METRICS
    assert all(np.isfinite(value) and value.ndim == 0 for value in metrics.values())
    assert 0 <= metrics["rand/move"] <= 1
    assert 0 <= metrics["rand/force"] <= 1


def test_the_loss_is_the_scaled_sum():
    _, _, (_, _, _, metrics) = trained()
    scales = {"rep": 0.1, "repval": 0.3}
    names = [name[5:] for name in metrics if name.startswith("loss/")]
    total = sum(scales.get(name, 1) * metrics[f"loss/{name}"] for name in names)
    np.testing.assert_allclose(metrics["opt/loss"], total, rtol=1e-5)


def test_outputs_for_the_replay():
    _, batch, (_, carry, outputs, _) = trained()
    replay = outputs["replay"]
    assert set(replay) == {"stepid", "dyn/deter", "dyn/stoch", "priority"}
    np.testing.assert_array_equal(replay["stepid"], batch["stepid"][:, CONTEXT:])
    assert replay["dyn/deter"].shape == (BATCH, LENGTH, 16)
    assert replay["dyn/stoch"].shape == (BATCH, LENGTH, 3)
    assert replay["dyn/stoch"].dtype == np.uint8
    np.testing.assert_array_equal(carry["deter"], replay["dyn/deter"][:, -1])
    np.testing.assert_array_equal(
        np.argmax(carry["stoch"], -1), replay["dyn/stoch"][:, -1]
    )
    np.testing.assert_array_equal(carry["action"]["move"], batch["move"][:, -1])


def test_the_first_update_moves_nothing_but_the_statistics():
    state, _, (new, _, _, metrics) = trained()
    moved = {module_of(name) for name in differing(state, new)}
    # The learning rate starts at zero; the slow value differs from the value at first.
    assert moved == {"opt", "retnorm", "slowval", "slowval_count"}
    assert metrics["opt/updates"] == 1


def test_the_second_update_moves_every_parameter():
    _, batch, (first, carry, _, _) = trained()
    second, _, _, _ = train_step()(first, carry, batch, KEY)
    assert differing(first.model, second.model) == set(flat_params(first.model))
    for name, slow in arrays(second.slowval).items():
        old = arrays(first.slowval)[name]
        expected = 0.98 * old + 0.02 * arrays(second.model.val)[name]
        np.testing.assert_allclose(slow, expected, rtol=1e-5, atol=1e-7)


def test_the_slow_value_may_move_less_often():
    state = make_state(*flags(**{"agent.slowvalue.every": 2}))
    value = jax.tree.map(jnp.zeros_like, state.slowval)
    slow, count = compute(training.slow_update, state, value)
    np.testing.assert_array_equal(count, 1)
    for name, old in arrays(state.slowval).items():
        np.testing.assert_allclose(arrays(slow)[name], np.float32(0.98) * old)
    odd = type(state)(**{**vars(state), "slowval_count": {"value": jnp.array(1)}})
    slow, _ = compute(training.slow_update, odd, value)
    jax.tree.map(np.testing.assert_array_equal, slow, state.slowval)


def test_values_that_are_not_finite_neither_stop_nor_spoil_training():
    state, batch, _ = trained()
    carry = model.init_carry(state.model, BATCH)
    # A missing observation does not skip the update, but a broken reward does.
    odd = {**batch, "vector": batch["vector"].at[0, 3, 0].set(jnp.nan)}
    _, _, _, metrics = train_step()(state, carry, odd, KEY)
    assert metrics["opt/nonfinite"] == 0
    odd = {**batch, "reward": batch["reward"].at[0, 3].set(jnp.nan)}
    new, carry, outputs, metrics = train_step()(state, carry, odd, KEY)
    assert metrics["opt/nonfinite"] == 1
    for tree in (new, carry, outputs):
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(tree))
    moved = {module_of(name) for name in differing(state, new)}
    assert moved == {"opt"}


def test_an_infinite_loss_with_finite_gradients_skips_the_update():
    state, batch, _ = trained()
    # Each step with another class than 0 has a loss slightly below the largest float,
    # so that their sum overflows. Gradients of logits are differences of probabilities.
    name = "dec/vec/token/logits/bias"
    sure = np.array([3e38, 0, 0, 0], np.float32)
    assert np.sum(np.asarray(batch["token"])[:, CONTEXT:] != 0) > 1
    weights = with_flat_params(state.model, {name: sure})
    state = type(state)(**{**vars(state), "model": weights})
    carry = model.init_carry(state.model, BATCH)
    new, _, _, metrics = train_step()(state, carry, batch, KEY)
    assert np.isinf(metrics["opt/loss"]) and np.isfinite(metrics["opt/grad_norm"])
    assert metrics["opt/nonfinite"] == 1
    assert {module_of(name) for name in differing(state, new)} == {"opt"}


def test_the_carry_comes_from_the_replay_where_a_sequence_begins():
    state, batch, _ = trained()
    carry = model.init_carry(state.model, BATCH)
    carry["deter"] += 1
    opened, _, data = split_context(state, carry, batch)
    last = {key: batch[f"dyn/{key}"][:, CONTEXT - 1] for key in ("deter", "stoch")}
    np.testing.assert_array_equal(opened["deter"], last["deter"])
    np.testing.assert_array_equal(np.argmax(opened["stoch"], -1), last["stoch"])
    assert data["is_first"].shape == (BATCH, LENGTH)
    # The `is_first` that the replay sets lies within the context.
    assert not np.any(data["is_first"])


def test_the_carry_goes_on_in_later_chunks():
    state, batch, _ = trained()
    carry = model.init_carry(state.model, BATCH)
    carry["deter"] += 1
    later = {**batch, "consec": batch["consec"].at[1].set(1)}
    opened, _, _ = split_context(state, carry, later)
    np.testing.assert_array_equal(opened["deter"][0], batch["dyn/deter"][0, -1])
    np.testing.assert_array_equal(opened["deter"][1], carry["deter"][1])


def test_one_hot_latents_are_read_like_indices():
    state, batch, _ = trained()
    carry = model.init_carry(state.model, BATCH)
    onehot = {**batch, "dyn/stoch": jax.nn.one_hot(batch["dyn/stoch"], 4)}
    first, second = (split_context(state, carry, data)[0] for data in (batch, onehot))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_previous_actions_come_from_the_last_context_step_on():
    state, batch, _ = trained()
    carry = model.init_carry(state.model, BATCH)
    _, action, _ = split_context(state, carry, batch)
    np.testing.assert_array_equal(action[..., :2], batch["force"][:, CONTEXT - 1 : -1])
    later = {**batch, "consec": batch["consec"] + 1}
    _, same, _ = split_context(state, carry, later)
    np.testing.assert_array_equal(action, same)


def test_without_context_the_carry_holds_the_previous_action():
    state = make_state(replay_context=0)
    batch = make_batch(context=0)
    carry = model.init_carry(state.model, BATCH)
    carry["action"]["force"] += 7
    latent, action, data = split_context(state, carry, batch)
    np.testing.assert_array_equal(action[:, 0, :2], 7)
    np.testing.assert_array_equal(action[:, 1:, :2], batch["force"][:, :-1])
    np.testing.assert_array_equal(latent["deter"], carry["deter"])
    assert data["is_first"].shape == (BATCH, LENGTH)
    outputs, _ = loss_shapes(state, batch)
    assert outputs == {}


def test_missing_actions_are_zeros():
    state, batch, _ = trained()
    carry = model.init_carry(state.model, BATCH)
    broken = {
        **batch,
        "force": batch["force"].at[:, CONTEXT, 0].set(-jnp.inf),
        "move": batch["move"].at[:, CONTEXT].set(-1),
    }
    _, action, _ = split_context(state, carry, broken)
    np.testing.assert_array_equal(action[:, 1], 0)
    assert np.all(np.any(action[:, 2], -1))


def test_priorities_are_the_scaled_world_losses_of_each_step():
    _, _, (_, _, outputs, metrics) = trained()
    priority = outputs["replay"]["priority"]
    assert priority.shape == (BATCH, LENGTH)
    names = ("vector", "token", "rew", "con", "dyn")
    total = sum(metrics[f"loss/{name}"] for name in names) + 0.1 * metrics["loss/rep"]
    np.testing.assert_allclose(priority.mean(), total, rtol=1e-5)


def test_only_what_is_asked_for_goes_to_the_replay():
    outputs, _ = loss_shapes(state_with(), make_batch())
    assert set(outputs["replay"]) == {"stepid", "dyn/deter", "dyn/stoch"}
    bare = make_state(replay_context=0, priority=True)
    outputs, _ = loss_shapes(bare, make_batch(context=0))
    assert set(outputs["replay"]) == {"stepid", "priority"}


@functools.cache
def gradients(*argv):
    """Names of the parameters that each loss moves."""
    with jax.numpy_dtype_promotion("strict"):
        state, batch = make_state(*argv, replay_context=CONTEXT), make_batch()
        carry = model.init_carry(state.model, BATCH)

        @quick_jit
        def pull_back(params, cotangent):
            def means(params):
                norms = training.norm_states(state)
                return training.loss_terms(
                    params, carry, batch, KEY, state.slowval, norms
                )[0]

            return jax.vjp(means, params)[1](cotangent)[0]

        _, metrics = loss_shapes(state, batch)
        losses = [name[5:] for name in metrics if name.startswith("loss/")]
        rows = {
            name: pull_back(
                state.model, {other: np.float32(other == name) for other in losses}
            )
            for name in losses
        }
    return {
        loss: {name for name, x in arrays(row).items() if np.any(x)}
        for loss, row in rows.items()
    }


def modules(names):
    return {loss: {module_of(name) for name in found} for loss, found in names.items()}


def test_where_gradients_go_by_default():
    names = gradients("--agent.dyn.rssm.free_nats", "0")
    assert modules(names) == {
        "vector": {*WORLD, "dec"},
        "token": {*WORLD, "dec"},
        "rew": {*WORLD, "rew"},
        "con": {*WORLD, "con"},
        "dyn": WORLD,
        "rep": WORLD,
        "policy": {"pol"},
        "value": {"val"},
        "repval": {*WORLD, "val"},
    }
    # The representation loss does not train the prior; only the dynamics loss does.
    trains_prior = [k for k, v in names.items() if "dyn/prior0/kernel" in v]
    assert trains_prior == ["dyn"]


def test_where_gradients_go_with_the_opposite_settings():
    settings = {
        "agent.dyn.rssm.free_nats": 1e6,
        "agent.ac_grads": True,
        "agent.reward_grad": False,
        "agent.repval_grad": False,
        "agent.imag_last": 2,
        "agent.contdisc": False,
    }
    found = modules(gradients(*flags(**settings)))
    assert found["rew"] == {"rew"}
    assert found["con"] == {*WORLD, "con"}
    assert found["policy"] == {*WORLD, "pol"}
    assert found["value"] == {*WORLD, "val"}
    assert found["repval"] == {"val"}
    # The KL never exceeds the free nats.
    assert found["dyn"] == set()
    assert found["rep"] == set()


@pytest.mark.parametrize(
    ("settings", "losses"),
    [
        ({"agent.repval_loss": False}, {"policy", "value"}),
        ({"agent.imag_last": 1}, {"policy", "value"}),
        ({"agent.imag_last": 99}, {"policy", "value", "repval"}),
    ],
)
def test_replayed_values_are_trained_where_there_are_two_steps(settings, losses):
    state = make_state(*flags(**settings), replay_context=CONTEXT)
    _, metrics = loss_shapes(state, make_batch())
    found = {name[5:] for name in metrics if name.startswith("loss/")}
    assert found & {"policy", "value", "repval"} == losses


def test_only_the_last_steps_are_imagined_from():
    counts = []
    for last in (0, 3):
        argv = flags(**{"agent.imag_last": last})
        state = make_state(*argv, replay_context=CONTEXT)
        cell = state.model.dyn.cell
        states = {
            "deter": jnp.zeros((BATCH, LENGTH, cell.deter)),
            "stoch": jnp.zeros((BATCH, LENGTH, cell.stoch, cell.classes)),
        }
        data = {k: v[:, CONTEXT:] for k, v in make_batch().items() if "dyn/" not in k}
        norms = training.norm_states(state)
        losses = jax.eval_shape(
            lambda *x, state=state: training.behavior_losses(state.model, *x, True)[0],
            state.slowval,
            norms,
            states,
            data,
            KEY,
        )
        counts.append({name: value.shape for name, value in losses.items()})
    assert counts[0] == {"policy": (8, 3), "value": (8, 3), "repval": (2, 3)}
    assert counts[1] == {"policy": (6, 3), "value": (6, 3), "repval": (2, 2)}


def test_everything_keeps_its_dtype_in_bfloat16():
    state = state_with(compute_dtype="bfloat16")
    new, carry, outputs, metrics = shapes_of(state, make_batch())
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(
        lambda x: x.dtype, state
    )
    assert carry["deter"].dtype == carry["stoch"].dtype == jnp.bfloat16
    assert outputs["replay"]["dyn/deter"].dtype == jnp.bfloat16
    floats = {k: v.dtype for k, v in metrics.items() if v.dtype != jnp.int32}
    assert set(floats.values()) == {jnp.dtype("float32")}
    assert set(metrics) - set(floats) == {
        *("opt/updates", "opt/param_count", "opt/nonfinite"),
    }


NORMS = {
    f"agent.{name}.impl": impl
    for name, impl in (("retnorm", "none"), ("valnorm", "meanstd"), ("advnorm", "perc"))
}


def test_other_normalisers_keep_their_states():
    state = make_state(*flags(**NORMS), replay_context=CONTEXT)
    assert state.retnorm == {}
    assert set(state.valnorm) == {"mean", "sqrs", "corr"}
    assert set(state.advnorm) == {"lo", "hi", "corr"}
    new, _, _, _ = shapes_of(state, make_batch())
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_reports_leave_the_normalisers_alone():
    state = state_with()
    carry = model.init_carry(state.model, BATCH)

    def norms(batch):
        return terms(state, carry, batch, training_=False)[1][3]

    # No operation computes the states: they are returned as they came in.
    jaxpr = jax.make_jaxpr(norms)(make_batch()).jaxpr
    made = {id(out) for equation in jaxpr.eqns for out in equation.outvars}
    assert not any(id(out) in made for out in jaxpr.outvars)
