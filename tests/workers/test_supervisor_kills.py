"""Random kills of supervised workers. Real processes, real signals.

Functions for child processes are nested in functions of this module, so that they
travel by value and the children do not import it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest
from process_testing import is_gone
from supervisor_testing import (
    ROUNDS,
    launch,
    make,
    read_pid,
    running,
    status_of,
)
from waiting_testing import wait_until

from embodied.workers import (
    Progress,
    RestartPolicy,
    Supervisor,
)


class TestKills:
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("rounds", ROUNDS)
    def test_workers_killed_at_random_come_back_and_leave_nobody(self, rounds, line):
        def work(progress, fd):
            import os
            import time

            os.write(fd, f"{os.getpid()}\n".encode())
            while True:
                progress.step()
                time.sleep(0.01)

        randomness = random.Random(rounds)
        supervisor = Supervisor()
        progresses = {f"env-{index}": Progress() for index in range(3)}
        policy = RestartPolicy(1000, backoff=0.01, backoff_limit=0.01, hang=60)
        for name, progress in progresses.items():
            fds = [progress.fd, line.fd]
            worker = make(work, progress, line.fd, fds=fds)
            supervisor.add(name, "env", worker, policy, progress)
        started, killed = set(), set()
        with running(supervisor):
            for _ in range(rounds):
                # At any moment, even while a worker is starting.
                time.sleep(randomness.uniform(0, 0.3))
                name = randomness.choice(sorted(progresses))
                pid = status_of(supervisor, name).pid
                if pid is not None:
                    started.add(pid)
                    killed.add(pid)
                    # Nothing reaps the worker while it lives, so the pid is its own.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                wait_until(
                    lambda name=name, pid=pid: (
                        status_of(supervisor, name).pid not in (None, pid)
                    )
                )
            now = time.monotonic()
            wait_until(lambda: all(p.stepped > now for p in progresses.values()))
            alive = {status.pid for status in supervisor.status()}
            restarts = sum(status.restarts for status in supervisor.status())
        assert len(killed) <= restarts
        assert len(killed) > rounds // 2
        assert not alive & killed
        assert all(is_gone(pid) for pid in alive | started)

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=pytest.mark.slow)])
    def test_kill_9_of_the_supervisor_leaves_nobody(self, rounds, tmp_path):
        code = """
            def work(progress):
                import os, threading
                say("child", os.getpid())
                threading.Event().wait(0.1)
                raise ValueError("on purpose")

            supervisor = Supervisor()
            for index in range(3):
                progress = Progress()
                supervisor.add(
                    f"env-{index}", "env",
                    lambda p=progress: Process(work, p, fds=[p.fd]),
                    RestartPolicy(1000, backoff=0.01, backoff_limit=0.01, hang=5),
                    progress,
                )
            supervisor.run()
            """
        randomness = random.Random(rounds)
        for _ in range(rounds):
            with launch(tmp_path, code, stderr=subprocess.DEVNULL) as script:
                for _ in range(randomness.randint(1, 9)):
                    read_pid(script, "child")
                time.sleep(randomness.uniform(0, 0.1))
                script.kill()
                # The pipe ends when the last process that can write to it has ended.
                rest = script.stdout.read().split("\n")
                pids = [int(text.split()[1]) for text in rest if text]
                wait_until(lambda pids=pids: all(is_gone(pid) for pid in pids))
