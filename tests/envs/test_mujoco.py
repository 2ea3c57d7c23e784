"""Gymnasium's MuJoCo tasks, through the general Gymnasium adapter."""

from __future__ import annotations

import pytest
from suite_testing import check_suite

pytest.importorskip("mujoco", reason="the extra 'mujoco' is not installed")


@pytest.mark.parametrize(
    ("task", "steps"), [("gym_HalfCheetah-v5", 1010), ("gym_Hopper-v5", 200)]
)
def test_suite(task, steps):
    check_suite(task, steps)
