"""Resource usage of env workers, as their supervising process reports it."""

import os
import subprocess
import sys
import types

import psutil
import pytest

from embodied.run.parallel.env_usage import RoleStates, WorkerUsage


class Workers:
    """A supervisor that has these processes as its env workers."""

    def __init__(self, *pids):
        self.pids = pids

    def status(self):
        env = [types.SimpleNamespace(role="env", pid=x, restarts=1) for x in self.pids]
        return [types.SimpleNamespace(role="logger", pid=1, restarts=5), *env]


@pytest.fixture
def other():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        yield process.pid
        process.kill()


def test_it_adds_up_the_env_workers(other):
    alone = WorkerUsage(Workers(os.getpid())).result()
    both = WorkerUsage(Workers(os.getpid(), other)).result()
    assert alone["psutil/proc_ram_gb"] < both["psutil/proc_ram_gb"]
    assert both["workers"] == 2
    assert both["restarts"] == 2


def test_workers_that_are_not_started_or_gone_use_nothing(other):
    workers = Workers(None, other)
    usage = WorkerUsage(workers)
    assert usage.result()["psutil/proc_ram_gb"] > 0
    psutil.Process(other).kill()
    psutil.Process(other).wait()
    assert usage.result()["psutil/proc_ram_gb"] == 0


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_worker_that_ends_meanwhile_fails_nothing(monkeypatch, error):
    usage = WorkerUsage(Workers(os.getpid()))
    usage.result()

    def fail(self, interval=None):
        raise error

    monkeypatch.setattr(psutil.Process, "cpu_percent", fail)
    assert usage.result()["workers"] == 1


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
