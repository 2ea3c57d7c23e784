"""Roles that stand still, and environments that fail or hang."""

import os
import re
import signal

import pytest
from fault_envs import FAULTY_STEP
from fault_testing import (
    ENVS,
    Run,
    check_ratio,
    check_replay,
    manifests,
    sequences,
)
from parallel_testing import HASTY


class TestStopped:
    @pytest.mark.slow
    def test_env_worker_is_replaced(self, tmp_path):
        with Run(tmp_path, "--run.env_timeout", "3") as run:
            run.goes_on()
            os.kill(run.pid_of("env-1"), signal.SIGSTOP)
            run.wait_for("Role env-1 is restarted: has reported no progress for ")
            run.goes_on()
            check_ratio(run)
            run.leave()
        steps = check_replay(tmp_path)
        assert len({step[0] for step in steps}) > ENVS

    def test_env_worker_that_was_away_goes_on_where_it_was(self, tmp_path):
        with Run(tmp_path, script=HASTY) as run:
            run.goes_on()
            worker = run.pid_of("env-1")
            os.kill(worker, signal.SIGSTOP)  # Like one behind a network that is down.
            run.wait_for("No contact with envs 1 since ")
            os.kill(worker, signal.SIGCONT)
            run.wait_for("Back after ")
            run.goes_on()
            assert "is restarted" not in run.output()
            run.leave()
        check_replay(tmp_path)
        last = manifests(tmp_path)[-1]
        batch = sequences(tmp_path, last, 1)
        episodes = sequences(tmp_path, last, 2)
        assert len(set(batch["where"][:, 0, 0].tolist())) == ENVS
        begins = episodes["where"][:, 1][episodes["is_first"][:, 1]]
        assert len(begins) and not begins[:, 2].any(), "in the middle of an episode"

    @pytest.mark.slow
    @pytest.mark.parametrize("seconds", [7, 20])  # The timeout of envs is 3.
    def test_everyone_waits_for_the_replay(self, tmp_path, seconds):
        with Run(tmp_path, "--run.env_timeout", "3") as run:
            run.goes_on()
            os.kill(run.pid_of("replay"), signal.SIGSTOP)
            run.stays(seconds)
            os.kill(run.pid_of("replay"), signal.SIGCONT)
            run.goes_on()
            check_ratio(run)
            run.leave()
            assert "restarted" not in run.output()
            assert "WARNING" not in run.output()
        steps = check_replay(tmp_path)
        assert len({step[0] for step in steps}) == ENVS


KINDS = {
    "raise": "ZeroDivisionError: the environment is broken",
    "shape": "got int32 of shape (4,)",
    "sleep": "has reported no progress for ",
}


class TestEnvironments:
    def test_one_failure_of_each_kind_is_survived(self, tmp_path):
        faults = tmp_path / "faults"
        faults.mkdir()
        for kind in KINDS:
            (faults / kind).touch()
        logdir = tmp_path / "run"
        environ = {"FAULTS": str(faults)}
        flags = ["--run.env_timeout", "2"]
        with Run(logdir, *flags, task="Faulty", environ=environ) as run:
            for reason in KINDS.values():
                run.wait_for(reason)
            run.goes_on()
            check_ratio(run)
            run.leave()
        assert not list(faults.iterdir())
        steps = check_replay(logdir)
        assert len({step[0] for step in steps}) >= 2 * ENVS

    def test_a_mistake_that_comes_again_ends_the_run_soon(self, tmp_path):
        environ = {"FAULT": "shape"}
        with Run(tmp_path, task="Faulty", environ=environ) as run:
            assert run.wait() == 1
            shown = run.output()
        failure = shown[shown.index("dreamerv3: ") :]
        assert failure.count("\n") == 1 and KINDS["shape"] in failure
        assert "(3 times SpaceError in 600 s, 2 restarts allowed)" in failure

    @pytest.mark.parametrize(
        "kind",
        [
            "raise",
            pytest.param("shape", marks=pytest.mark.slow),
            pytest.param("sleep", marks=pytest.mark.slow),
        ],
    )
    def test_one_that_always_fails_ends_the_run(self, tmp_path, kind):
        flags = ["--run.env_timeout", "2", "--run.restarts.env", "1"]
        flags += ["--run.save_every", "1000"]
        environ = {"FAULT": kind}
        with Run(tmp_path, *flags, task="Faulty", environ=environ) as run:
            assert run.wait() == 1
            shown = run.output()
            children = run.children()
        assert not children
        failure = shown[shown.index("dreamerv3: ") :]
        role = r"dreamerv3: Worker 'env-\d' of role 'env' failed for good "
        assert re.match(role + r"\(2 failures in 600 s, 1 restarts allowed\)", failure)
        assert KINDS[kind] in failure
        if kind == "raise":
            assert ", in _raise" in failure  # Where it happened, in the env process.
        first, last = manifests(tmp_path)  # Saved at the start, and before the end.
        assert last.meta["step"] > first.meta["step"]
        steps = check_replay(tmp_path)
        assert FAULTY_STEP <= len(steps) <= 2 * ENVS * FAULTY_STEP
