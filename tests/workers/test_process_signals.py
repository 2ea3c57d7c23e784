"""Processes: how they are stopped, and what they leave behind.

Functions for child processes are nested in their tests, so that they travel by value
and the children do not import this module.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
from process_testing import fail_while_stopping, is_gone, wait_forever
from waiting_testing import WAIT, wait_until

from embodied.workers import Process, stop


class TestStopping:
    def test_sigterm_runs_finally_blocks(self, line):
        def work(fd):
            import os
            import threading

            try:
                os.write(fd, b"ready\n")
                threading.Event().wait()
            finally:
                os.write(fd, b"cleaned\n")

        process = Process(work, line.fd, fds=[line.fd], start=True)
        assert line.receive() == "ready"
        assert process.kill(timeout=WAIT)
        assert line.receive() == "cleaned"
        assert (process.exitcode, process.error) == (-signal.SIGTERM, None)

    def test_terminate_does_not_wait_for_the_end(self, line):
        def work(fd):
            import os
            import threading

            try:
                os.write(fd, b"ready\n")
                threading.Event().wait()
            finally:
                os.read(fd, 1)

        with Process(work, line.fd, fds=[line.fd]) as process:
            assert line.receive() == "ready"
            process.terminate()
            assert process.running
            line.send("go")
            assert process.join(WAIT)
            assert (process.exitcode, process.error) == (-signal.SIGTERM, None)
            process.terminate()  # Sends no signal: the pid may be reused by now.

    @pytest.mark.parametrize("moment", ["finaliser", "callback"])
    def test_sigterm_is_not_lost_where_exceptions_are(self, line, capfd, moment):
        def work(fd, moment):
            import os
            import threading
            import weakref

            def be_interrupted(*_):
                os.write(fd, b"ready\n")
                threading.Event().wait()

            class Finalised:
                if moment == "finaliser":
                    __del__ = be_interrupted

            thing = Finalised()
            reference = weakref.ref(
                thing, be_interrupted if moment == "callback" else None
            )
            try:
                del thing
                assert reference() is None
                threading.Event().wait()
            finally:
                os.write(fd, b"cleaned\n")

        process = Process(work, line.fd, moment, fds=[line.fd], start=True)
        assert line.receive() == "ready"
        assert process.kill(timeout=WAIT)
        assert line.receive() == "cleaned"
        assert (process.exitcode, process.error) == (-signal.SIGTERM, None)
        assert capfd.readouterr().err == ""

    def test_sigterm_that_is_lost_at_the_end_does_not_disturb_it(self, line, capfd):
        def work(fd):
            import atexit
            import os
            import threading
            import time

            class Finalised:
                def __del__(self):
                    os.write(fd, b"ready\n")
                    threading.Event().wait()

            atexit.register(time.sleep, 0.2)
            Finalised()

        process = Process(work, line.fd, fds=[line.fd], start=True)
        assert line.receive() == "ready"
        process.terminate()
        assert process.join(WAIT)
        assert process.exitcode in (0, -signal.SIGTERM) and process.error is None
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("error", ["OSError", "SystemExit"])
    def test_other_exceptions_in_finalisers_are_shown(self, capfd, error):
        def work(error):
            import builtins

            class Finalised:
                def __del__(self):
                    raise getattr(builtins, error)("no such thing")

            Finalised()

        with Process(work, error) as process:
            assert process.join(WAIT)
        assert process.exitcode == 0
        assert f"{error}: no such thing" in capfd.readouterr().err

    def test_a_second_sigterm_does_not_interrupt_the_cleanup(self, line):
        def work(fd):
            import os
            import threading

            try:
                os.write(fd, b"ready\n")
                threading.Event().wait()
            finally:
                os.write(fd, b"cleaning\n")
                os.read(fd, 1)
                os.write(fd, b"cleaned\n")

        with Process(work, line.fd, fds=[line.fd]) as process:
            assert line.receive() == "ready"
            os.kill(process.pid, signal.SIGTERM)
            assert line.receive() == "cleaning"
            os.kill(process.pid, signal.SIGTERM)
            line.send("go")
            assert line.receive() == "cleaned"
            assert process.join(WAIT)

    def test_a_shielded_one_is_stopped_by_its_parent_alone(self, line):
        def work(fd):
            import os
            import signal
            import subprocess
            import sys

            # Programs that it starts can be terminated by anyone.
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            program = subprocess.Popen(command)
            program.terminate()
            assert program.wait() == -signal.SIGTERM
            try:
                os.write(fd, b"ready\n")
                os.read(fd, 1)
                os.write(fd, b"still there\n")
                os.read(fd, 1)
            finally:
                os.write(fd, b"cleaned\n")

        process = Process(work, line.fd, fds=[line.fd], shielded=True, start=True)
        assert line.receive() == "ready"
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
        line.send("")
        assert line.receive() == "still there"
        assert process.kill(timeout=WAIT)
        assert line.receive() == "cleaned"
        assert (process.exitcode, process.error) == (-signal.SIGTERM, None)

    @pytest.mark.parametrize("shielded", [False, True])
    def test_it_can_be_stopped_before_it_handles_signals(self, shielded):
        process = Process(wait_forever(), shielded=shielded, start=True)
        assert process.pid is not None
        os.kill(process.pid, process._stop_signal)  # As the launcher tells the agent.
        assert process.join(WAIT)
        assert process.exitcode == -signal.SIGTERM
        assert process.error is not None and "SIGTERM" in str(process.error)

    def test_an_own_handler_for_sigterm_is_respected(self, line):
        def work(fd):
            import os
            import signal
            import threading

            stop = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
            os.write(fd, b"ready\n")
            stop.wait()

        process = Process(work, line.fd, fds=[line.fd], start=True)
        assert line.receive() == "ready"
        assert process.kill(timeout=WAIT)
        assert (process.exitcode, process.error) == (0, None)

    def test_an_exception_in_the_cleanup_is_an_error(self, line):
        process = Process(fail_while_stopping(), line.fd, fds=[line.fd], start=True)
        assert line.receive() == "ready"
        assert process.kill(timeout=WAIT)
        assert "failed with OSError: disk full" in str(process.error)

    def test_sigterm_after_the_call_ends_what_is_left_quietly(self, line, capfd):
        def work(fd):
            import os
            import threading

            def go_on():
                threading.main_thread().join()
                os.write(fd, b"returned\n")
                threading.Event().wait()

            threading.Thread(target=go_on).start()

        process = Process(work, line.fd, fds=[line.fd], start=True)
        assert line.receive() == "returned"
        assert process.kill(timeout=WAIT)
        assert (process.exitcode, process.error) == (-signal.SIGTERM, None)
        assert capfd.readouterr().err == ""

    def test_sigkill_after_the_deadline_ends_the_whole_group(self, line):
        def work(fd):
            import os
            import signal
            import subprocess
            import threading

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sleeper = subprocess.Popen(["sleep", "600"])
            os.write(fd, f"{sleeper.pid}\n".encode())
            threading.Event().wait()

        process = Process(work, line.fd, fds=[line.fd], start=True)
        sleeper = int(line.receive())
        start = time.monotonic()
        assert process.kill(timeout=0.3)
        assert time.monotonic() - start >= 0.3
        assert (process.exitcode, process.error) == (-signal.SIGKILL, None)
        wait_until(lambda: is_gone(sleeper))

    def test_several_share_one_deadline(self, line):
        def work(fd):
            import os
            import signal
            import threading

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(fd, b"ready\n")
            threading.Event().wait()

        count = 6  # One after another would take as many seconds.
        processes = [Process(work, line.fd, fds=[line.fd]) for _ in range(count)]
        for process in processes:
            process.start()
            assert line.receive() == "ready"
        start = time.monotonic()
        stop(processes, timeout=1.0)
        assert 1.0 <= time.monotonic() - start < count
        assert {process.exitcode for process in processes} == {-signal.SIGKILL}

    def test_a_process_can_be_stopped_while_it_starts(self):
        for _ in range(5):
            process = Process(wait_forever(), start=True)
            assert process.kill(timeout=WAIT)
            assert (process.exitcode, process.error) == (-signal.SIGTERM, None)

    def test_leaving_the_block_stops_the_process(self):
        with Process(wait_forever()) as process:
            assert process.running
        assert not process.running
        assert process.error is None

    def test_sigint_does_not_end_a_child(self, line):
        def work(fd):
            import os

            os.write(fd, b"ready\n")
            os.read(fd, 1)
            os.write(fd, b"alive\n")

        with Process(work, line.fd, fds=[line.fd]) as process:
            assert line.receive() == "ready"
            os.killpg(process.pid, signal.SIGINT)
            line.send("go")
            assert line.receive() == "alive"
            assert process.join(WAIT)
            assert process.error is None


class TestLeftovers:
    def test_no_descriptor_is_left_and_no_zombie(self):
        def count():
            return len(os.listdir("/proc/self/fd"))

        def fail():
            raise ValueError

        before = count()
        processes = [Process(fail if i % 3 else print) for i in range(30)]
        for process in processes:
            process.start()
        for process in processes:
            assert process.join(WAIT)
        assert count() == before
        assert not any(psutil.pid_exists(process.pid) for process in processes)
        wait_until(
            lambda: not any(t.name == "watch fail" for t in threading.enumerate())
        )

    def test_a_failed_start_leaves_no_descriptor(self):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(Exception, match=r"fds|Bad file descriptor|preexec"):
            Process(print, fds=[10_000]).start()
        assert len(os.listdir("/proc/self/fd")) == before

    @pytest.mark.parametrize("ending", ["SIGKILL", "return"])
    def test_a_child_takes_its_own_children_along(self, line, ending):
        def work(fd):
            import os
            import subprocess

            sleeper = subprocess.Popen(["sleep", "600"])
            sleeper.returncode = 0  # No warning about a process left behind.
            os.write(fd, f"{sleeper.pid}\n".encode())
            os.read(fd, 1)

        process = Process(work, line.fd, fds=[line.fd], start=True)
        sleeper = int(line.receive())
        assert not is_gone(sleeper)
        if ending == "SIGKILL":
            os.kill(process.pid, signal.SIGKILL)
        else:
            line.send("go")
        assert process.join(WAIT)
        wait_until(lambda: is_gone(sleeper))
