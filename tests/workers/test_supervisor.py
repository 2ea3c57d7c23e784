"""Supervised workers: policy, progress and end. Real processes.

Functions for child processes are nested in functions of this module, so that they
travel by value and the children do not import it.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import signal
import threading
import time
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_testing import fail_while_stopping, is_gone, wait_forever
from supervisor_testing import (
    QUICK,
    launch,
    make,
    read_pid,
    running,
    set_after,
    status_of,
)
from waiting_testing import WAIT, wait_until

from embodied.workers import (
    Process,
    Progress,
    RestartPolicy,
    Supervisor,
    Thread,
)


class TestPolicy:
    @given(st.floats(0.001, 100), st.floats(0.001, 100), st.integers(1, 10**6))
    def test_the_delay_doubles_up_to_its_limit(self, backoff, limit, count):
        policy = RestartPolicy(restarts=3, backoff=backoff, backoff_limit=limit)
        assert policy.delay(1) == min(backoff, limit)
        assert policy.delay(count + 1) == min(2 * policy.delay(count), limit)


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
        assert process.error.kind in ("AssertionError", "OSError")

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
            wait_until(lambda: status_of(supervisor, "short").state == "ended")
            assert status_of(supervisor, "long").state == "running"
            assert status_of(supervisor, "short").restarts == 0
        assert status_of(supervisor, "long").state == "ended"

    def test_the_first_success_can_end_the_run(self):
        supervisor = Supervisor(grace=0.2, first_ends=True)
        supervisor.add("short", "env", make(print), QUICK)
        supervisor.add("long", "env", make(wait_forever()), QUICK)
        supervisor.run()
        assert [status.state for status in supervisor.status()] == ["ended", "ended"]

    def test_after_the_first_success_others_have_time_to_end(self, line):
        def work(fd):
            import os

            os.write(fd, b"ready\n")
            os.read(fd, 1)  # SIGTERM would interrupt it.
            os.write(fd, b"done\n")

        supervisor = Supervisor(grace=WAIT, first_ends=True)
        supervisor.add("slow", "env", make(work, line.fd, fds=[line.fd]), QUICK)
        supervisor.add("quick", "env", make(print), QUICK)
        with running(supervisor) as thread:
            assert line.receive() == "ready"
            wait_until(lambda: status_of(supervisor, "quick").state == "ended")
            line.send("")
            assert line.receive() == "done"
            assert thread.join(WAIT)

    def test_success_is_restarted_if_the_policy_says_so(self):
        restarts = queue.SimpleQueue()
        policy = RestartPolicy(restarts=0, backoff=0.01, restart_on_success=True)
        supervisor = Supervisor(on_restart=lambda *args: restarts.put(args))
        supervisor.add("again", "env", make(print), policy)
        with running(supervisor):
            for _ in range(3):
                assert restarts.get(timeout=WAIT) == ("again", None)

    def test_until_ends_the_run_and_is_set_by_its_end(self):
        supervisor = Supervisor()
        supervisor.add("env-0", "env", make(wait_forever()), QUICK)
        supervisor.run(set_after(0.2))
        assert status_of(supervisor, "env-0").state == "ended"
        until = threading.Event()
        supervisor = Supervisor(first_ends=True)
        supervisor.add("agent", "agent", lambda: Thread(until.wait), QUICK)
        supervisor.add("env-0", "env", make(print), QUICK)
        supervisor.run(until)
        assert until.is_set()
        assert status_of(supervisor, "agent").state == "ended"
        wait_until(lambda: not any("until" in t.name for t in threading.enumerate()))

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
        with running(supervisor):
            wait_until(lambda: all(status.pid for status in supervisor.status()))
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
        count = 6  # One after another would take as many seconds.
        for index in range(count):
            supervisor.add(str(index), "env", make(work, line.fd, fds=[line.fd]), QUICK)
        with running(supervisor):
            pids = [int(line.receive()) for _ in range(count)]
            start = time.monotonic()
        assert 1.0 <= time.monotonic() - start < count
        assert all(is_gone(pid) for pid in pids)

    def test_a_thread_that_does_not_return_is_left_behind(self):
        release = threading.Event()
        supervisor = Supervisor(grace=0.1)
        supervisor.add("agent", "agent", lambda: Thread(release.wait), QUICK)
        supervisor.run(set_after(0.1))
        assert status_of(supervisor, "agent").state == "running"
        release.set()

    def test_an_error_while_stopping_is_no_failure_of_the_run(self, line):
        supervisor = Supervisor(grace=WAIT)
        supervisor.add(
            "replay",
            "replay",
            make(fail_while_stopping(), line.fd, fds=[line.fd]),
            QUICK,
        )
        with running(supervisor):
            line.receive()

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

    def test_a_first_start_that_fails_stops_what_was_started(self):
        with Supervisor() as supervisor:
            supervisor.add("good", "env", make(wait_forever()), QUICK)
            supervisor.add("bad", "env", make(print, threading.Lock()), QUICK)
            with pytest.raises(TypeError, match="pickle"):
                supervisor.run()
            assert status_of(supervisor, "good").state == "ended"
