"""Tells the logger what env workers use. The process that supervises them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import psutil

from embodied.run.parallel import wiring
from embodied.run.settings import RunSettings
from embodied.run.usage import GIGABYTE
from embodied.workers import Supervisor

END_SECONDS = 5.0

logger = logging.getLogger("embodied.run")


class EnvUsage:
    """Processor and memory of all env workers of this host together.

    Belongs to one thread.

    Args:
      supervisor: has the workers.
    """

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor
        self._processes: dict[int, psutil.Process] = {}

    def result(self) -> dict[str, float]:
        """Returns sums over the workers, the processor's since the last call."""
        workers = [x for x in self._supervisor.status() if x.role == "env"]
        pids = {worker.pid for worker in workers if worker.pid is not None}
        known = self._processes
        self._processes = {pid: known[pid] for pid in pids if pid in known}
        cores, memory = 0.0, 0.0
        for pid in pids:
            # It may just have ended; `psutil` does not turn all errors into its own.
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


@contextlib.contextmanager
def report_env_usage(supervisor: Supervisor, settings: RunSettings) -> Iterator[None]:
    """Sends the use of env workers every `log_every` seconds within the body."""
    unknown = wiring.AUTO in str(settings.logger_addr)  # A host that was not told.
    if unknown or not settings.usage["psutil"] or not settings.log_every:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_tell, args=(supervisor, settings, stop), name="env usage", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(END_SECONDS)


def _tell(supervisor: Supervisor, settings: RunSettings, stop: threading.Event) -> None:
    try:
        _tell_until(supervisor, settings, stop)
    except ConnectionError as error:  # The run does not depend on it.
        logger.warning("The use of env workers is not logged any more: %s", error)


def _tell_until(
    supervisor: Supervisor, settings: RunSettings, stop: threading.Event
) -> None:
    usage = EnvUsage(supervisor)
    results = wiring.Results(
        lambda _, error: logger.warning("The logger took no usage: %s", error)
    )
    with wiring.make_client(settings.logger_addr, "env-usage", settings) as client:
        while not stop.wait(max(1.0, settings.log_every)):
            metrics = usage.result()
            results.check()
            if client.connected:
                results.add(client.add(dict(wiring.prefixed("usage/env", metrics))))
