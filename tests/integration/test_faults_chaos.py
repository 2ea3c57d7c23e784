"""Kills of random roles at random moments, also before others are back."""

import os
import random
import signal

import pytest
from fault_testing import ENVS, Run, check_metrics, check_ratio, check_replay

RESTARTS = [
    part
    for role in ("env", "replay", "logger", "agent")
    for part in (f"--run.restarts.{role}", "1000")
]
ROLES = ["agent", "replay", "logger", *(f"env-{index}" for index in range(ENVS))]


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("kills", "save_every"),
    [
        (3, "0.4"),
        pytest.param(6, "-1", marks=SLOW, id="6-always saving"),
        pytest.param(40, "1", marks=SLOW),
        pytest.param(40, "-1", marks=SLOW, id="40-always saving"),
    ],
)
def test_nothing_that_was_saved_is_lost(tmp_path, kills, save_every):
    choices = random.Random(kills)
    flags = ["--run.agent_process", "True", "--run.save_every", save_every, *RESTARTS]
    lost = 0  # How often steps can be missing in every stream.
    with Run(tmp_path, *flags) as run:
        run.goes_on()
        for _ in range(kills):
            role = choices.choice(ROLES)
            lost += role in ("agent", "replay")
            os.kill(run.pid_of(role), signal.SIGKILL)
            run.stays(choices.uniform(0.0, 2.0))
        run.goes_on()
        check_ratio(run, lost=True, waits=save_every != "-1")
        run.leave()
    check_replay(tmp_path, max_gaps=2 * lost * ENVS)
    check_metrics(tmp_path)
