"""Supervised workers: restarts, hangs, give-up, stop. Real processes, real signals.

Functions for child processes are nested in functions of this module, so that they
travel by value and the children do not import it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_testing import WAIT, Line, fail_with, is_gone, wait_for, wait_forever

from embodied.workers import (
    Process,
    Progress,
    RestartPolicy,
    RunFailed,
    RunStalled,
    Supervisor,
    Thread,
    WorkerError,
)

QUICK = RestartPolicy(restarts=1000, backoff=0.01, backoff_limit=0.05)
ROUNDS = [5, pytest.param(50, marks=pytest.mark.slow)]


@pytest.fixture
def line():
    with Line() as line:
        yield line


@contextlib.contextmanager
def running(supervisor):
    """Runs a supervisor in another thread; what its `run` raises is raised here."""
    with Thread(supervisor.run, name="run") as thread:
        try:
            yield thread
        finally:
            supervisor.stop()
    if thread.error is not None:
        raise thread.error.__cause__


def status_of(supervisor, name):
    return {status.name: status for status in supervisor.status()}[name]


def make(function, *args, **options):
    return lambda: Process(function, *args, **options)


def reporter(progress, then="step"):
    """Returns the factory of a process that steps once and then does `then`."""

    def work(progress, then):
        import threading
        import time

        progress.step()
        while then == "step":
            time.sleep(0.02)
            progress.step()
        with (
            progress.waiting(then == "beat")
            if then != "hang"
            else contextlib.nullcontext()
        ):
            while not threading.Event().wait(0.1 if then == "beat" else None):
                progress.alive()

    return make(work, progress, then, fds=[progress.fd])


class TestPolicy:
    @given(st.floats(0.001, 100), st.floats(0.001, 100), st.integers(1, 10**6))
    def test_the_delay_doubles_up_to_its_limit(self, backoff, limit, count):
        policy = RestartPolicy(restarts=3, backoff=backoff, backoff_limit=limit)
        assert policy.delay(1) == min(backoff, limit)
        assert policy.delay(count + 1) == min(2 * policy.delay(count), limit)

    @pytest.mark.parametrize("name", ["restarts", "window", "backoff", "hang"])
    def test_values_are_checked(self, name):
        with pytest.raises(ValueError, match=f"{name} of at least 0, got -1"):
            RestartPolicy(**{"restarts": 3, name: -1})
        with pytest.raises(ValueError, match="got nan"):
            RestartPolicy(restarts=3, hang=math.nan)


class TestProgress:
    def test_reports_cross_processes(self, line):
        def work(progress, fd):
            import os

            progress.step()
            os.write(fd, b"stepped\n")
            os.read(fd, 1)
            with progress.waiting():
                os.write(fd, b"waiting\n")
                os.read(fd, 1)
            os.write(fd, b"resumed\n")

        progress = Progress()
        assert (progress.seen, progress.stepped) == (0.0, 0.0)
        before = time.monotonic()
        process = Process(work, progress, line.fd, fds=[progress.fd, line.fd])
        with process:
            assert line.receive() == "stepped"
            stepped = progress.stepped
            assert before < stepped == progress.seen < time.monotonic()
            line.send("")
            assert line.receive() == "waiting"
            assert progress.seen == math.inf
            before = time.monotonic()
            line.send("")
            assert line.receive() == "resumed"
            assert before < progress.seen < time.monotonic()
            assert progress.stepped == stepped

    def test_a_descriptor_that_was_not_handed_over_is_an_error(self):
        progress = Progress()
        process = Process(print, progress, start=True)
        assert process.join(WAIT)
        assert f"descriptor {progress.fd}, where it is not" in str(process.error)
        assert "fds=[progress.fd]" in str(process.error)

    def test_copies_in_one_process_share_the_memory(self):
        progress = Progress()
        copy = pickle.loads(pickle.dumps(progress))
        progress.step()
        assert copy.stepped == progress.stepped > 0
        copy.reset()
        assert (progress.seen, progress.stepped) == (0.0, copy.stepped)

    def test_it_closes_its_descriptors(self):
        before = len(os.listdir("/proc/self/fd"))
        some = [Progress() for _ in range(10)]
        assert len(os.listdir("/proc/self/fd")) > before
        del some
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_step_takes_less_than_a_microsecond(self):
        step = Progress().step
        assert min(timeit.repeat(step, number=1000, repeat=50)) < 1000 * 1e-6


class TestEnding:
    def test_run_returns_when_all_have_ended_well(self):
        supervisor = Supervisor()
        supervisor.add("one", "env", make(print), QUICK)
        supervisor.add("two", "env", lambda: Thread(print), QUICK)
        supervisor.run()
        assert [status.state for status in supervisor.status()] == ["ended", "ended"]
        assert [status.restarts for status in supervisor.status()] == [0, 0]
        assert [status.pid for status in supervisor.status()] == [None, None]

    def test_one_that_ended_well_stays_so_while_others_run(self):
        supervisor = Supervisor()
        supervisor.add("short", "env", make(print), QUICK)
        supervisor.add("long", "env", make(wait_forever()), QUICK)
        with running(supervisor):
            wait_for(lambda: status_of(supervisor, "short").state == "ended")
            assert status_of(supervisor, "long").state == "running"
            assert status_of(supervisor, "short").restarts == 0
        assert status_of(supervisor, "long").state == "ended"

    def test_success_is_restarted_if_the_policy_says_so(self):
        restarts = queue.SimpleQueue()
        policy = RestartPolicy(restarts=0, backoff=0.01, restart_on_success=True)
        supervisor = Supervisor(on_restart=lambda *args: restarts.put(args))
        supervisor.add("again", "env", make(print), policy)
        with running(supervisor):
            for _ in range(3):
                assert restarts.get(timeout=WAIT) == ("again", None)

    def test_until_ends_the_run_and_is_set_by_its_end(self):
        until = threading.Event()
        supervisor = Supervisor()
        supervisor.add("env-0", "env", make(wait_forever()), QUICK)
        timer = threading.Timer(0.2, until.set)
        timer.start()
        supervisor.run(until)
        timer.join()
        assert status_of(supervisor, "env-0").state == "ended"
        until = threading.Event()
        supervisor = Supervisor()
        supervisor.add("agent", "agent", lambda: Thread(until.wait), QUICK)
        start = time.monotonic()
        supervisor.run(until, duration=0.2)
        assert 0.2 <= time.monotonic() - start < 4
        assert until.is_set()
        assert status_of(supervisor, "agent").state == "ended"
        wait_for(lambda: not any("until" in t.name for t in threading.enumerate()))

    def test_stop_runs_finally_blocks(self, line):
        def work(fd, name):
            import os
            import threading

            try:
                os.write(fd, f"{name} ready\n".encode())
                threading.Event().wait()
            finally:
                os.write(fd, f"{name} cleaned\n".encode())

        supervisor = Supervisor(grace=WAIT)
        for name in ["first", "second"]:
            supervisor.add(name, "env", make(work, line.fd, name, fds=[line.fd]), QUICK)
        with running(supervisor) as thread:
            ready = {line.receive() for _ in range(2)}
            assert ready == {"first ready", "second ready"}
        cleaned = {line.receive() for _ in range(2)}
        assert cleaned == {"first cleaned", "second cleaned"}
        assert thread.error is None

    def test_the_last_added_gets_sigterm_first(self, monkeypatch):
        signalled = []
        send = Process._signal
        monkeypatch.setattr(
            Process,
            "_signal",
            lambda self, number: signalled.append(self.name) or send(self, number),
        )
        supervisor = Supervisor()
        for name in "abc":
            supervisor.add(name, "env", make(wait_forever(), name=name), QUICK)
        supervisor.start()
        supervisor.stop()
        assert signalled[:3] == ["c", "b", "a"]

    def test_sigkill_for_all_together_at_the_deadline(self, line):
        def work(fd):
            import os
            import signal
            import threading

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(fd, f"{os.getpid()}\n".encode())
            threading.Event().wait()

        supervisor = Supervisor(grace=1.0)
        for index in range(3):
            supervisor.add(str(index), "env", make(work, line.fd, fds=[line.fd]), QUICK)
        supervisor.start()
        pids = [int(line.receive()) for _ in range(3)]
        start = time.monotonic()
        supervisor.stop()
        assert 1.0 <= time.monotonic() - start < 2.9
        assert all(is_gone(pid) for pid in pids)

    def test_a_thread_that_does_not_return_is_left_behind(self):
        release = threading.Event()
        supervisor = Supervisor(grace=0.1)
        supervisor.add("agent", "agent", lambda: Thread(release.wait), QUICK)
        supervisor.run(duration=0.1)
        assert status_of(supervisor, "agent").state == "running"
        release.set()

    def test_an_error_while_stopping_is_in_the_status(self, line):
        def work(fd):
            import os
            import threading

            try:
                os.write(fd, b"ready\n")
                threading.Event().wait()
            finally:
                raise OSError("disk full")

        supervisor = Supervisor(grace=WAIT)
        supervisor.add("replay", "replay", make(work, line.fd, fds=[line.fd]), QUICK)
        with running(supervisor):
            line.receive()
        assert "disk full" in str(status_of(supervisor, "replay").error)

    def test_stop_before_run(self):
        supervisor = Supervisor()
        supervisor.add("env-0", "env", make(wait_forever()), QUICK)
        supervisor.stop()
        supervisor.run()
        assert status_of(supervisor, "env-0").restarts == 0
        assert status_of(supervisor, "env-0").state == "ended"

    def test_an_interrupt_stops_the_children_and_goes_on(self, tmp_path):
        with launch(
            tmp_path,
            """
            def work():
                import os, threading
                try:
                    say("child", os.getpid())
                    threading.Event().wait()
                finally:
                    say("cleaned")

            supervisor = Supervisor(grace=30)
            supervisor.add("a", "env", lambda: Process(work), RestartPolicy(restarts=3))
            try:
                supervisor.run()
            except KeyboardInterrupt:
                say("interrupted", supervisor.status()[0].state)
            """,
        ) as script:
            pid = read_pid(script, "child")
            script.send_signal(signal.SIGINT)
            assert script.stdout.readline() == "cleaned\n"
            assert script.stdout.readline() == "interrupted ended\n"
            assert script.wait(WAIT) == 0
            assert is_gone(pid)


class TestMisuse:
    def test_it_says_what_to_do(self):
        supervisor = Supervisor(stall_timeout=10)
        supervisor.add("env-0", "env", make(print), QUICK)
        with pytest.raises(ValueError, match="'env-0' is there twice"):
            supervisor.add("env-0", "env", make(print), QUICK)
        with pytest.raises(ValueError, match="'env-1' needs a Progress"):
            supervisor.add(
                "env-1", "env", make(print), RestartPolicy(restarts=3, hang=1)
            )
        with pytest.raises(ValueError, match=r"stall_timeout=10 .* Progress"):
            supervisor.run()
        supervisor.add("env-1", "env", make(print), QUICK, Progress())
        supervisor.run()
        with pytest.raises(RuntimeError, match="once"):
            supervisor.start()
        with pytest.raises(RuntimeError, match="'env-2' must be added before"):
            supervisor.add("env-2", "env", make(print), QUICK)

    def test_a_first_start_that_fails_stops_what_was_started(self):
        with Supervisor() as supervisor:
            supervisor.add("good", "env", make(wait_forever()), QUICK)
            supervisor.add("bad", "env", make(print, threading.Lock()), QUICK)
            with pytest.raises(TypeError, match="pickle"):
                supervisor.run()
            assert status_of(supervisor, "good").state == "ended"


class TestRestarts:
    def test_kill_9_of_a_worker_restarts_it(self):
        restarts = queue.SimpleQueue()
        supervisor = Supervisor(on_restart=lambda *args: restarts.put(args))
        supervisor.add("env-0", "env", make(wait_forever(), name="env-0"), QUICK)
        supervisor.add("env-1", "env", make(wait_forever()), QUICK)
        with running(supervisor):
            wait_for(lambda: status_of(supervisor, "env-1").pid)
            old, other = (status.pid for status in supervisor.status())
            os.kill(old, signal.SIGKILL)
            name, error = restarts.get(timeout=WAIT)
            assert name == "env-0"
            assert "was killed by SIGKILL" in str(error)
            wait_for(lambda: status_of(supervisor, "env-0").pid not in (None, old))
            status = status_of(supervisor, "env-0")
            assert (status.state, status.restarts) == ("running", 1)
            assert status.error is error
            assert status_of(supervisor, "env-1").pid == other
        assert is_gone(old) and is_gone(status.pid) and is_gone(other)

    def test_the_delay_grows_up_to_its_limit(self):
        starts = []

        def make_worker():
            starts.append(time.monotonic())
            return Thread(fail_with(ValueError("again")))

        policy = RestartPolicy(restarts=6, backoff=0.05, backoff_limit=0.2)
        supervisor = Supervisor()
        supervisor.add("env-0", "env", make_worker, policy)
        with pytest.raises(RunFailed):
            supervisor.run()
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        assert len(gaps) == 6
        for gap, delay in zip(gaps, [0.05, 0.1, 0.2, 0.2, 0.2, 0.2]):
            assert gap >= delay
        assert gaps[-1] < 1.6  # What it would be without the limit.

    def test_a_steady_run_resets_the_delay(self):
        starts = []

        def make_worker():
            starts.append(time.monotonic())
            return Thread(fail_after, 0.6 if len(starts) == 6 else 0.0)

        def fail_after(seconds):
            threading.Event().wait(seconds)
            raise ValueError("again")

        policy = RestartPolicy(restarts=6, backoff=0.05, backoff_limit=100, steady=0.5)
        supervisor = Supervisor()
        supervisor.add("env-0", "env", make_worker, policy)
        with pytest.raises(RunFailed):
            supervisor.run()
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        assert gaps[-2] >= 0.8
        assert gaps[-1] < 0.6 + 1.6  # What would follow without the steady run.

    def test_giving_up_names_the_role_with_the_traceback(self, line):
        def fail():
            def deep_inside():
                raise ValueError("out of cheese")

            deep_inside()

        def work(fd):
            import os
            import threading

            os.write(fd, f"{os.getpid()}\n".encode())
            threading.Event().wait()

        supervisor = Supervisor(grace=WAIT)
        supervisor.add("other", "replay", make(work, line.fd, fds=[line.fd]), QUICK)
        policy = RestartPolicy(restarts=2, backoff=0.01)
        supervisor.add("env-3", "env", make(fail), policy)
        with pytest.raises(RunFailed) as info:
            supervisor.run()
        assert (info.value.name, info.value.role) == ("env-3", "env")
        message = str(info.value)
        assert message.startswith("Worker 'env-3' of role 'env' failed for good")
        assert "3 failures in 600 s, 2 restarts allowed" in message
        assert "failed with ValueError: out of cheese" in message
        assert "in deep_inside" in message
        assert "in deep_inside" in info.value.traceback
        assert str(pickle.loads(pickle.dumps(info.value))) == message
        assert isinstance(info.value, WorkerError)
        assert status_of(supervisor, "env-3").restarts == 2
        assert [status.state for status in supervisor.status()] == ["ended", "ended"]
        assert not any(is_ours(thread) for thread in threading.enumerate())

    def test_some_kinds_of_failures_have_limits_of_their_own(self):
        errors = [KeyError("a"), OSError("b"), KeyError("c"), KeyError("d")]
        made = iter(errors)
        policy = RestartPolicy(restarts=10, backoff=0.01, limits={"KeyError": 2})
        supervisor = Supervisor()
        supervisor.add("env", "env", lambda: Thread(fail_with(next(made))), policy)
        with pytest.raises(RunFailed, match=r"3 times KeyError.*2 restarts") as info:
            supervisor.run()
        assert info.value.kind == "KeyError" and not list(made)
        assert pickle.loads(pickle.dumps(info.value)).kind == "KeyError"

    def test_old_failures_do_not_count(self):
        count = itertools.count()
        policy = RestartPolicy(restarts=1, backoff=0.2, backoff_limit=0.2, window=0.15)

        def make_worker():
            return Thread(print if next(count) == 5 else fail_with(ValueError("again")))

        supervisor = Supervisor()
        supervisor.add("env-0", "env", make_worker, policy)
        supervisor.run()
        assert status_of(supervisor, "env-0").restarts == 5

    def test_the_error_of_a_thread_is_chained(self):
        cause = ValueError("broken")
        supervisor = Supervisor()
        supervisor.add(
            "agent", "agent", lambda: Thread(fail_with(cause)), RestartPolicy(0)
        )
        with pytest.raises(RunFailed, match=r"'agent'.*ValueError: broken") as info:
            supervisor.run()
        assert info.value.__cause__ is cause

    def test_a_restart_that_cannot_be_made_is_a_failure(self):
        count = itertools.count()

        def make_worker():
            if next(count):
                raise OSError("no port left")
            return Thread(fail_with(ValueError("first")))

        supervisor = Supervisor()
        supervisor.add("env-0", "env", make_worker, RestartPolicy(2, backoff=0.01))
        with pytest.raises(RunFailed, match=r"3 failures.*OSError: no port left"):
            supervisor.run()
        assert next(count) == 3

    def test_a_failure_is_told_before_the_others_are_stopped(self):
        def look(error):
            seen.append((error.role, status_of(supervisor, "logger").state))

        def fail():
            raise ValueError("broken")

        seen = []
        supervisor = Supervisor(on_failure=look)
        supervisor.add("logger", "logger", make(wait_forever()), QUICK)
        supervisor.add("env-0", "env", make(fail), RestartPolicy(restarts=0))
        with pytest.raises(RunFailed, match="broken"):
            supervisor.run()
        ((role, state),) = seen
        assert role == "env" and state != "ended"
        assert status_of(supervisor, "logger").state == "ended"

    def test_stop_during_the_back_off(self):
        decided = threading.Event()
        supervisor = Supervisor(on_restart=lambda *_: decided.set())
        policy = RestartPolicy(restarts=3, backoff=1000, backoff_limit=1000)
        supervisor.add("env-0", "env", make(fail_with(ValueError("x"))), policy)
        start = time.monotonic()
        with running(supervisor):
            assert decided.wait(WAIT)
            assert status_of(supervisor, "env-0").state == "backing off"
            assert status_of(supervisor, "env-0").pid is None
        assert time.monotonic() - start < WAIT
        status = status_of(supervisor, "env-0")
        assert (status.state, status.restarts) == ("ended", 0)

    @pytest.mark.parametrize("start", [False, True])
    def test_a_worker_that_is_made_during_the_stop_does_not_stay(self, start):
        made, release = threading.Event(), threading.Event()
        workers = []

        def make_worker():
            if not workers:
                workers.append(Process(fail_with(ValueError("x"))))
            else:
                made.set()
                assert release.wait(WAIT)
                workers.append(Process(wait_forever(), start=start))
            return workers[-1]

        supervisor = Supervisor()
        supervisor.add("env-0", "env", make_worker, QUICK)
        with Thread(supervisor.run) as thread:
            assert made.wait(WAIT)
            supervisor.stop()
            release.set()
        thread.check()
        assert len(workers) == 2
        assert workers[1].started == start
        assert not workers[1].running

    def test_a_callback_that_fails_ends_the_run(self):
        def refuse(name, error):
            raise KeyError(name)

        supervisor = Supervisor(on_restart=refuse)
        supervisor.add("env-0", "env", make(fail_with(ValueError("x"))), QUICK)
        supervisor.add("env-1", "env", make(wait_forever()), QUICK)
        with pytest.raises(KeyError, match="env-0"):
            supervisor.run()
        assert status_of(supervisor, "env-1").state == "ended"


class TestHangs:
    def test_one_that_stops_reporting_is_killed_and_restarted(self):
        restarts = queue.SimpleQueue()
        progress = Progress()
        supervisor = Supervisor(on_restart=lambda *args: restarts.put(args))
        policy = RestartPolicy(restarts=9, backoff=0.01, hang=0.5)
        supervisor.add("env-0", "env", reporter(progress, "hang"), policy, progress)
        supervisor.add("env-1", "env", make(wait_forever()), QUICK)
        with running(supervisor):
            wait_for(lambda: progress.stepped)
            pid = status_of(supervisor, "env-0").pid
            for _ in range(2):
                name, error = restarts.get(timeout=WAIT)
                assert name == "env-0"
                assert "has reported no progress for 0." in str(error)
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

    @pytest.mark.parametrize("then", ["step", "wait", "beat"])
    def test_steps_and_waiting_are_no_hang(self, then):
        progress = Progress()
        supervisor = Supervisor()
        policy = RestartPolicy(restarts=0, hang=2.0)
        supervisor.add("env-0", "env", reporter(progress, then), policy, progress)
        with running(supervisor) as thread:
            wait_for(lambda: status_of(supervisor, "env-0").state == "running")
            assert not thread.join(3.0)
            status = status_of(supervisor, "env-0")
            assert (status.state, status.restarts) == ("running", 0)
            assert status.waiting == (then != "step")
            assert (status.idle < 2.0) == (then == "step")

    def test_watching_takes_no_time(self):
        progress = Progress()
        supervisor = Supervisor(stall_timeout=100)
        policy = RestartPolicy(restarts=0, hang=100)
        supervisor.add("env-0", "env", reporter(progress), policy, progress)
        with running(supervisor) as thread:
            wait_for(lambda: progress.stepped)
            before = time.process_time()
            assert not thread.join(1.0)
            assert time.process_time() - before < 0.05

    @pytest.mark.parametrize("then", ["step", "beat"])
    def test_a_stopped_process_hangs_also_while_it_waits(self, then):
        progress = Progress()
        supervisor = Supervisor()
        policy = RestartPolicy(restarts=9, backoff=0.01, hang=1.0)
        supervisor.add("env-0", "env", reporter(progress, then), policy, progress)
        with running(supervisor):
            wait_for(lambda: progress.stepped and progress.waits == (then == "beat"))
            pid = status_of(supervisor, "env-0").pid
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: status_of(supervisor, "env-0").pid not in (None, pid))
            assert is_gone(pid)
            assert "no progress" in str(status_of(supervisor, "env-0").error)

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
        policy = RestartPolicy(restarts=1, backoff=0.01, hang=0.5, startup=10.0)
        supervisor.add("env-0", "env", make_worker, policy, progress)
        with pytest.raises(RunFailed, match="has reported nothing in"):
            with running(supervisor) as thread:
                wait_for(lambda: status_of(supervisor, "env-0").waiting)
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

            progress = Progress()
            supervisor = Supervisor()
            supervisor.add(
                "a", "env", lambda: Process(work, progress, fds=[progress.fd]),
                RestartPolicy(restarts=0, hang=1.0), progress,
            )
            supervisor.run(duration=5)
            """,
        ) as script:
            pid = read_pid(script, "child")
            os.kill(pid, signal.SIGSTOP)
            script.send_signal(signal.SIGSTOP)
            # Time itself is the point: much more of it than the worker is allowed.
            time.sleep(2.5)
            script.send_signal(signal.SIGCONT)
            time.sleep(0.2)
            os.kill(pid, signal.SIGCONT)
            assert script.wait(WAIT) == 0


class TestStall:
    def test_the_run_ends_when_nobody_progresses(self):
        stepping, waiting, silent = Progress(), Progress(), Progress()
        supervisor = Supervisor(grace=0.2, stall_timeout=2.0)
        policy = RestartPolicy(restarts=0, hang=100)
        add = supervisor.add
        add("env-0", "env", reporter(stepping), QUICK, stepping)
        add("env-1", "env", reporter(waiting, "wait"), policy, waiting)
        add("replay", "replay", make(wait_forever()), QUICK, silent)
        add("logger", "logger", make(wait_forever()), QUICK)
        with pytest.raises(RunStalled) as info, running(supervisor) as thread:
            wait_for(lambda: stepping.stepped and waiting.stepped)
            assert not thread.join(3.0)
            os.kill(status_of(supervisor, "env-0").pid, signal.SIGSTOP)
            stopped = time.monotonic()
            assert thread.join(WAIT)
            assert time.monotonic() - stopped > 1.5
        lines = str(info.value).splitlines()
        assert lines[0].startswith("No worker has progressed for 2 s")
        first, second, third = lines[1:]
        assert first.startswith("  env-0 (running): 2.")
        assert second.startswith("  env-1 (waiting): ") and second.endswith(" s ago")
        assert third == "  replay (starting): never"
        assert all(status.state == "ended" for status in supervisor.status())

    def test_restarts_are_no_progress(self):
        progress = Progress()
        supervisor = Supervisor(stall_timeout=0.5)
        failing = make(fail_with(ValueError("again")))
        supervisor.add("env-0", "env", failing, QUICK, progress)
        with pytest.raises(RunStalled, match=r"env-0 .*: never"):
            supervisor.run()
        assert status_of(supervisor, "env-0").restarts > 0

    def test_it_does_not_watch_those_that_have_ended(self):
        progress = Progress()
        supervisor = Supervisor(stall_timeout=0.3)
        supervisor.add("env-0", "env", lambda: Thread(print), QUICK, progress)
        supervisor.add("logger", "logger", make(wait_forever()), QUICK)
        supervisor.run(duration=1.0)


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
                # At any moment, also while it still starts.
                time.sleep(randomness.uniform(0, 0.3))
                name = randomness.choice(sorted(progresses))
                pid = status_of(supervisor, name).pid
                if pid is not None:
                    started.add(pid)
                    killed.add(pid)
                    # Not reaped by anybody while it lives, so the number is its own.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                wait_for(
                    lambda name=name, pid=pid: (
                        status_of(supervisor, name).pid not in (None, pid)
                    )
                )
            now = time.monotonic()
            wait_for(lambda: all(p.stepped > now for p in progresses.values()))
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
                # The pipe ends when the last process that could write into it has.
                rest = script.stdout.read().split("\n")
                pids = [int(text.split()[1]) for text in rest if text]
                wait_for(lambda pids=pids: all(is_gone(pid) for pid in pids))


def is_ours(thread):
    return thread.name.startswith(("watch ", "follow "))


@contextlib.contextmanager
def launch(tmp_path, code, **options):
    """Runs a script that may use `say` and the names of the supervisor."""
    path = tmp_path / "script.py"
    head = """
        import os
        from embodied.workers import (Progress, RestartPolicy, Supervisor)
        from embodied.workers import Process

        def say(*words):
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(code))
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
        **options,
    ) as script:
        try:
            yield script
        finally:
            script.kill()


def read_pid(script, word):
    text = script.stdout.readline()
    assert text.startswith(f"{word} "), text
    return int(text.split()[1])
