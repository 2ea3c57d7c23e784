import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import TOLERANCE, compute, golden, quick_jit

from dreamerv3.losses import (
    Imagined,
    LossSettings,
    Norms,
    Replayed,
    continue_target,
    imag_loss,
    kl_losses,
    policy_loss,
    repl_loss,
    value_loss,
)
from embodied.jax.distributions import BoundedNormal, Categorical, TwoHot, twohot_bins
from embodied.jax.normalize import Normalizer

OFF = Normalizer("none")
SETTINGS = LossSettings(lam=0.95, slowreg=1.0, slowtar=False, actent=3e-4)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def imagination_loss(inputs, norms, *, update=False, disc=1.0, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    compiled = compiled_imag_loss(norms["norms"], settings, disc, update)
    return jax.device_get(compiled(inputs, norms["states"]))


@functools.cache
def compiled_imag_loss(norms, settings, disc, update):
    def losses(inputs, states):
        imagined = Imagined(**inputs)
        return imag_loss(imagined, norms, states, settings, disc=disc, update=update)

    return quick_jit(losses)


def replay_loss(inputs, norms, *, update=False, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    compiled = compiled_repl_loss(norms["norms"], settings, update)
    return jax.device_get(compiled(inputs, norms["states"]))


@functools.cache
def compiled_repl_loss(norms, settings, update):
    def loss(inputs, states):
        replayed = Replayed(**inputs)
        return repl_loss(replayed, norms, states, settings, horizon=333, update=update)

    return quick_jit(loss)


@functools.cache
def golden_policy():
    def dists(mean, std, logits):
        return {
            "cont": BoundedNormal.of(mean, std, 1, 0.1, 1.0),
            "disc": Categorical.of(logits),
        }

    names = ("im_policy_mean", "im_policy_std_raw", "im_policy_logits")
    inputs = [golden("functions")[name] for name in names]
    return compute(dists, *inputs)


@functools.cache
def golden_predictions():
    """Predictions of the value and of the slow value."""
    inputs, _ = golden_imagination()
    dists = inputs["value"], inputs["slow"]
    return compute(lambda dists: [dist.pred() for dist in dists], dists)


def golden_imagination():
    data = golden("functions")
    inputs = {
        "rew": data["im_rew"],
        "con": data["im_con"],
        "value": TwoHot(data["im_value_logits"]),
        "slow": TwoHot(data["im_slow_logits"]),
        "policy": jax.tree.map(lambda x: x[:, :-1], golden_policy()),
        "actions": {
            "cont": data["im_act_cont"][:, :-1],
            "disc": data["im_act_disc"][:, :-1],
        },
    }
    # A normaliser whose state has the scale of the golden data.
    scale = data["im_retscale"]
    fixed = Normalizer("perc", limit=1.0, debias=False)
    states = {
        "retnorm": {"lo": {"value": np.float32(0)}, "hi": {"value": scale}},
        "valnorm": {},
        "advnorm": {},
    }
    return inputs, {"norms": Norms(fixed, OFF, OFF), "states": states}


def golden_replay():
    data = golden("functions")
    return {
        "last": data["rp_last"],
        "term": data["rp_term"],
        "rew": data["im_rew"],
        "boot": data["rp_boot"],
        "value": TwoHot(data["im_value_logits"]),
        "slow": TwoHot(data["im_slow_logits"]),
    }, {"norms": Norms(OFF, OFF, OFF), "states": Norms(OFF, OFF, OFF).init()}


def test_imag_loss_equals_golden():
    inputs, norms = golden_imagination()
    losses, ret, _, metrics = imagination_loss(inputs, norms)
    data = golden("functions")
    np.testing.assert_allclose(losses["policy"], data["im_loss_policy"], **TOLERANCE)
    np.testing.assert_allclose(losses["value"], data["im_loss_value"], **TOLERANCE)
    np.testing.assert_allclose(ret, data["im_ret"], **TOLERANCE)
    np.testing.assert_allclose(
        metrics["weight"], np.cumprod(data["im_con"], 1).mean(), rtol=1e-5
    )


def test_repl_loss_equals_golden():
    inputs, norms = golden_replay()
    loss, ret, _ = replay_loss(inputs, norms, update=True)
    data = golden("functions")
    np.testing.assert_allclose(loss, data["rp_loss"], **TOLERANCE)
    np.testing.assert_allclose(ret, data["rp_ret"], **TOLERANCE)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def slow_twohot_loss(logits, target):
    """Cross-entropy to the two bins around a scalar target."""
    bins = twohot_bins(len(logits)).astype(np.float64)
    target = np.clip(target, bins[0], bins[-1])
    weights = np.zeros(len(bins))
    above = int(np.searchsorted(bins, target))
    if bins[above] == target:
        weights[above] = 1
    else:
        width = bins[above] - bins[above - 1]
        weights[above - 1] = (bins[above] - target) / width
        weights[above] = (target - bins[above - 1]) / width
    return -(weights * np.log(softmax(logits.astype(np.float64)))).sum()


def test_imag_loss_equals_loops():
    inputs, norms = golden_imagination()
    losses, ret, _, _ = imagination_loss(inputs, norms)
    value, con = inputs["value"].logits, inputs["con"]
    pred, slow = golden_predictions()
    logits = inputs["policy"]["disc"].logprobs
    mean, std = jax.tree.leaves(inputs["policy"]["cont"])
    act_disc, act_cont = inputs["actions"]["disc"], inputs["actions"]["cont"]
    for b in range(3):
        weight = 1.0
        for t in range(5):
            weight *= con[b, t]
            adv = (ret[b, t] - pred[b, t]) / 2.5
            probs = softmax(logits[b, t])
            logp = np.log(probs[act_disc[b, t]])
            entropy = -(probs * np.log(probs)).sum()
            for m, s, a in zip(mean[b, t], std[b, t], act_cont[b, t]):
                logp -= 0.5 * ((a - m) / s) ** 2 + np.log(s * np.sqrt(2 * np.pi))
                entropy += 0.5 * np.log(2 * np.pi * np.e * s**2)
            policy = -weight * (logp * adv + 3e-4 * entropy)
            np.testing.assert_allclose(losses["policy"][b, t], policy, **TOLERANCE)
            both = slow_twohot_loss(value[b, t], ret[b, t])
            both += slow_twohot_loss(value[b, t], slow[b, t])
            np.testing.assert_allclose(
                losses["value"][b, t], weight * both, **TOLERANCE
            )


def test_impossible_steps_have_no_loss():
    inputs, norms = golden_imagination()
    inputs["con"] = np.where(np.arange(6) == 2, np.float32(0), inputs["con"])
    losses, _, _, _ = imagination_loss(inputs, norms)
    for loss in losses.values():
        assert np.all(loss[:, :2] != 0)
        np.testing.assert_array_equal(loss[:, 2:], 0)


def test_slow_targets_replace_the_value_in_returns():
    inputs, norms = golden_imagination()
    slow = imagination_loss(inputs, norms, slowtar=True, slowreg=0.0)
    swapped = {**inputs, "value": inputs["slow"]}
    fast = imagination_loss(swapped, norms, slowreg=0.0)
    np.testing.assert_array_equal(slow[1], fast[1])
    np.testing.assert_array_equal(slow[0]["policy"], fast[0]["policy"])


def test_discount_outside_of_continues():
    inputs, norms = golden_imagination()
    losses, ret, _, _ = imagination_loss(inputs, norms, disc=0.9)
    scaled = {**inputs, "con": inputs["con"] * 0.9}
    inside, same, _, _ = imagination_loss(scaled, norms)
    np.testing.assert_allclose(ret, same, rtol=1e-5)
    # With `disc`, weights are divided by it, so that the first one has no discount.
    np.testing.assert_allclose(losses["policy"] * 0.9, inside["policy"], rtol=1e-5)


def test_return_scale_is_updated_before_it_is_used_and_not_in_reports():
    inputs, norms = golden_imagination()
    before = norms["states"]["retnorm"]
    _, ret, states, trained = imagination_loss(inputs, norms, update=True)
    normalizer = norms["norms"].retnorm
    expected = compute(normalizer.update, before, ret)
    np.testing.assert_allclose(
        states["retnorm"]["hi"]["value"], expected["hi"]["value"], rtol=1e-6
    )
    _, scale = compute(normalizer.stats, states["retnorm"])
    raw = ret - golden_predictions()[0][:, :-1]
    np.testing.assert_allclose(trained["adv"], (raw / scale).mean(), rtol=1e-4)
    _, _, kept, _ = imagination_loss(inputs, norms)
    assert kept == norms["states"]


def normalized_inputs():
    inputs, _ = golden_imagination()
    norms = Norms(OFF, Normalizer("meanstd"), Normalizer("meanstd"))

    def states():
        found = norms.init()
        for name, x in (("valnorm", [1.0, 5.0]), ("advnorm", [2.0, 4.0])):
            found[name] = getattr(norms, name).update(found[name], jnp.array(x))
        return found

    return inputs, norms, compute(states)


def test_value_normaliser_scales_predictions_and_inversely_targets():
    inputs, norms, states = normalized_inputs()
    options = {"norms": norms, "states": states}
    losses, ret, _, metrics = imagination_loss(inputs, options)
    stats = compute(norms.valnorm.stats, states["valnorm"])
    np.testing.assert_allclose(stats, [3, 2], rtol=1e-5)
    pred, slow = golden_predictions()
    value = pred * 2 + 3
    np.testing.assert_allclose(metrics["val"], value.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["tar"], ((ret - 3) / 2).mean(), rtol=1e-4)
    inner = TwoHot(inputs["value"].logits[:, :-1])
    weight = np.cumprod(inputs["con"], 1)[:, :-1]
    # The slow regulariser uses the raw prediction.
    arguments = (inner, (ret - 3) / 2, slow[:, :-1], weight)
    expected = compute(lambda *args: value_loss(*args, 1.0), *arguments)
    np.testing.assert_allclose(losses["value"], expected, **TOLERANCE)


def test_advantage_normaliser_subtracts_its_offset():
    inputs, norms, states = normalized_inputs()
    norms = dataclasses.replace(norms, valnorm=OFF)
    options = {"norms": norms, "states": {**states, "valnorm": {}}}
    losses, ret, _, _ = imagination_loss(inputs, options, actent=0.0)
    adv = (ret - golden_predictions()[0][:, :-1] - 3) / 1
    policy, actions = inputs["policy"], inputs["actions"]
    logp = compute(
        lambda policy: sum(policy[k].logp(actions[k]) for k in policy), policy
    )
    weight = np.cumprod(inputs["con"], 1)[:, :-1]
    np.testing.assert_allclose(losses["policy"], -weight * logp * adv, rtol=1e-4)


def test_replay_loss_ignores_the_ends_of_episodes():
    inputs, norms = golden_replay()
    inputs["last"] = inputs["last"] | (np.arange(6) == 1)
    loss, _, _ = replay_loss(inputs, norms)
    np.testing.assert_array_equal(loss[:, 1], 0)


def test_replay_loss_equals_loops():
    inputs, norms = golden_replay()
    loss, ret, _ = replay_loss(inputs, norms)
    value, (_, slow) = inputs["value"].logits, golden_predictions()
    for b in range(3):
        for t in range(5):
            both = slow_twohot_loss(value[b, t], ret[b, t])
            both += slow_twohot_loss(value[b, t], slow[b, t])
            expected = both * (1 - inputs["last"][b, t].astype(np.float32))
            np.testing.assert_allclose(loss[b, t], expected, **TOLERANCE)


def test_replay_loss_with_slow_targets_bootstraps_from_the_slow_value():
    inputs, norms = golden_replay()
    _, slow, _ = replay_loss(inputs, norms, slowtar=True)
    inputs["boot"] = golden_predictions()[1]
    _, expected, _ = replay_loss(inputs, norms)
    np.testing.assert_array_equal(slow, expected)


def test_replay_loss_updates_the_value_normaliser():
    inputs, _ = golden_replay()
    norms = Norms(OFF, Normalizer("meanstd"), OFF)
    options = {"norms": norms, "states": norms.init()}
    _, ret, states = replay_loss(inputs, options, update=True)
    mean, _ = compute(norms.valnorm.stats, states["valnorm"])
    np.testing.assert_allclose(mean, ret.mean(), rtol=1e-5)
    assert replay_loss(inputs, options)[2] == norms.init()


def kl_inputs():
    return [golden("functions")[k] for k in ("kl_post", "kl_prior")]


def kl_losses_of(post, prior, free=0.0):
    return kl_losses(
        Categorical.of(post, 0.01, 1), Categorical.of(prior, 0.01, 1), free
    )


def kl_terms(post, prior, free=0.0):
    return jax.device_get(compiled_kl_losses()(post, prior, free))


@functools.cache
def compiled_kl_losses():
    return quick_jit(kl_losses_of)


def test_kl_losses_equal_golden_without_free_nats():
    for loss in kl_terms(*kl_inputs()):
        np.testing.assert_allclose(loss, golden("functions")["kl"], **TOLERANCE)


def test_kl_losses_equal_a_loop():
    post, prior = kl_inputs()
    dyn, _ = kl_terms(post, prior)
    for b, t in np.ndindex(3, 7):
        expected = 0.0
        for group in range(8):
            p = 0.99 * softmax(np.asarray(post[b, t, group])) + 0.01 / 16
            q = 0.99 * softmax(np.asarray(prior[b, t, group])) + 0.01 / 16
            expected += (p * (np.log(p) - np.log(q))).sum()
        np.testing.assert_allclose(dyn[b, t], expected, **TOLERANCE)


def test_free_nats_bound_the_sum_of_all_groups_and_stop_its_gradient():
    post, prior = kl_inputs()
    exact = kl_terms(post, prior)[0]
    free = float(exact.mean())
    dyn, rep = kl_terms(post, prior, free)
    np.testing.assert_allclose(dyn, np.maximum(exact, free), rtol=1e-6)
    np.testing.assert_array_equal(dyn, rep)
    gradient = jax.grad(lambda prior: kl_losses_of(post, prior, free)[0].sum())
    moved = np.abs(compute(gradient, prior)).sum((-1, -2)) > 0
    np.testing.assert_array_equal(moved, exact > free)


def test_equal_distributions_have_no_divergence():
    post, _ = kl_inputs()
    for loss in kl_terms(post, post):
        np.testing.assert_allclose(loss, 0, atol=1e-5)


def test_each_kl_loss_trains_one_side():
    def totals(inputs):
        return [loss.sum() for loss in kl_losses_of(*inputs)]

    (dyn_post, dyn_prior), (rep_post, rep_prior) = compute(
        jax.jacrev(totals), kl_inputs()
    )
    assert not np.any(dyn_post)
    assert np.all(np.any(dyn_prior, -1))
    assert np.all(np.any(rep_post, -1))
    assert not np.any(rep_prior)


def test_continue_target_holds_the_discount_if_it_is_predicted():
    terminal = jnp.array([False, True])
    np.testing.assert_allclose(
        continue_target(terminal, 333, True), [1 - 1 / 333, 0], rtol=1e-6
    )
    np.testing.assert_array_equal(continue_target(terminal, 333, False), [1, 0])


def test_policy_loss_by_hand():
    logp, entropy, adv, weight = (jnp.array([[x]]) for x in (-2.0, 3.0, 5.0, 0.5))
    loss = policy_loss(logp, entropy, adv, weight, 0.1)
    np.testing.assert_allclose(loss, [[0.5 * (10 - 0.3)]], rtol=1e-6)


def test_only_log_probability_and_entropy_get_gradient_from_the_policy_loss():
    inputs = [np.float32([[x]]) for x in (-2.0, 3.0, 5.0, 0.5)]
    grads = compute(jax.grad(lambda x: policy_loss(*x, 0.1).sum()), inputs)
    np.testing.assert_allclose(np.ravel(grads), [-2.5, -0.05, 0, 0], rtol=1e-6)


def test_only_the_value_gets_gradient_from_the_value_loss():
    logits = np.random.default_rng(0).normal(size=(2, 3, 11)).astype(np.float32)
    others = [np.full((2, 3), x, np.float32) for x in (1.5, -0.5, 0.7)]

    def total(logits, others):
        return value_loss(TwoHot(logits), *others, 0.5).sum()

    grad, rest = compute(jax.grad(total, (0, 1)), logits, others)
    assert np.any(grad)
    assert not np.any(rest)


def test_imag_loss_sends_gradient_to_value_and_policy_alone():
    inputs, norms = golden_imagination()
    floats = {k: v for k, v in inputs.items() if k != "actions"}

    def total(floats, force):
        actions = {**inputs["actions"], "cont": force}
        imagined = Imagined(**floats, actions=actions)
        losses, *_ = imag_loss(
            imagined, **norms, settings=SETTINGS, disc=1.0, update=True
        )
        return sum(loss.sum() for loss in losses.values())

    force = inputs["actions"]["cont"]
    grads, force = compute(jax.grad(total, (0, 1)), floats, force)
    moved = {key: any(map(np.any, jax.tree.leaves(x))) for key, x in grads.items()}
    expected = dict.fromkeys(("rew", "con", "slow"), False)
    assert moved == {**expected, "value": True, "policy": True}
    assert not np.any(force)
