"""Processes: what reaches the child, and what it reports back.

Functions for child processes are nested in their tests, so that they travel by value
and the children do not import this module.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import resource
import signal
import sys
import threading
import types

import psutil
import pytest
from process_testing import fail_with, wait_forever
from waiting_testing import WAIT, wait_until

from embodied.workers import Process, Thread, WorkerError


class TestResults:
    def test_a_call_that_returns_ends_well(self, line):
        def work(fd, text, number):
            import os

            os.write(fd, f"{text} {number + 1}\n".encode())

        process = Process(work, line.fd, "hello", 2, fds=[line.fd])
        assert (process.started, process.running, process.pid) == (False, False, None)
        process.start()
        assert process.pid != os.getpid()
        assert line.receive() == "hello 3"
        assert process.join(WAIT)
        assert (process.running, process.exitcode, process.error) == (False, 0, None)

    def test_the_name_is_that_of_the_function_unless_given(self):
        def work():
            pass

        assert Process(work).name == "work"
        assert Process(functools.partial(functools.partial(work))).name == "work"
        assert Process(work, name="env-3").name == "env-3"
        assert Thread(work).name == "work"

    def test_a_large_closure_arrives(self, line):
        data = os.urandom(30 * 2**20)
        digest = hashlib.sha256(data).hexdigest()

        def work(fd):
            import hashlib
            import os

            os.write(fd, f"{hashlib.sha256(data).hexdigest()}\n".encode())

        with Process(work, line.fd, fds=[line.fd]):
            assert line.receive() == digest

    def test_a_large_closure_to_a_child_that_dies_is_no_deadlock(self):
        data = bytes(30 * 2**20)
        process = Process(lambda: len(data), name="big", start=True)
        os.kill(process.pid, signal.SIGKILL)
        assert process.join(WAIT)
        assert process.exitcode == -signal.SIGKILL

    def test_a_socket_is_inherited_under_its_number(self, line):
        def work(fd):
            import socket

            with socket.socket(fileno=fd) as connection:
                connection.sendall(connection.recv(100).upper())

        with Process(work, line.fd, fds=[line.fd]):
            line.send("ping")
            assert line.receive() == "PING"

    def test_a_child_holds_no_descriptors_but_its_own(self, line):
        def work(fd):
            import os

            names = [int(name) for name in os.listdir("/proc/self/fd")]
            held = {name for name in names if os.path.exists(f"/proc/self/fd/{name}")}
            extra = held - {0, 1, 2}
            passed_on = [name for name in extra if os.get_inheritable(name)]
            os.write(fd, f"{len(extra - {fd})} {passed_on}\n".encode())

        with Process(wait_forever()), Process(wait_forever()):
            with Process(work, line.fd, fds=[line.fd]):
                # Only its end of the pipe and its report, nothing of its siblings; and
                # no descriptor is inherited by programs that the child starts.
                assert line.receive() == "2 []"

    def test_environment_variables_are_added(self, line, monkeypatch):
        monkeypatch.setenv("WORKERS_KEPT", "a")
        monkeypatch.setenv("WORKERS_CHANGED", "b")

        def work(fd):
            import os

            values = [os.environ[f"WORKERS_{key}"] for key in ("KEPT", "CHANGED")]
            os.write(fd, f"{values}\n".encode())

        env = {"WORKERS_CHANGED": "c"}
        with Process(work, line.fd, fds=[line.fd], env=env):
            assert line.receive() == "['a', 'c']"

    def test_a_child_imports_only_what_its_function_needs(self, line):
        def work(fd):
            import os
            import sys

            names = {"embodied", "numpy", "jax", "zmq"} & set(sys.modules)
            os.write(fd, f"{sorted(names)}\n".encode())

        with Process(work, line.fd, fds=[line.fd]):
            assert line.receive() == "[]"

    def test_waiting_costs_no_cpu_time(self):
        with Process(wait_forever(), start=True) as process:
            start = psutil.Process(process.pid)
            wait_until(lambda: start.num_threads() == 2)
            wait_until(lambda: start.status() == psutil.STATUS_SLEEPING)
            before = resource.getrusage(resource.RUSAGE_SELF)
            child_before = start.cpu_times()
            assert not process.join(0.5)
            after = resource.getrusage(resource.RUSAGE_SELF)
            child_after = start.cpu_times()
        assert after.ru_utime - before.ru_utime < 0.05
        assert after.ru_nvcsw - before.ru_nvcsw < 50
        assert sum(child_after[:2]) - sum(child_before[:2]) < 0.05


class TestErrors:
    def test_an_exception_travels_with_its_traceback(self):
        def fail(task):
            raise LookupError(f"no task named {task}")  # The failing line.

        process = Process(fail, "dream", name="env-3", start=True)
        assert process.join(WAIT)
        assert process.exitcode == 1
        error = process.error
        assert error.name == "env-3"
        assert error.reason == "failed with LookupError: no task named dream"
        assert "raise LookupError(f" in error.traceback
        assert "# The failing line." in error.traceback
        assert "child.py" not in error.traceback
        assert str(error).startswith(f"Worker 'env-3' {error.reason}\n")
        assert "# The failing line." in str(error)
        with pytest.raises(WorkerError, match="env-3"):
            raise process.error

    def test_an_error_survives_pickling(self):
        error = WorkerError("env-3", "was lost.", "Traceback")
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.name, copy.reason, str(copy)) == ("env-3", "was lost.", str(error))

    def test_an_error_of_a_nested_worker_names_both(self):
        def inner():
            raise ValueError("deep")

        def outer():
            from embodied.workers import Process

            with Process(inner, name="inner") as process:
                process.join()
            raise process.error

        process = Process(outer, name="outer", start=True)
        assert process.join(WAIT)
        text = str(process.error)
        assert "Worker 'outer' failed with embodied.workers.thread.WorkerError" in text
        assert "Worker 'inner' failed with ValueError: deep" in text

    def test_an_exception_while_unpickling_is_reported(self):
        class Unloadable:
            def __reduce__(self):
                return int, ("not a number",)

        process = Process(print, Unloadable(), name="loader", start=True)
        assert process.join(WAIT)
        assert "failed with ValueError: invalid literal for int()" in str(process.error)

    def test_a_module_that_is_missing_in_the_child_is_reported(self, monkeypatch):
        module = types.ModuleType("vanishing")
        exec("def work(): pass", module.__dict__)
        monkeypatch.setitem(sys.modules, "vanishing", module)
        process = Process(module.work, start=True)
        assert process.join(WAIT)
        assert "ModuleNotFoundError: No module named 'vanishing'" in str(process.error)

    def test_what_cannot_be_pickled_raises_at_start(self):
        process = Process(print, threading.Lock())
        with pytest.raises(TypeError, match="pickle"):
            process.start()
        assert not process.started

    def test_a_long_message_is_no_deadlock(self):
        process = Process(fail_with(ValueError("x" * 2**20)), start=True)
        assert process.join(WAIT)
        assert len(process.error.reason) > 2**20

    def test_a_message_that_fails_itself_is_reported(self):
        class BrokenError(Exception):
            def __str__(self):
                raise RuntimeError

        process = Process(fail_with(BrokenError()), start=True)
        assert process.join(WAIT)
        assert "<its message raised RuntimeError>" in process.error.reason

    def test_a_traceback_is_printed_by_the_parent_alone(self, capfd):
        process = Process(fail_with(ValueError("quiet")), start=True)
        assert process.join(WAIT)
        assert "quiet" not in "".join(capfd.readouterr())

    @pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGUSR1", "SIGRTMIN"])
    def test_a_signal_is_named(self, name, line):
        def work(fd):
            import os
            import threading

            os.write(fd, b"ready\n")
            threading.Event().wait()

        number = getattr(signal, name)
        process = Process(work, line.fd, fds=[line.fd], name="env-3", start=True)
        assert line.receive() == "ready"
        os.kill(process.pid, number)
        assert process.join(WAIT)
        assert process.exitcode == -number
        assert str(process.error).startswith(f"Worker 'env-3' was killed by {name}")
        assert ("out of memory" in str(process.error)) == (name == "SIGKILL")

    @pytest.mark.parametrize(
        ("argument", "code"), [(None, 0), (0, 0), (3, 3), ("some text", 1)]
    )
    def test_exit_codes(self, argument, code):
        def leave():
            import sys

            sys.exit(argument)

        process = Process(leave, start=True)
        assert process.join(WAIT)
        assert process.exitcode == code
        if code:
            assert f"exit code {code}" in str(process.error)
        else:
            assert process.error is None

    def test_a_crash_is_one_where_ends_of_children_were_ignored(self):
        def crash():
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)

        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            process = Process(crash, start=True)
            process.join(WAIT)
        finally:
            signal.signal(signal.SIGCHLD, before)
        assert process.exitcode == -signal.SIGKILL
        assert process.error is not None

    def test_a_thread_that_goes_on_does_not_keep_a_failed_process(self):
        def fail():
            import threading

            import __main__

            __main__.LEAVE_SECONDS = 0.2
            threading.Thread(target=threading.Event().wait).start()
            raise ValueError("first")

        process = Process(fail, start=True)
        assert process.join(WAIT)
        assert "ValueError: first" in str(process.error)

    def test_it_starts_once_and_is_joined_after_that(self):
        process = Process(wait_forever(), name="env-3")
        with pytest.raises(AssertionError, match="'env-3' must be started"):
            process.join()
        assert process.kill()
        with process:
            with pytest.raises(AssertionError, match="'env-3' was started before"):
                process.start()
