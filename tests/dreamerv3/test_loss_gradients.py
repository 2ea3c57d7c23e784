"""Gradients of the losses equal finite differences in float64.

Terms whose gradient a loss stops are held constant in the differences.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_testing import agent_config, quick_jit
from jax.test_util import check_vjp

from dreamerv3.decoder import make_decoder
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
from embodied import Space
from embodied.jax.distributions import (
    Binary,
    BoundedNormal,
    Categorical,
    TwoHot,
    squared_error,
    twohot_bins,
)
from embodied.jax.normalize import Normalizer

ROWS, STEPS, BINS = 2, 5, 21


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def value_logits(*lead, seed=0):
    """Random logits of values that are smaller than the outer bins."""
    distance = np.abs(np.arange(BINS) - BINS // 2)
    return draw(*lead, BINS, seed=seed) - 4.0 * distance


def check(function, *inputs, constant=None):
    """Compares the gradient of a function with finite differences.

    Args:
      function: function of the inputs.
      inputs: trees of arrays.
      constant: the same function, with constants in place of the terms whose gradient
        it stops; by default there are no such terms.
    """
    results = jax.eval_shape(function, *inputs)
    assert {x.dtype for x in jax.tree.leaves(results)} == {np.dtype("float64")}
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), results)
    values = on_arrays(constant or function)

    @on_arrays
    def pull_back(inputs, cotangent):
        outputs, pull = jax.vjp(function, *inputs)
        return outputs, pull(cotangent)

    def gradient(*inputs):
        return pull_back(inputs, zeros)[0], lambda x: pull_back(inputs, x)[1]

    check_vjp(values, gradient, inputs, atol=1e-6, rtol=1e-6)


def on_arrays(function):
    """Compiles a function; its NumPy results are subtracted without compiling."""
    compiled = quick_jit(function)
    return lambda *inputs: jax.device_get(compiled(*inputs))


@pytest.mark.parametrize("free", [0.0, 1.0])
def test_kl(free):
    def terms(post, prior):
        dists = [Categorical.of(x, 0.01, 1) for x in (post, prior)]
        return kl_losses(*dists, free)

    post, prior = 2 * draw(2, 2, 3, 4)
    check(lambda x: terms(post, x)[0], prior)
    check(lambda x: terms(x, prior)[1], post)


def test_continue():
    logit = np.array([-30.0, -1.0, 0.0, 0.5, 5.0, 30.0])
    for contdisc in (False, True):
        for terminal in (False, True):
            target = continue_target(jnp.full(6, terminal), 333, contdisc)
            check(lambda x, y=target: Binary(x).loss(y), logit)


def test_reward():
    bins = twohot_bins(BINS)
    # Between bins, on them, and beyond them.
    target = np.array([0.0, 0.3, -1000.0, bins[3], 1e12, -1e12])
    check(lambda x: TwoHot(x).loss(target), draw(6, BINS))


def test_squared_error():
    target = draw(2, 3, 4, seed=1)
    for event in (0, 1, 2):
        check(lambda x, n=event: squared_error(x, target, n), draw(2, 3, 4))


PIXELS = np.random.default_rng(1).integers(0, 256, (2, 48, 48, 1), np.uint8)
# Space, values, and shape of raw outputs. The last number and class are missing.
OBSERVATIONS = {
    "number": (Space(np.float32), [0.5, 1e6, -np.inf], ()),
    "matrix": (Space(np.float32, (1, 2)), [[[0, -3]], [[50, 1]]], (1, 2)),
    "class": (Space(np.int32, (), 0, 4), [3, 0, -1], (4,)),
    "classes": (Space(np.int32, 2, 3, 7), [[3, 6], [5, 5]], (2, 4)),
    "flag": (Space(bool), [True, False], (2,)),
    "image": (Space(np.uint8, (48, 48, 1)), PIXELS, (48, 48, 1)),
}


@pytest.mark.parametrize("key", OBSERVATIONS)
def test_decoder(key):
    space, value, shape = OBSERVATIONS[key]
    # Losses alone need no weights.
    config = agent_config().dec.simple
    decoder = make_decoder({}, ((key, space),), 16, 12, config, "float32")
    obs = {key: np.asarray(value, space.dtype)}
    outputs = {key: draw(len(value), *shape)}
    check(lambda outputs: decoder.losses(outputs, obs), outputs)


def test_value():
    target, slow = 50 * draw(2, ROWS, STEPS, seed=1)
    weight = np.abs(draw(ROWS, STEPS, seed=2))
    check(
        lambda x: value_loss(TwoHot(x), target, slow, weight, 0.5),
        draw(ROWS, STEPS, BINS),
    )


def policy_inputs(steps):
    """Raw outputs for a continuous and a discrete action, and values of both."""
    mean, std = draw(2, ROWS, steps, 2)
    raw = {"mean": mean, "std": std, "logits": draw(ROWS, steps, 4, seed=1)}
    actions = {
        "cont": draw(ROWS, steps, 2, seed=2),
        "disc": np.arange(ROWS * steps).reshape(ROWS, steps) % 4,
    }
    return raw, actions


def policy_dists(raw):
    return {
        "cont": BoundedNormal.of(raw["mean"], raw["std"], 1, 0.1, 1.0),
        "disc": Categorical.of(raw["logits"], 0.01),
    }


def test_policy():
    raw, actions = policy_inputs(STEPS)
    adv, weight = draw(2, ROWS, STEPS, seed=3)

    def function(raw):
        dists = policy_dists(raw)
        logp = sum(dists[key].logp(actions[key]) for key in dists)
        entropy = sum(dist.entropy() for dist in dists.values())
        return policy_loss(logp, entropy, adv, weight, 0.1)

    check(function, raw)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A two-hot distribution whose prediction is a constant."""

    logits: jax.Array
    prediction: jax.Array

    def pred(self):
        return self.prediction


def normalizers():
    norms = Norms(Normalizer("perc"), Normalizer("meanstd"), Normalizer("meanstd"))
    states = norms.init()
    for name in states:
        x = 2 * draw(10, seed=4) + 1
        states[name] = getattr(norms, name).update(states[name], x)
    return {"norms": norms, "states": states, "update": True}


def settings(slowtar):
    return LossSettings(lam=0.95, slowreg=0.5, slowtar=slowtar, actent=0.1)


@pytest.mark.parametrize("slowtar", [False, True])
def test_imagination(slowtar):
    raw, actions = policy_inputs(STEPS - 1)
    logits = value_logits(ROWS, STEPS)
    slow = TwoHot(value_logits(ROWS, STEPS, seed=1))
    rew, con = draw(ROWS, STEPS, seed=2), 1 / (1 + np.exp(-draw(ROWS, STEPS, seed=3)))

    def losses(value, raw):
        found, *_ = imag_loss(
            Imagined(rew, con, value, slow, policy_dists(raw), actions),
            **normalizers(),
            settings=settings(slowtar),
            disc=0.9,
        )
        return found

    # The value is also part of returns and advantages, where its gradient is stopped.
    fixed = on_arrays(lambda x: TwoHot(x).pred())(logits)
    check(
        lambda logits, raw: losses(TwoHot(logits), raw),
        *(logits, raw),
        constant=lambda logits, raw: losses(Predicted(logits, fixed), raw),
    )


@pytest.mark.parametrize("slowtar", [False, True])
def test_replay(slowtar):
    logits = value_logits(ROWS, STEPS)
    others = {
        "rew": draw(ROWS, STEPS, seed=1),
        "boot": draw(ROWS, STEPS, seed=2),
        "slow": TwoHot(value_logits(ROWS, STEPS, seed=3)),
    }
    last = np.zeros((ROWS, STEPS), bool)
    last[0, 2] = True

    def loss(logits, others):
        found, _, _ = repl_loss(
            Replayed(last=last, term=last, value=TwoHot(logits), **others),
            **normalizers(),
            settings=settings(slowtar),
            horizon=10,
        )
        return found

    # Only the value gets a gradient.
    check(loss, logits, others, constant=lambda logits, _: loss(logits, others))
