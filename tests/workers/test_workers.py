"""Threads, and callbacks at the end of a worker.

Functions for child processes are nested in their tests, so that they travel by value
and the children do not import this module.
"""

from __future__ import annotations

import queue
import threading

import pytest
from process_testing import fail_with
from waiting_testing import WAIT

from embodied.workers import Process, Thread, WorkerError


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
            raise thread.error
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
