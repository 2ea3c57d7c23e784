"""Reports state and resource usage of workers to the logger. Supervising process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import psutil

from embodied.clock import LocalClock
from embodied.run.live import process_info
from embodied.run.parallel import wiring
from embodied.run.parallel.live_reports import tell_logger
from embodied.run.settings import RunSettings
from embodied.run.usage import GIGABYTE
from embodied.workers import Supervisor

SHOWN_AWAY = 8  # Maximum number of workers listed by name that do not run.
USAGE_CALLS = 5  # Calls, one per second, between measurements of processor and memory.


class WorkerUsage:
    """Processor and memory usage of all workers of a role on this host together.

    Belongs to one thread.

    Args:
      supervisor: has the workers.
      role: of the workers.
    """

    def __init__(self, supervisor: Supervisor, role: str = "env"):
        self._supervisor = supervisor
        self._role = role
        self._processes: dict[int, psutil.Process] = {}

    def result(self) -> dict[str, float]:
        """Returns sums over the workers; processor usage is since the last call."""
        workers = [x for x in self._supervisor.status() if x.role == self._role]
        pids = {worker.pid for worker in workers if worker.pid is not None}
        known = self._processes
        self._processes = {pid: known[pid] for pid in pids if pid in known}
        cores, memory = 0.0, 0.0
        for pid in pids:
            # It may have ended meanwhile; `psutil` does not wrap all errors in its own.
            with contextlib.suppress(psutil.Error, OSError):
                if pid not in self._processes:
                    self._processes[pid] = psutil.Process(pid)
                process = self._processes[pid]
                with process.oneshot():
                    cores += process.cpu_percent() / 100
                    memory += process.memory_info().rss / GIGABYTE
        return {
            "psutil/proc_cpu_usage": cores,
            "psutil/proc_ram_gb": memory,
            "workers": len(pids),
            "restarts": sum(worker.restarts for worker in workers),
        }


class RoleStates:
    """States of all roles of a supervisor, for `live.json`.

    Belongs to one thread.

    Args:
      supervisor: has the workers.
    """

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor
        self._usage: dict[str, WorkerUsage] = {}
        self._used: dict[str, dict[str, float]] = {}
        self._calls = 0

    def result(self) -> dict[str, dict[str, Any]]:
        """Returns by role: counts of workers, restarts, workers away, and usage."""
        roles: dict[str, dict[str, Any]] = {}
        for worker in self._supervisor.status():
            role = roles.setdefault(
                worker.role,
                {"workers": 0, "running": 0, "waiting": 0, "restarts": 0, "away": []},
            )
            role["workers"] += 1
            role["running"] += worker.state == "running"
            role["waiting"] += worker.waiting
            role["restarts"] += worker.restarts
            if worker.state != "running" and len(role["away"]) < SHOWN_AWAY:
                role["away"].append(f"{worker.name}: {worker.state}")
        if self._calls % USAGE_CALLS == 0:
            self._measure(roles)
        self._calls += 1
        for name, used in self._used.items():
            roles.get(name, {}).update(used)
        return roles

    def _measure(self, roles: dict[str, dict[str, Any]]) -> None:
        for name in roles:
            usage = self._usage.setdefault(name, WorkerUsage(self._supervisor, name))
            used = usage.result()
            if used["workers"]:  # Else it is a thread of this process.
                cores, memory = (
                    used["psutil/proc_cpu_usage"],
                    used["psutil/proc_ram_gb"],
                )
                self._used[name] = {"cpu": cores, "memory_gb": memory}


@contextlib.contextmanager
def report_env_usage(supervisor: Supervisor, settings: RunSettings) -> Iterator[None]:
    """Sends the state of all workers every second within the body.

    The usage of env workers goes to the metrics every `log_every` seconds.
    """
    usage, states = WorkerUsage(supervisor), RoleStates(supervisor)
    logs = settings.usage["psutil"] and settings.log_every
    should_log = LocalClock(max(1.0, settings.log_every) if logs else 0)

    def tell(client: Any) -> Iterator[Any]:
        told = {**process_info(), "roles": states.result()}
        yield client.tell_roles(json.dumps(told))
        if should_log():
            yield client.add(dict(wiring.prefixed("usage/env", usage.result())))

    with tell_logger(settings, "env-usage", tell):
        yield
