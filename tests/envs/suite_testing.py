"""Checks that every suite must pass, for the tests of each suite."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from embodied import envs, wrappers
from embodied.envs.rendering import RenderingUnavailable

RESET = {"reset": True}


def rollout(task, steps, actions_seed=0, **kwargs):
    """Takes random actions in the wrapped environment of a task.

    The wrappers check every action and observation against its space.

    Returns:
      The observations.
    """
    env = wrappers.wrap(envs.make(task, **kwargs))
    try:
        return play(env, steps, actions_seed)
    finally:
        env.close()


def play(env, steps, actions_seed=0):
    """Takes random actions and checks how episodes begin and end."""
    rng = np.random.default_rng(actions_seed)
    acts = {key: space for key, space in env.act_space.items() if key != "reset"}
    obs = env.step({"reset": True, **{key: acts[key].sample(0) for key in acts}})
    assert obs["is_first"], "The first step must reset."
    history = [obs]
    for _ in range(steps):
        action = {key: space.sample(rng) for key, space in acts.items()}
        ended = obs["is_last"]
        obs = env.step({**action, "reset": ended})
        assert obs["is_first"] == ended, "Episodes begin when they were told to."
        if obs["is_first"]:
            assert obs["reward"] == 0, "The first step of an episode has no reward."
            assert not obs["is_last"]
        history.append(obs)
    return history


def same(one, other):
    """Whether two histories are equal in every key."""
    return all(
        np.array_equal(first[key], second[key])
        for first, second in zip(one, other, strict=True)
        for key in first
    )


def episodes(history):
    """How many episodes ended."""
    return sum(int(obs["is_last"]) for obs in history)


def check_suite(task, steps, ends=1, **options):
    """Checks spaces, episodes and seeds of a task.

    Args:
      task: name of the task.
      steps: number of random steps.
      ends: least number of episodes that must end within these steps.
      **options: options of the suite.

    Returns:
      The observations with seed 3.
    """
    history = rollout(task, steps, seed=3, **options)
    assert episodes(history) >= ends, f"Only {episodes(history)} episodes ended."
    again = rollout(task, steps, seed=3, **options)
    assert same(history, again), "The same seed must give the same episodes."
    other = rollout(task, steps, seed=4, **options)
    assert not same(history, other), "Another seed must give other episodes."
    return history


@contextlib.contextmanager
def skip_without_rendering():
    """Skips a test that needs images if this machine cannot render."""
    try:
        yield
    except RenderingUnavailable as error:
        pytest.skip(f"No rendering here: {error}")
