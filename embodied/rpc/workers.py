"""Runs processes and threads together until one fails. In any parent process."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable

from embodied.rpc.process import Process, stop
from embodied.rpc.thread import Thread, Worker, WorkerError

__all__ = ["Process", "Thread", "Worker", "WorkerError", "run", "stop"]


def run(
    workers: Iterable[Worker], duration: float | None = None, grace: float = 5.0
) -> None:
    """Runs workers until all have ended well or the first one fails.

    Whatever ends the wait, an interrupt included, the processes that are still
    running are stopped. Threads cannot be: those that nobody told to return are left
    behind as daemons.

    Args:
      workers: processes and threads; those not started yet are started.
      duration: seconds after which everything is stopped; None or 0 for no limit.
      grace: seconds between SIGTERM and SIGKILL for processes that are stopped.

    Raises:
      WorkerError: of the worker that failed first.
    """
    workers = list(workers)
    ended: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    deadline = time.monotonic() + duration if duration else None
    try:
        for worker in workers:
            if not worker.started:
                worker.start()
            worker.on_exit(ended.put)
        for _ in workers:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended.get(timeout=left).check()
    except queue.Empty:
        pass  # The duration is over.
    finally:
        stop(workers, grace)
