"""Processes and threads, and a supervisor that restarts them. Any parent process."""

from embodied.workers.process import Process, stop
from embodied.workers.progress import Progress
from embodied.workers.restarts import RestartPolicy, RunFailed, RunStalled, Status
from embodied.workers.supervisor import Supervisor
from embodied.workers.thread import Thread, Worker, WorkerError

__all__ = [
    "Process",
    "Progress",
    "RestartPolicy",
    "RunFailed",
    "RunStalled",
    "Status",
    "Supervisor",
    "Thread",
    "Worker",
    "WorkerError",
    "stop",
]
