"""Restarts of supervised workers. Real processes, real signals.

Functions for child processes are nested in functions of this module, so that they
travel by value and the children do not import it.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import signal
import threading
import time

import pytest
from process_testing import fail_with, is_gone, wait_forever
from supervisor_testing import (
    QUICK,
    is_ours,
    make,
    running,
    status_of,
)
from waiting_testing import WAIT, wait_until

from embodied.workers import (
    Process,
    RestartPolicy,
    RunFailed,
    Supervisor,
    Thread,
    WorkerError,
)


class TestRestarts:
    def test_kill_9_of_a_worker_restarts_it(self):
        restarts = queue.SimpleQueue()
        supervisor = Supervisor(on_restart=lambda *args: restarts.put(args))
        supervisor.add("env-0", "env", make(wait_forever(), name="env-0"), QUICK)
        supervisor.add("env-1", "env", make(wait_forever()), QUICK)
        with running(supervisor):
            wait_until(lambda: status_of(supervisor, "env-1").pid)
            old, other = (status.pid for status in supervisor.status())
            os.kill(old, signal.SIGKILL)
            name, error = restarts.get(timeout=WAIT)
            assert name == "env-0"
            assert "was killed by SIGKILL" in str(error)
            wait_until(lambda: status_of(supervisor, "env-0").pid not in (None, old))
            status = status_of(supervisor, "env-0")
            assert (status.state, status.restarts) == ("running", 1)
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
        assert gaps[-1] < 1.6  # The delay without the limit.

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
        assert gaps[-1] < 0.6 + 1.6  # The delay without the steady run.

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

    def test_the_delay_also_grows_if_workers_cannot_be_made(self):
        times = []

        def work():
            time.sleep(0.6)

        def make_once():
            times.append(time.monotonic())
            if len(times) > 1:
                raise OSError("no memory for it")
            return Process(work)

        supervisor = Supervisor()
        policy = RestartPolicy(3, backoff=0.1, steady=0.5, restart_on_success=True)
        supervisor.add("w", "env", make_once, policy)
        with pytest.raises(RunFailed, match="no memory for it"), supervisor:
            supervisor.run()
        pauses = [b - a for a, b in itertools.pairwise(times)][1:]
        assert pauses[0] >= 0.2 and pauses[1] >= 0.4

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
        assert thread.error is None
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
