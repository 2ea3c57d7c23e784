"""Reports of roles to the logger: their state and metrics. Any process with roles.

Every second a role sends its state, which the logger writes to `live.json`, and every
`log_every` seconds its metrics.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import psutil

from embodied.clock import LocalClock
from embodied.run.live import LIVE_SECONDS, Rate, process_info
from embodied.run.parallel import wiring
from embodied.run.settings import RunSettings
from embodied.run.usage import GIGABYTE
from embodied.workers import Status, Supervisor

END_SECONDS = 5.0
CALLS = ("calls", "sent_bytes", "received_bytes")  # Counts that become rates.
QUEUES = ("inflight", "batch_waiting")  # Of a client, and of a server of batches.
SHOWN_AWAY = 8  # Maximum number of workers listed by name that do not run.
USAGE_CALLS = 5  # Calls, one per second, between measurements of processor and memory.

logger = logging.getLogger("embodied.run")


class HopRates:
    """Recent rates of the traffic between roles. Belongs to one thread.

    Args:
      ends: clients and servers by name; they have `totals`.
      counters: functions that return other counts, by name.
    """

    def __init__(
        self,
        ends: Mapping[str, Any],
        counters: Mapping[str, Callable[[], float]],
    ):
        self._ends = dict(ends)
        self._counters = dict(counters)
        self._rates = {
            (name, count): Rate()
            for name in (*self._ends, *self._counters)
            for count in (*CALLS, "")
        }

    def result(self) -> dict[str, dict[str, Any]]:
        """Returns `hops`: rates of `CALLS`, latency and queue by end; and `rates`."""
        hops = {}
        for name, end in self._ends.items():
            totals = end.totals()
            hops[name] = {
                **{count: self._rates[name, count](totals[count]) for count in CALLS},
                "latency": totals["latency_p50"],
                "queue": sum(totals.get(queue, 0) for queue in QUEUES),
            }
        rates = {
            name: self._rates[name, ""](count())
            for name, count in self._counters.items()
        }
        return {"hops": hops, "rates": rates}


class WorkerUsage:
    """Processor and memory usage of the workers of a supervisor, role by role.

    Belongs to one thread.
    """

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}

    def result(self, workers: Iterable[Status]) -> dict[str, dict[str, float]]:
        """Returns `cpu` (cores since the last call) and `memory_gb` by role.

        Roles without a process, such as a thread of this one, are left out.
        """
        known, self._processes = self._processes, {}
        roles: dict[str, dict[str, float]] = {}
        for worker in workers:
            if worker.pid is None:
                continue
            used = roles.setdefault(worker.role, {"cpu": 0.0, "memory_gb": 0.0})
            # It may have ended meanwhile; `psutil` does not wrap all errors in its own.
            with contextlib.suppress(psutil.Error, OSError):
                process = known.get(worker.pid) or psutil.Process(worker.pid)
                self._processes[worker.pid] = process
                with process.oneshot():
                    used["cpu"] += process.cpu_percent() / 100
                    used["memory_gb"] += process.memory_info().rss / GIGABYTE
        return roles


class RoleStates:
    """States of all roles of a supervisor, for `live.json`. Belongs to one thread."""

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor
        self._usage = WorkerUsage()
        self._used: dict[str, dict[str, float]] = {}
        self._calls = 0

    def result(self) -> dict[str, dict[str, Any]]:
        """Returns by role: counts of workers, restarts, workers away, and usage."""
        workers = self._supervisor.status()
        roles: dict[str, dict[str, Any]] = {}
        for worker in workers:
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
            self._used |= self._usage.result(workers)
        self._calls += 1
        for name, used in self._used.items():
            roles[name] |= used
        return roles


@contextlib.contextmanager
def report_workers(supervisor: Supervisor, settings: RunSettings) -> Iterator[None]:
    """Sends the state of all workers, and as metrics the usage of env workers."""
    states, usage = RoleStates(supervisor), WorkerUsage()
    should_log = metrics_clock(settings)

    def tell(client: Any) -> Iterator[Any]:
        told = {**process_info(), "roles": states.result()}
        yield client.tell_roles(json.dumps(told))
        if settings.usage["psutil"] and should_log():
            workers = [x for x in supervisor.status() if x.role == "env"]
            used = usage.result(workers).get("env", {"cpu": 0.0, "memory_gb": 0.0})
            metrics = {
                "psutil/proc_cpu_usage": used["cpu"],
                "psutil/proc_ram_gb": used["memory_gb"],
                "workers": sum(worker.pid is not None for worker in workers),
                "restarts": sum(worker.restarts for worker in workers),
            }
            yield client.add(wiring.prefixed("usage/env", metrics))

    with tell_logger(settings, "env-usage", tell):
        yield


@contextlib.contextmanager
def report_role(
    settings: RunSettings,
    role: str,
    ends: Mapping[str, Any],
    counters: Mapping[str, Callable[[], float]],
    stats: Callable[[], dict[str, Any]] | None = None,
) -> Iterator[None]:
    """Sends the `HopRates` of a role and, if given, its statistics as metrics."""
    rates = HopRates(ends, counters)
    should_log = metrics_clock(settings)

    def tell(client: Any) -> Iterator[Any]:
        told = {"role": role, **rates.result()}
        yield client.tell_hops(json.dumps(told))
        if stats is not None and should_log():
            yield client.add(stats())

    with tell_logger(settings, f"{role}-live", tell):
        yield


def metrics_clock(settings: RunSettings) -> LocalClock:
    """Returns a clock for metrics: every `log_every` seconds, at least one; 0 never."""
    return LocalClock(max(1.0, settings.log_every) if settings.log_every else 0)


@contextlib.contextmanager
def tell_logger(
    settings: RunSettings, name: str, tell: Callable[[Any], Iterable[Any]]
) -> Iterator[None]:
    """Calls `tell` in a thread every second within the body, while a logger listens.

    Args:
      settings: where the logger is.
      name: of the thread and of the connection.
      tell: calls methods of the client that it is given, and returns their futures.
    """
    if wiring.AUTO in str(settings.logger_addr):  # It is not known.
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_tell, args=(settings, name, tell, stop), name=name, daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(END_SECONDS)


def _tell(
    settings: RunSettings,
    name: str,
    tell: Callable[[Any], Iterable[Any]],
    stop: threading.Event,
) -> None:
    results = wiring.PendingCalls(
        lambda _, error: logger.warning("The logger took no report: %s", error)
    )
    try:
        with wiring.make_client(settings.logger_addr, name, settings) as client:
            while not stop.wait(LIVE_SECONDS):
                results.check()
                # Not while the last report is open, so that this never waits for it.
                if results.all_done and client.connected:
                    for future in tell(client):
                        results.add(future)
    except ConnectionError as error:  # The run does not depend on it.
        logger.warning("%s does not report any more: %s", name, error)
