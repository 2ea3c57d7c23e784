"""Agents for all kinds of observations and actions act and make two updates.

All of these tests are slow. `test_agent.py` does the same with vectors and classes as
observations, and with discrete and continuous actions.
"""

from __future__ import annotations

import agent_testing as testing
import numpy as np
import pytest
from dreamer_testing import QUICK, make_config

from dreamerv3.agent import Agent
from embodied import Space

ROWS, CONTEXT, LENGTH = 2, 1, 3

MOVE = {"move": Space(np.int32, (), 0, 3)}
FORCE = {"force": Space(np.float32, 2, -1, 1)}
VECTOR = {"vector": Space(np.float32, 5)}


def image(height, width, channels=3):
    return Space(np.uint8, (height, width, channels))


# Observations, actions, and flags.
CASES = {
    "vectors, discrete actions": (VECTOR, MOVE, []),
    "a small gray image, continuous actions": ({"image": image(48, 48, 1)}, FORCE, []),
    "mixed observations, mixed actions": (
        {**VECTOR, "image": image(64, 64), "token": Space(np.int32, (), 0, 6)},
        {**MOVE, **FORCE},
        [],
    ),
    **{
        f"image of {side}": ({"image": image(side, side)}, MOVE, [])
        for side in range(48, 257, 16)  # All sizes that the decoder can make.
    },
    "an image that is not square": ({"image": image(64, 96)}, MOVE, []),
    "a large gray image": ({"image": image(128, 128, 1)}, FORCE, []),
    "several images": (
        {"front": image(64, 64), "depth": image(64, 64, 1), "back": image(64, 64, 2)},
        MOVE,
        [],
    ),
    "many channels": ({"image": image(64, 64, 16)}, MOVE, []),
    "images and vectors": ({"image": image(64, 64), **VECTOR}, FORCE, []),
    "only numbers": (
        {"level": Space(np.float32), "count": Space(np.int32, (), 0, 100)},
        MOVE,
        [],
    ),
    "only classes": (
        {"grid": Space(np.int32, (2, 3), 0, 4), "flag": Space(bool)},
        MOVE,
        [],
    ),
    "a matrix": ({"matrix": Space(np.float32, (3, 4))}, FORCE, []),
    "several discrete actions": (
        VECTOR,
        {**MOVE, "speed": Space(np.int32, (), 0, 2), "keys": Space(np.int32, 3, 0, 2)},
        [],
    ),
    "several continuous actions": (
        VECTOR,
        {**FORCE, "torque": Space(np.float32, (), -1, 1)},
        [],
    ),
    "a yes or no": (VECTOR, {"jump": Space(bool)}, []),
    "strided convolutions": (
        {"image": image(64, 64)},
        MOVE,
        [r"--agent\..*\.strided", "True"],
    ),
    "outer convolutions": (
        {"image": image(64, 64)},
        MOVE,
        [r"--agent\..*\.outer", "True"],
    ),
    "no context": (VECTOR, MOVE, ["--replay_context", "0"]),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_agent_acts_and_makes_two_updates(name):
    obs_space, act_space, flags = CASES[name]
    obs_space = {**obs_space, **testing.SIGNALS}
    context = 0 if "--replay_context" in flags else CONTEXT
    config = make_config("--replay_context", str(context), *flags)
    agent = Agent(obs_space, act_space, config, compiler=QUICK)
    rng = np.random.default_rng(0)
    obs = draw(obs_space, (ROWS,), rng)
    carry, actions, outputs = agent.policy(agent.init_policy(ROWS), obs)
    for key, space in act_space.items():
        assert actions[key].shape == (ROWS, *space.shape)
        assert all(row in space for row in np.asarray(actions[key], space.dtype))
    before = agent.save()["params"]
    carry = agent.init_train(ROWS)
    lead = (ROWS, context + LENGTH)
    for _ in range(2):
        batch = draw({**obs_space, **act_space}, lead, rng)
        batch["consec"] = np.zeros(lead, np.int32)
        batch["stepid"] = rng.integers(0, 256, (*lead, 20)).astype(np.uint8)
        if context:
            for key in ("dyn/deter", "dyn/stoch"):
                latent = np.asarray(outputs[key])
                batch[key] = np.repeat(latent[:, None], context, 1)
        carry, _, _ = agent.train(carry, batch)
    results, metrics = agent.flush()
    assert metrics and all(np.isfinite(value).all() for value in metrics.values())
    assert metrics["opt/nonfinite"] == 0
    if context:
        assert results["replay"]["stepid"].shape == (ROWS, LENGTH, 20)
    else:
        assert "replay" not in results  # There are no latents to write back.
    after = agent.save()["params"]
    changed = {x for x in after if not np.array_equal(before[x], after[x])}
    assert {x.split("/")[0] for x in changed} >= {"enc", "dyn", "dec", "pol", "val"}


def draw(spaces, lead, rng):
    """Random values of spaces; flags are False, so no episode begins or ends."""
    values = {}
    for key, space in spaces.items():
        shape = (*lead, *space.shape)
        if space.dtype == bool:
            values[key] = np.zeros(shape, bool)
        elif space.dtype == np.uint8:
            values[key] = rng.integers(0, 256, shape, np.uint8)
        elif space.discrete:
            low, high = np.min(space.low), min(np.max(space.high), 100)
            values[key] = rng.integers(max(low, -100), high, shape).astype(space.dtype)
        else:
            values[key] = rng.uniform(-1, 1, shape).astype(space.dtype)
    return values
