"""A stop without progress is ended, and the last checkpoint is kept."""

import os
import re
import signal
import threading
import time

import pytest
from fault_testing import Run, check_replay, manifests
from parallel_testing import HASTY
from waiting_testing import wait_until

from embodied.run.parallel.stopping import StopDeadline, StopTimeout

SECONDS = 2.0  # Value of `run.stop_timeout`.
GRACE = 3.0  # Of a hasty program, for roles that do not end on SIGTERM.
SLACK = 20.0  # For a busy machine.


class TestHungRole:
    @pytest.mark.parametrize(
        ("process", "role", "extra"),
        [
            (False, "replay", 0.0),
            pytest.param(True, "replay", 0.0, marks=pytest.mark.slow),
            # Only the launcher can notice that the agent hangs.
            pytest.param(True, "agent", 10.0, marks=pytest.mark.slow),
        ],
        ids=["replay", "replay of an agent process", "agent process"],
    )
    def test_the_last_checkpoint_stands(self, tmp_path, process, role, extra):
        flags = ["--run.stop_timeout", SECONDS, "--run.agent_process", process]
        with Run(tmp_path, *flags, script=HASTY) as run:
            run.saves()
            os.kill(run.pid_of(role), signal.SIGSTOP)
            begin = time.monotonic()
            run.terminate()
            assert run.wait() == 1, run.output()
            assert time.monotonic() - begin < SECONDS + extra + GRACE + SLACK
            shown = run.output()
        saved = manifests(tmp_path)[-1].tag
        assert f"while it waited for the {role}" in shown
        stands = re.findall(r"The last checkpoint, (\S+), is untouched", shown)
        assert stands[-1] == saved
        assert "Traceback" not in shown
        if role == "replay" and process:
            with Run(tmp_path, *flags) as run:
                run.wait_for(f"from checkpoint {saved}.")
                run.goes_on()
                run.leave()
            check_replay(tmp_path)


class TestStopDeadline:
    def test_whatever_is_written_or_trained_is_progress(self, tmp_path):
        stop, late = threading.Event(), threading.Event()
        (tmp_path / "replay").mkdir()
        with (
            pytest.raises(StopTimeout),
            StopDeadline(stop, tmp_path, 2.0, lambda _: late.set(), str) as watch,
        ):
            assert not late.wait(2.5), "nobody has asked it to stop"
            stop.set()
            with (tmp_path / "replay" / "chunk").open("wb", buffering=0) as file:
                for _ in range(6):
                    file.write(b"steps")
                    assert not late.wait(0.4)
            for _ in range(6):
                watch.step()
                assert not late.wait(0.4)
            wait_until(late.is_set, seconds=SLACK)

    def test_an_end_in_time_is_no_failure(self, tmp_path):
        stop, late = threading.Event(), threading.Event()
        with StopDeadline(stop, tmp_path, 1.0, lambda _: late.set(), str):
            stop.set()
        assert not late.wait(1.5)
