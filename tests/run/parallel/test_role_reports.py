"""Reports to the logger: rates of hops, statistics, state and usage of workers."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import types

import psutil
import pytest
from role_testing import make_args
from waiting_testing import WAIT, wait_until

from embodied import rpc
from embodied.run import live
from embodied.run.parallel import reports
from embodied.run.parallel.reports import (
    HopRates,
    RoleStates,
    WorkerUsage,
    metrics_clock,
    report_role,
    report_workers,
    tell_logger,
)


class End:
    """A client or server with these totals."""

    def __init__(self, **totals):
        self.counts = dict.fromkeys(("calls", "sent_bytes", "received_bytes"), 0)
        self.counts |= totals

    def totals(self):
        return {**self.counts, "latency_p50": 0.25}


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(live.Rate.__init__, "__defaults__", (5.0, lambda: now[0]))
    return now


def test_rates_are_of_the_last_seconds(clock):
    end, updates = End(inflight=2), [0]
    rates = HopRates({"client/x": end}, {"train": lambda: updates[0]})
    rates.result()
    clock[0], updates[0] = 2.0, 10
    end.counts |= {"calls": 4, "sent_bytes": 1000}
    told = rates.result()
    assert told["rates"] == {"train": 5.0}
    assert told["hops"]["client/x"] == {
        "calls": 2.0,
        "sent_bytes": 500.0,
        "received_bytes": 0.0,
        "latency": 0.25,
        "queue": 2,
    }


@pytest.fixture
def logger():
    """A logger role's server, which answers once `answers` is set."""
    server = rpc.Server(f"localhost:{rpc.free_port()}", "logger")
    server.told, server.answers = [], threading.Event()
    server.first = threading.Event()
    server.added, server.measured = [], threading.Event()

    def tell_hops(text):
        server.told.append(json.loads(text))
        server.first.set()
        assert server.answers.wait(WAIT)

    def add(metrics):
        server.added.append(metrics)
        server.measured.set()

    server.bind("tell_hops", tell_hops, workers=1)
    server.bind("tell_roles", lambda text: None, workers=1)
    server.bind("add", add, workers=1)
    with server:
        yield server
        server.answers.set()


def test_a_logger_that_does_not_answer_is_told_nothing_more(logger, monkeypatch):
    monkeypatch.setattr(reports, "LIVE_SECONDS", 0.01)
    settings = make_args(logger_addr=logger.addr)
    calls = []

    def tell(client):
        calls.append(client.tell_hops(json.dumps({"number": len(calls)})))
        return calls[-1:]

    with tell_logger(settings, "test", tell):
        assert logger.first.wait(WAIT)
        wait_until(lambda: calls)  # The logger may have the call before `calls` has it.
        assert not calls[0].wait(0.3)  # Thirty times LIVE_SECONDS.
        assert len(calls) == 1
        logger.answers.set()
        assert calls[0].result(WAIT) is None
        while len(logger.told) < 3:
            calls[-1].wait(WAIT)


def test_hops_are_reported_until_the_end(logger, monkeypatch):
    monkeypatch.setattr(reports, "LIVE_SECONDS", 0.01)
    logger.answers.set()
    settings = make_args(logger_addr=logger.addr)
    with report_role(settings, "actor", {"client/x": End()}, {}):
        assert logger.first.wait(WAIT)
    assert logger.told[0]["role"] == "actor"
    assert set(logger.told[0]["hops"]) == {"client/x"}
    assert not [x for x in threading.enumerate() if x.name == "actor-live"]


def test_a_logger_that_is_not_there_keeps_nobody():
    settings = make_args(logger_addr=f"localhost:{rpc.free_port()}")
    with report_role(settings, "actor", {"client/x": End()}, {}):
        pass
    with report_role(make_args(), "actor", {}, {}):  # The port is not known.
        pass


@pytest.mark.parametrize(
    ("log_every", "seconds"), [(0, 0), (-1, 1.0), (0.2, 1.0), (120, 120)]
)
def test_statistics_are_sent_at_most_once_a_second(monkeypatch, log_every, seconds):
    monkeypatch.setattr(reports, "LocalClock", lambda every: every)
    assert metrics_clock(make_args(log_every=log_every)) == seconds


@pytest.mark.parametrize("log_every", [0.0, 120.0])
def test_statistics_are_sent_when_they_are_due(logger, monkeypatch, log_every):
    monkeypatch.setattr(reports, "LIVE_SECONDS", 0.01)
    monkeypatch.setattr(reports, "LocalClock", lambda every: lambda: bool(every))
    logger.answers.set()
    settings = make_args(logger_addr=logger.addr, log_every=log_every)
    with report_role(settings, "actor", {}, {}, lambda: {"queue": 3}):
        if log_every:
            assert logger.measured.wait(WAIT)
        else:
            wait_until(lambda: len(logger.told) > 3)
    assert (logger.added[:1] == [{"queue": 3}]) == bool(log_every)


def test_what_the_logger_does_not_take_is_a_warning(logger, monkeypatch, caplog):
    monkeypatch.setattr(reports, "LIVE_SECONDS", 0.01)
    settings = make_args(logger_addr=logger.addr)
    calls = []

    def tell(client):
        calls.append(client.unknown())
        return calls[-1:]

    with tell_logger(settings, "test", tell):
        wait_until(lambda: len(calls) > 2)
    assert "The logger took no report: " in caplog.text


def test_the_usage_of_env_workers_is_sent_as_metrics(logger, monkeypatch):
    monkeypatch.setattr(reports, "LIVE_SECONDS", 0.01)
    monkeypatch.setattr(reports, "LocalClock", lambda every: lambda: bool(every))
    worker = {"state": "running", "waiting": False, "restarts": 1}
    workers = [
        types.SimpleNamespace(name="logger", role="logger", pid=os.getpid(), **worker),
        types.SimpleNamespace(name="env-0", role="env", pid=os.getpid(), **worker),
        types.SimpleNamespace(name="env-1", role="env", pid=None, **worker),
    ]
    supervisor = types.SimpleNamespace(status=lambda: workers)
    settings = make_args(logger_addr=logger.addr, log_every=5.0)
    settings = dataclasses.replace(settings, usage={**settings.usage, "psutil": True})
    with report_workers(supervisor, settings):
        assert logger.measured.wait(WAIT)
    metrics = logger.added[0]
    assert (metrics["usage/env/workers"], metrics["usage/env/restarts"]) == (1, 2)
    assert metrics["usage/env/psutil/proc_ram_gb"] > 0
    assert "usage/env/psutil/proc_cpu_usage" in metrics


def env_workers(*pids):
    """Returns the status of env workers with these processes."""
    return [types.SimpleNamespace(role="env", pid=x, restarts=1) for x in pids]


@pytest.fixture
def other():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        yield process.pid
        process.kill()


def test_the_usage_of_a_role_is_that_of_its_workers_together(other):
    alone = WorkerUsage().result(env_workers(os.getpid()))
    both = WorkerUsage().result(env_workers(os.getpid(), other))
    assert alone["env"]["memory_gb"] < both["env"]["memory_gb"]


def test_workers_that_are_not_started_or_gone_use_nothing(other):
    workers = env_workers(None, other)
    usage = WorkerUsage()
    assert usage.result(workers)["env"]["memory_gb"] > 0
    psutil.Process(other).kill()
    psutil.Process(other).wait()
    assert usage.result(workers)["env"]["memory_gb"] == 0


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_worker_that_ends_meanwhile_fails_nothing(monkeypatch, error):
    workers, usage = env_workers(os.getpid()), WorkerUsage()
    usage.result(workers)

    def fail(self, interval=None):
        raise error

    monkeypatch.setattr(psutil.Process, "cpu_percent", fail)
    assert usage.result(workers) == {"env": {"cpu": 0.0, "memory_gb": 0.0}}


def test_states_of_roles_name_workers_that_are_away():
    def worker(name, role, state, pid=None):
        return types.SimpleNamespace(
            name=name, role=role, state=state, pid=pid, restarts=1, waiting=False
        )

    workers = [
        worker("agent", "agent", "running"),
        worker("env-0", "env", "running", os.getpid()),
        worker("env-1", "env", "backing off"),
    ]
    supervisor = types.SimpleNamespace(status=lambda: workers)
    roles = RoleStates(supervisor).result()
    env = roles["env"]
    assert (env["workers"], env["running"], env["restarts"]) == (2, 1, 2)
    assert env["away"] == ["env-1: backing off"] and env["memory_gb"] > 0
    assert "memory_gb" not in roles["agent"]  # A thread has no process to measure.
