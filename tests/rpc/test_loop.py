"""The loop thread runs quick batches itself; its deputy takes over if one is slow."""

from __future__ import annotations

import threading
import time

import numpy as np
import psutil
import pytest
from waiting_testing import WAIT, wait_until

from embodied.rpc import BatchServer, Client, Server, free_port
from embodied.rpc.batching import QUICK_RUNS
from embodied.rpc.threads import LATE, MAX_FAILURES, Loop


class Steps:
    """Counts the steps of a loop, and can make the next step run a job."""

    def __init__(self):
        self.count = 0
        self.threads = []
        self.led = []
        self._job = None
        self.loop = Loop("loop", self.step)

    def step(self):
        self.count += 1
        self.threads.append(threading.current_thread().name)
        job, self._job = self._job, None
        if job is not None:
            self.led.append(self.loop.run(lambda wait: wait(), job))
        else:
            time.sleep(1e-4)

    def run(self, job):
        self._job = job

    def wait_for_more(self, number=5):
        wanted = self.count + number
        wait_until(lambda: self.count >= wanted)
        return self.threads[-1]

    def __enter__(self):
        self.loop.start()
        return self

    def __exit__(self, *error):
        self.loop.close()
        assert self.loop.join(time.monotonic() + WAIT)


class TestLoop:
    def test_quick_jobs_change_nothing(self):
        with Steps() as steps:
            for number in range(1, 30):
                steps.run(lambda: None)
                wait_until(lambda number=number: len(steps.led) == number)
        assert steps.led.count(True) > 20  # All, on a machine that never stalls.

    def test_another_thread_goes_on_while_a_job_waits(self):
        with Steps() as steps:
            assert steps.wait_for_more() == "loop"
            first, second = threading.Event(), threading.Event()
            steps.run(lambda: first.wait(WAIT))
            wait_until(lambda: steps.threads[-1] == "loop-deputy")
            assert steps.wait_for_more() == "loop-deputy"
            first.set()
            wait_until(lambda: steps.led == [False])
            assert steps.wait_for_more() == "loop-deputy"
            steps.run(lambda: second.wait(WAIT))  # Now the deputy waits.
            wait_until(lambda: steps.threads[-1] == "loop")
            second.set()
            wait_until(lambda: steps.led == [False, False])

    def test_both_wait(self):
        """Neither thread leads while both run a job; the first to finish goes on."""
        with Steps() as steps:
            first, second = threading.Event(), threading.Event()
            steps.run(lambda: first.wait(WAIT))
            wait_until(lambda: steps.threads[-1] == "loop-deputy")
            begun = threading.Event()
            steps.run(lambda: begun.set() or second.wait(WAIT))
            assert begun.wait(WAIT)
            time.sleep(3 * LATE)
            count = steps.count
            time.sleep(3 * LATE)
            assert steps.count == count
            first.set()
            wait_until(lambda: steps.threads[-1] == "loop")
            steps.wait_for_more()
            second.set()

    def test_a_job_that_fails_leaves_no_trace(self):
        def step():
            with pytest.raises(ZeroDivisionError):
                loop.run(lambda job: 1 / job, 0)
            steps.append(loop.run(lambda job: None, 0))
            time.sleep(1e-3)

        steps = []
        loop = Loop("loop", step)
        loop.start()
        wait_until(lambda: len(steps) > 10)
        loop.close()
        assert loop.join(time.monotonic() + WAIT)
        assert any(steps)

    def test_it_says_when_a_job_outlasts_the_end(self):
        steps, release = Steps(), threading.Event()
        steps.loop.start()
        steps.run(lambda: release.wait(WAIT))
        wait_until(lambda: steps.threads[-1:] == ["loop-deputy"])
        steps.loop.close()
        assert not steps.loop.join(time.monotonic() + 0.1)
        release.set()
        assert steps.loop.join(time.monotonic() + WAIT)

    def test_it_sleeps_while_there_are_no_jobs(self):
        done = threading.Event()
        loop = Loop("loop", lambda: done.wait(WAIT))
        loop.start()
        started = sum(psutil.Process().cpu_times()[:2])
        time.sleep(1)
        assert sum(psutil.Process().cpu_times()[:2]) - started < 0.3
        loop.close()
        done.set()
        assert loop.join(time.monotonic() + WAIT)


class TestFailures:
    def test_an_error_of_a_step_is_logged_and_survived(self, caplog):
        steps = []

        def step():
            steps.append(len(steps))
            if len(steps) % 2:
                raise OSError("one of ours")
            time.sleep(1e-3)

        loop = Loop("loop", step, pytest.fail)
        loop.start()
        wait_until(lambda: len(steps) > 2 * MAX_FAILURES)
        loop.close()
        assert loop.join(time.monotonic() + WAIT)
        assert "one of ours" in caplog.text

    def test_errors_without_end_end_the_loop(self, monkeypatch, caplog):
        monkeypatch.setattr("embodied.rpc.threads.FAILURE_PAUSE", 1e-4)
        steps, failures = [], []

        def step():
            steps.append(None)
            raise OSError("again and again")

        loop = Loop("loop", step, failures.append)
        loop.start()
        assert loop.join(time.monotonic() + WAIT)
        assert len(steps) == MAX_FAILURES
        assert [str(error) for error in failures] == ["again and again"]

    @pytest.mark.parametrize("where", ["_due", "_after_receive", "_expire"])
    def test_a_server_goes_on_after_errors_outside_of_frames(self, where, monkeypatch):
        monkeypatch.setattr("embodied.rpc.server.HEARTBEAT", 0.05)
        server = Server(free_port(), "server")
        server.bind("echo", lambda x: x)
        works, failed = getattr(server, where), []

        def fail():
            if len(failed) < 5:
                failed.append(None)
                raise OSError("too many open files")
            return works()

        with server, Client(server.addr) as client:
            assert client.echo(1).result(WAIT) == 1
            monkeypatch.setattr(server, where, fail)
            wait_until(lambda: client.echo(2).result(WAIT) and len(failed) == 5)
            assert client.echo(3).result(WAIT) == 3
            with Client(server.addr, link="remote") as other:
                assert other.echo(4).result(WAIT) == 4

    def test_a_server_that_cannot_go_on_tells_its_owner(self, monkeypatch):
        monkeypatch.setattr("embodied.rpc.threads.FAILURE_PAUSE", 1e-4)
        failures = []
        server = Server(free_port(), "replay", on_failure=failures.append)
        server.bind("echo", lambda x: x)
        server.start(block=False)
        monkeypatch.setattr(server, "_due", lambda: 1 // 0)
        server._wakeup.set()
        wait_until(lambda: failures)
        assert isinstance(failures[0], ZeroDivisionError)
        with pytest.raises(RuntimeError, match=r"Server replay has failed: .*Zero"):
            server.close()

    def test_a_server_that_cannot_go_on_ends_a_blocking_start(self, monkeypatch):
        monkeypatch.setattr("embodied.rpc.threads.FAILURE_PAUSE", 1e-4)
        server = Server(free_port(), "replay")
        monkeypatch.setattr(server, "_due", lambda: 1 // 0)
        with pytest.raises(RuntimeError, match="Server replay has failed"):
            server.start(block=True)
        with pytest.raises(RuntimeError, match="Server replay has failed"):
            server.close()


class Policy:
    """Records the thread of each call, and waits while its gate is closed."""

    def __init__(self):
        self.threads = []
        self.numbers = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, obs):
        self.threads.append(threading.current_thread().name)
        self.numbers += obs["number"].tolist()
        self.gate.wait(WAIT)
        return {"number": obs["number"]}


@pytest.fixture
def served():
    policy, port = Policy(), free_port()
    server = BatchServer(port, "server")
    server.bind("act", policy, batch=1)
    server.bind("open", lambda: policy.gate.set())
    with server, Client(port) as client, Client(port) as other:
        client.connect(WAIT)
        other.connect(WAIT)
        policy.server = server
        yield policy, client, other


def act(client, number):
    return client.act({"number": np.int32(number)})


def until_quick(policy, client):
    """Calls until the loop thread runs the function itself."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        number = len(policy.numbers)
        assert act(client, number).result(WAIT)["number"] == number
        if policy.threads[-1] in LOOP:
            return number + 1
    raise AssertionError(policy.threads)


LOOP = ("server", "server-deputy")


class TestBatches:
    def test_a_quick_function_runs_where_its_calls_arrive(self, served):
        policy, client, _ = served
        until_quick(policy, client)
        assert not set(policy.threads[:QUICK_RUNS]) & set(LOOP)

    def test_a_slow_function_has_threads_of_its_own(self, served):
        policy, client, _ = served
        until_quick(policy, client)
        gate = policy.gate
        policy.gate = type("Slow", (), {"wait": lambda *_: time.sleep(2 * LATE)})()
        for number in range(2 * QUICK_RUNS):
            act(client, number).result(WAIT)
        assert not set(policy.threads[-3:]) & set(LOOP)
        policy.gate = gate
        until_quick(policy, client)  # It is quick again.

    def test_a_function_that_waits_keeps_nobody_from_being_served(self, served):
        policy, client, other = served
        inside = 0
        for _ in range(20):
            number = until_quick(policy, client)
            policy.gate.clear()
            future = act(client, number)
            wait_until(lambda number=number: policy.numbers[-1:] == [number])
            inside += policy.threads[-1] in LOOP
            other.open().result(WAIT)  # Only this lets the first call end.
            assert future.result(WAIT)["number"] == number
        assert policy.numbers == list(range(len(policy.numbers)))
        assert inside >= 5  # A stall of the machine makes some run elsewhere.

    def test_many_clients_while_the_function_waits_now_and_then(self, served):
        policy, client, other = served
        stalls = iter(range(1000))

        class Sometimes:
            def wait(self, _):
                if next(stalls) % 25 == 24:
                    time.sleep(2 * LATE)

        policy.gate = Sometimes()
        failures = []

        def ask(client, start):
            for number in range(start, start + 200):
                if act(client, number).result(WAIT)["number"] != number:
                    failures.append(number)

        threads = [
            threading.Thread(target=ask, args=(who, 1000 * index))
            for index, who in enumerate((client, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * WAIT)
        assert not failures
        wanted = [*range(200), *range(1000, 1200)]
        assert sorted(policy.numbers) == wanted  # Each was applied once.

    @pytest.mark.parametrize("quick", [False, True])
    def test_a_mistake_of_the_server_itself_costs_one_batch(
        self, served, monkeypatch, quick
    ):
        policy, client, other = served
        number = until_quick(policy, client) if quick else 0
        outbox = policy.server._outbox

        def fail(*args):
            monkeypatch.undo()
            raise OSError("one of ours")

        monkeypatch.setattr(outbox, "finish", fail)
        lost = act(client, number)
        wait_until(lambda: len(policy.numbers) == number + 1)
        assert act(other, 100).result(WAIT)["number"] == 100
        assert not lost.wait(0)

    def test_a_server_can_be_closed_while_its_loop_thread_waits(self):
        policy, port = Policy(), free_port()
        server = BatchServer(port, "server")
        server.bind("act", policy, batch=1)
        with Client(port) as client:
            server.start(block=False)
            number = until_quick(policy, client)
            policy.gate.clear()
            act(client, number)
            wait_until(lambda: policy.numbers[-1:] == [number])
            with pytest.raises(TimeoutError, match="did not return"):
                server.close(timeout=0.2)
            policy.gate.set()
