"""Threads, callbacks at the end of a worker, and running several together.

Functions for child processes are nested in their tests, so that they travel by value
and the children do not import this module.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time

import pytest
from process_testing import WAIT, fail_with, wait_forever

from embodied.workers import Process, Thread, WorkerError, run


class TestOnExit:
    def test_it_is_called_once_with_the_worker(self):
        calls = queue.SimpleQueue()
        process = Process(print)
        process.on_exit(calls.put)
        process.start()
        process.on_exit(calls.put)
        assert [calls.get(timeout=WAIT) for _ in range(2)] == [process, process]
        assert process.join(WAIT)
        process.on_exit(calls.put)
        assert calls.get_nowait() is process
        assert process.kill()
        assert calls.empty()

    def test_the_worker_is_over_when_it_is_called(self):
        calls = queue.SimpleQueue()
        process = Process(fail_with(ValueError("why")))
        process.on_exit(lambda p: calls.put((p.running, p.exitcode, p.join(), p.error)))
        process.start()
        running, code, joined, error = calls.get(timeout=WAIT)
        assert (running, code, joined) == (False, 1, True)
        assert "why" in str(error)

    def test_a_callback_that_fails_does_not_keep_the_others(self, monkeypatch):
        failures = queue.SimpleQueue()
        monkeypatch.setattr(threading, "excepthook", failures.put)
        calls = queue.SimpleQueue()
        thread = Thread(print)
        thread.on_exit(lambda _: 1 / 0)
        thread.on_exit(calls.put)
        thread.start()
        assert calls.get(timeout=WAIT) is thread
        assert failures.get(timeout=WAIT).exc_type is ZeroDivisionError


class TestThread:
    def test_it_keeps_its_error(self):
        cause = ValueError("broken")
        thread = Thread(fail_with(cause), name="actor", start=True)
        assert thread.join(WAIT)
        assert not thread.running
        with pytest.raises(WorkerError, match="'actor' failed with ValueError") as info:
            thread.check()
        assert info.value.__cause__ is cause
        assert "raise error" in info.value.traceback

    def test_it_ends_well(self):
        results = queue.SimpleQueue()
        stop = threading.Event()
        with Thread(lambda *args: stop.wait() and results.put(args), 1, 2) as thread:
            assert thread.running
            assert not thread.join(0.01)
            stop.set()
        assert results.get_nowait() == (1, 2)
        assert (thread.running, thread.error) == (False, None)

    @pytest.mark.parametrize(("code", "good"), [(None, True), (0, True), (3, False)])
    def test_exit_codes(self, code, good):
        thread = Thread(fail_with(SystemExit(code)), start=True)
        assert thread.join(WAIT)
        assert (thread.error is None) == good


class TestRun:
    def test_it_starts_all_and_returns_when_all_have_ended(self, line):
        def work(fd):

            os.write(fd, b"done\n")

        processes = [Process(work, line.fd, fds=[line.fd]) for _ in range(3)]
        processes[1].start()
        threads = [Thread(print), Thread(print, start=True)]
        run([*processes, *threads])
        assert [line.receive() for _ in range(3)] == ["done"] * 3
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert not any(thread.running for thread in threads)

    def test_a_failure_stops_the_others_and_is_raised(self, line):
        def work(fd):
            import threading

            try:
                os.write(fd, b"ready\n")
                threading.Event().wait()
            finally:
                os.write(fd, b"cleaned\n")

        def fail(fd):

            os.read(fd, 1)
            raise ValueError("out of cheese")

        other = Process(work, line.fd, fds=[line.fd], start=True)
        assert line.receive() == "ready"
        line.send("go")
        with pytest.raises(WorkerError, match=r"'env-3' failed.*out of cheese"):
            run(
                [other, Process(fail, line.fd, fds=[line.fd], name="env-3")], grace=WAIT
            )
        assert line.receive() == "cleaned"
        assert (other.exitcode, other.error) == (-signal.SIGTERM, None)

    def test_a_failed_thread_stops_the_processes(self):
        process = Process(wait_forever())
        with pytest.raises(WorkerError, match="'learner' failed with OSError"):
            run([process, Thread(fail_with(OSError("gone")), name="learner")])
        assert not process.running

    def test_a_failure_from_before_is_raised(self):
        failed = Process(fail_with(ValueError("early")), start=True)
        assert failed.join(WAIT)
        with pytest.raises(WorkerError, match="early"):
            run([Process(wait_forever()), failed])

    def test_a_start_that_fails_stops_what_was_started(self):
        process = Process(wait_forever())
        with pytest.raises(TypeError, match="pickle"):
            run([process, Process(print, threading.Lock())])
        assert process.started
        assert not process.running

    def test_after_the_duration_everything_stops(self):
        processes = [Process(wait_forever()) for _ in range(2)]
        start = time.monotonic()
        run(processes, duration=0.5)
        assert time.monotonic() - start >= 0.5
        assert [process.exitcode for process in processes] == [-signal.SIGTERM] * 2
