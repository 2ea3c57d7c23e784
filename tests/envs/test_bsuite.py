"""The Behaviour Suite: experiments, and seeds for what their settings do not fix."""

from __future__ import annotations

import pytest
from suite_testing import check_suite, rollout, same

pytest.importorskip("bsuite", reason="the extra 'bsuite' is not installed")

from embodied.envs import UnknownTask, make


@pytest.mark.parametrize("task", ["catch/0", "cartpole/0", "memory_len/3"])
def test_suite(task):
    check_suite(f"bsuite_{task}", steps=200)


def test_settings_that_fix_everything_are_the_same_for_all_seeds():
    one, other = (rollout("bsuite_bandit/0", 50, seed=seed) for seed in (1, 2))
    assert same(one, other)


def test_spaces():
    env = make("bsuite_catch/0")
    assert env.obs_space["obs"].shape == (10, 5)
    assert env.act_space["action"].classes == 3


def test_unknown_task():
    with pytest.raises(UnknownTask, match=r"Did you mean bsuite_catch/0"):
        make("bsuite_ctach/0")
