"""Supervised workers that hang or stall. Real processes.

Functions for child processes are nested in functions of this module, so that they
travel by value and the children do not import it.
"""

from __future__ import annotations

import itertools
import os
import queue
import re
import signal
import subprocess
import threading
import time

import pytest
from process_testing import fail_with, is_gone, wait_forever
from supervisor_testing import (
    QUICK,
    launch,
    make,
    read_pid,
    reporter,
    running,
    set_after,
    status_of,
)
from waiting_testing import WAIT, wait_until

from embodied.workers import (
    Process,
    Progress,
    RestartPolicy,
    RunFailed,
    RunStalled,
    Supervisor,
    Thread,
)


class TestHangs:
    def test_one_that_stops_reporting_is_killed_and_restarted(self):
        restarts = queue.SimpleQueue()
        progress = Progress()
        supervisor = Supervisor(on_restart=lambda *args: restarts.put(args))
        policy = RestartPolicy(restarts=9, backoff=0.01, hang=0.5)
        supervisor.add("env-0", "env", reporter(progress, "hang"), policy, progress)
        supervisor.add("env-1", "env", make(wait_forever()), QUICK)
        with running(supervisor):
            wait_until(lambda: progress.stepped)
            pid = status_of(supervisor, "env-0").pid
            for _ in range(2):
                name, error = restarts.get(timeout=WAIT)
                assert name == "env-0"
                told = re.search(r"has reported no progress for ([\d.]+)", str(error))
                assert float(told[1]) >= 0.5
            assert is_gone(pid)
            assert status_of(supervisor, "env-1").restarts == 0

    def test_it_is_not_killed_early_or_late(self):
        restarts = queue.SimpleQueue()
        progress = Progress()
        supervisor = Supervisor(
            on_restart=lambda *_: restarts.put(time.monotonic() - progress.stepped)
        )
        policy = RestartPolicy(restarts=9, backoff=100, backoff_limit=100, hang=0.5)
        supervisor.add("env-0", "env", reporter(progress, "hang"), policy, progress)
        with running(supervisor):
            assert 0.5 <= restarts.get(timeout=WAIT) < 5.0

    def test_steps_and_waiting_are_no_hang(self):
        supervisor = Supervisor()
        policy = RestartPolicy(restarts=0, hang=2.0)
        progresses = {then: Progress() for then in ("step", "wait", "beat")}
        for then, progress in progresses.items():
            supervisor.add(then, "env", reporter(progress, then), policy, progress)
        with running(supervisor) as thread:
            wait_until(lambda: all(x.stepped for x in progresses.values()))
            assert not thread.join(3.0)
            for then in progresses:
                status = status_of(supervisor, then)
                assert (status.state, status.restarts) == ("running", 0)
                assert status.waiting == (then != "step")
                assert (status.idle < 2.0) == (then == "step")

    def test_watching_takes_no_time(self):
        progress = Progress()
        supervisor = Supervisor(stall_timeout=100)
        policy = RestartPolicy(restarts=0, hang=100)
        supervisor.add("env-0", "env", reporter(progress), policy, progress)
        with running(supervisor) as thread:
            wait_until(lambda: progress.stepped)
            before = time.process_time()
            assert not thread.join(1.0)
            assert time.process_time() - before < 0.05

    @pytest.mark.parametrize("then", ["step", "beat"])
    def test_a_stopped_process_hangs_also_while_it_waits(self, then):
        progress, restarts = Progress(), queue.SimpleQueue()
        supervisor = Supervisor(on_restart=lambda *args: restarts.put(args))
        policy = RestartPolicy(restarts=9, backoff=0.01, hang=1.0)
        supervisor.add("env-0", "env", reporter(progress, then), policy, progress)
        with running(supervisor):
            wait_until(lambda: progress.stepped and progress.waits == (then == "beat"))
            pid = status_of(supervisor, "env-0").pid
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: status_of(supervisor, "env-0").pid not in (None, pid))
            assert is_gone(pid)
        _, error = restarts.get_nowait()
        assert "no progress" in str(error)

    def test_the_first_report_may_take_longer(self):
        start = time.monotonic()
        supervisor = Supervisor()
        policy = RestartPolicy(restarts=0, hang=0.2, startup=0.8)
        progress = Progress()
        supervisor.add("env-0", "env", make(wait_forever()), policy, progress)
        with pytest.raises(RunFailed, match=r"has reported nothing in \d+\.\d s since"):
            supervisor.run()
        assert time.monotonic() - start >= 1.0

    def test_a_hanging_start_does_not_inherit_the_wait_of_the_one_before(self):
        progress = Progress()
        count = itertools.count()

        def make_worker():
            if next(count):
                return Process(wait_forever())
            return reporter(progress, "wait")()

        supervisor = Supervisor()
        policy = RestartPolicy(restarts=1, backoff=0.01, hang=0.5, startup=4.0)
        supervisor.add("env-0", "env", make_worker, policy, progress)
        with pytest.raises(RunFailed, match="has reported nothing in"):
            with running(supervisor) as thread:
                wait_until(lambda: status_of(supervisor, "env-0").waiting)
                os.kill(status_of(supervisor, "env-0").pid, signal.SIGKILL)
                assert thread.join(WAIT)

    def test_a_thread_that_hangs_ends_the_run(self):
        progress, release = Progress(), threading.Event()

        def work():
            progress.step()
            release.wait()

        supervisor = Supervisor(grace=0.1)
        policy = RestartPolicy(restarts=9, hang=0.3)
        supervisor.add("agent", "agent", lambda: Thread(work), policy, progress)
        with pytest.raises(RunFailed, match=r"'agent'.*a thread cannot be killed"):
            supervisor.run()
        release.set()

    def test_processes_that_were_all_frozen_do_not_hang(self, tmp_path):
        with launch(
            tmp_path,
            """
            def work(progress):
                import os, time
                say("child", os.getpid())
                while True:
                    progress.step()
                    time.sleep(0.02)

            import threading
            progress = Progress()
            supervisor = Supervisor()
            supervisor.add(
                "a", "env", lambda: Process(work, progress, fds=[progress.fd]),
                RestartPolicy(restarts=0, hang=1.0), progress,
            )
            until = threading.Event()
            threading.Thread(target=lambda: (input(), until.set())).start()
            supervisor.run(until)
            """,
            stdin=subprocess.PIPE,
        ) as script:
            pid = read_pid(script, "child")
            os.kill(pid, signal.SIGSTOP)
            script.send_signal(signal.SIGSTOP)
            # Much longer than the worker may go without reporting progress.
            time.sleep(2.5)
            script.send_signal(signal.SIGCONT)
            time.sleep(0.2)
            os.kill(pid, signal.SIGCONT)
            # Time to be noticed as hanging, if it were.
            with pytest.raises(subprocess.TimeoutExpired):
                script.wait(1.5)
            print(file=script.stdin, flush=True)
            assert script.wait(WAIT) == 0


class TestStall:
    def test_the_run_ends_when_nobody_progresses(self):
        stepping, waiting, silent = Progress(), Progress(), Progress()
        starting = Progress()

        def step_until_both_have():
            # On a busy machine, their start may take longer than the stall timeout.
            while not (stepping.stepped and waiting.stepped):
                starting.step()
                time.sleep(0.01)

        supervisor = Supervisor(grace=0.2, stall_timeout=2.0)
        policy = RestartPolicy(restarts=0, hang=100)
        add = supervisor.add
        add("env-0", "env", reporter(stepping), QUICK, stepping)
        add("env-1", "env", reporter(waiting, "wait"), policy, waiting)
        add("replay", "replay", make(wait_forever()), QUICK, silent)
        add("logger", "logger", make(wait_forever()), QUICK)
        add("start", "env", lambda: Thread(step_until_both_have), QUICK, starting)
        with pytest.raises(RunStalled) as info, running(supervisor) as thread:
            wait_until(lambda: stepping.stepped and waiting.stepped)
            assert not thread.join(3.0)
            os.kill(status_of(supervisor, "env-0").pid, signal.SIGSTOP)
            stopped = time.monotonic()
            assert thread.join(WAIT)
            assert time.monotonic() - stopped > 1.5
        lines = str(info.value).splitlines()
        assert lines[0].startswith("No worker has progressed for 2 s")
        first, second, third = lines[1:4]
        assert float(re.match(r"  env-0 \(running\): ([\d.]+)", first)[1]) >= 2
        assert second.startswith("  env-1 (waiting): ") and second.endswith(" s ago")
        assert third == "  replay (starting): never"
        assert all(status.state == "ended" for status in supervisor.status())

    def test_restarts_are_no_progress(self):
        progress = Progress()
        supervisor = Supervisor(stall_timeout=0.5)
        fail = fail_with(ValueError("again"))
        supervisor.add("env-0", "env", lambda: Thread(fail), QUICK, progress)
        with pytest.raises(RunStalled, match=r"env-0 .*: never"):
            supervisor.run()
        assert status_of(supervisor, "env-0").restarts > 0

    def test_it_does_not_watch_those_that_have_ended(self):
        progress = Progress()
        supervisor = Supervisor(stall_timeout=0.3)
        supervisor.add("env-0", "env", lambda: Thread(print), QUICK, progress)
        supervisor.add("logger", "logger", make(wait_forever()), QUICK)
        supervisor.run(set_after(1.0))
