"""Resources that a process uses: CPU, memory, accelerator. Any process that logs.

    usage = Usage(args.usage)
    logger.add(usage.result(), prefix='usage/replay')     # Now and then.

One function for each source that `run.usage` can turn on.
"""

from __future__ import annotations

import functools
import gc
import math
import shutil
import statistics
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import psutil

GIGABYTE = 1024**3
MEGABYTE = 1024**2
TOP_LINES = 5  # Lines of code that allocate the most.
QUERY = ("utilization.gpu", "memory.used", "memory.total", "temperature.gpu")
ACCELERATOR = ("nvsmi", "gputil")  # Sources that query nvidia-smi.
QUERY_SECONDS = 10.0  # How long to wait for an answer.
QUERY_EVERY = 10.0  # Seconds between queries, which take time of the driver.


class Usage:
    """All figures that the settings ask for. Belongs to one thread.

    Args:
      settings: the block `run.usage`: psutil, nvsmi (all accelerators together),
        gputil (each by itself, under the names of that library), malloc and gc.
      accelerator: whether this process uses the accelerators; other processes do not
        query the same figures.
    """

    def __init__(self, settings: Mapping[str, Any], accelerator: bool = True):
        sources: dict[str, Callable[[], dict[str, Any]]] = {
            "malloc": allocations,
            "gc": tracked_objects,
        }
        if settings.get("psutil"):
            process = psutil.Process()
            process.cpu_percent()  # Measures from here on.
            sources["psutil"] = functools.partial(process_usage, process)
        if settings.get("malloc") and not tracemalloc.is_tracing():
            tracemalloc.start()
        if accelerator and any(settings.get(name) for name in ACCELERATOR):
            smi = NvidiaSmi()
            smi.rows()  # Asks early, so that the first `result` has an answer.
            sources["nvsmi"] = lambda: accelerators(smi.rows())
            sources["gputil"] = lambda: each_accelerator(smi.rows())
        self._sources = {x: ask for x, ask in sources.items() if settings.get(x)}

    def result(self) -> dict[str, Any]:
        """Returns the figures of all sources that are turned on."""
        return {
            f"{source}/{name}": value
            for source, ask in self._sources.items()
            for name, value in ask().items()
        }


def process_usage(process: psutil.Process) -> dict[str, float]:
    """Returns CPU, memory, threads and open files of a process.

    - `proc_cpu_usage`: cores in use since the last call, on average.
    - `proc_ram_gb`: resident memory.
    """
    return {
        "proc_cpu_usage": process.cpu_percent() / 100,
        "proc_ram_gb": process.memory_info().rss / GIGABYTE,
        "proc_threads": process.num_threads(),
        "proc_files": process.num_fds(),
    }


def accelerators(rows: list[list[float]]) -> dict[str, float]:
    """Returns means and extremes over all devices, from rows of `QUERY`.

    Utilisation and memory are between 0 and 1, temperature is in °C.
    """
    if not rows:
        return {}
    compute = [row[0] / 100 for row in rows]
    memory = [row[1] / row[2] for row in rows if row[2]]
    return {
        "compute_avg": statistics.fmean(compute),
        "compute_min": min(compute),
        "compute_max": max(compute),
        "memory_avg": statistics.fmean(memory) if memory else 0.0,
        "temperature_max": max(row[3] for row in rows),
    }


def each_accelerator(rows: list[list[float]]) -> dict[str, float]:
    """Returns load and memory of every device, between 0 and 1."""
    metrics: dict[str, float] = {}
    for index, (load, used, total, _) in enumerate(rows):
        metrics[f"gpu{index}_load"] = load / 100
        metrics[f"gpu{index}_memory"] = used / total if total else 0.0
    return metrics


def allocations() -> dict[str, Any]:
    """Returns the memory that Python has allocated, and the lines with the most.

    Tracing it slows the process down.
    """
    size, peak = tracemalloc.get_traced_memory()
    top = tracemalloc.take_snapshot().statistics("lineno")[:TOP_LINES]
    return {
        "total_mb": size / MEGABYTE,
        "peak_mb": peak / MEGABYTE,
        "top": "\n".join(str(line) for line in top),
    }


def tracked_objects() -> dict[str, float]:
    """Returns counts of the garbage collector; slow with many objects."""
    collections = sum(entry["collections"] for entry in gc.get_stats())
    return {
        "objects": len(gc.get_objects()),
        "collections": collections,
        "garbage": len(gc.garbage),
    }


class NvidiaSmi:
    """Queries nvidia-smi in the background, since it takes a while to answer.

    `_lock` guards the answer, whether a query is running, and when the next is due.

    Args:
      every: least number of seconds between queries.
    """

    def __init__(self, every: float = QUERY_EVERY) -> None:
        self._path = shutil.which("nvidia-smi")
        self._every = every
        self._lock = threading.Lock()
        self._asking = False
        self._due = -math.inf
        self._rows: list[list[float]] = []

    def rows(self) -> list[list[float]]:
        """Returns the last answer, a row of `QUERY` per device; asks again if due."""
        now = time.monotonic()
        with self._lock:
            if self._path is not None and not self._asking and now >= self._due:
                self._asking = True
                self._due = now + self._every
                threading.Thread(
                    target=self._ask, name="nvidia-smi", daemon=True
                ).start()
            return self._rows

    def _ask(self) -> None:
        command = [str(self._path), f"--query-gpu={','.join(QUERY)}"]
        command.append("--format=csv,noheader,nounits")
        rows: list[list[float]] = []
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=QUERY_SECONDS
            )
            for line in answer.stdout.splitlines():
                rows.append([float(value) for value in line.split(",")])
        except (OSError, ValueError, subprocess.TimeoutExpired):
            rows = []  # No device, or one without these figures: nothing to log.
        with self._lock:
            self._rows = [row for row in rows if len(row) == len(QUERY)]
            self._asking = False
