"""Restart rules and status of workers, and errors of a run. Launching process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from embodied.workers.thread import WorkerError


@dataclass(frozen=True)
class RestartPolicy:
    """When a worker is restarted. All times are in seconds.

    Attributes:
      restarts: failures within `window` that lead to a restart; one more ends the
        run.
      window: how long a failure counts.
      backoff: delay of the first restart; doubles with every further one.
      backoff_limit: maximum delay.
      steady: after a run of at least this long, the delay is `backoff` again.
      hang: a worker without a report for this long is killed and restarted; 0 for
        never.
      startup: time added to `hang` for the first report of a worker.
      restart_on_success: whether a worker that succeeds is restarted as well.
      limits: like `restarts`, by type name of the exception, for failures that tend to
        recur; each type is counted separately.
    """

    restarts: int
    window: float = 600.0
    backoff: float = 0.5
    backoff_limit: float = 30.0
    steady: float = 60.0
    hang: float = 0.0
    startup: float = 60.0
    restart_on_success: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)

    def delay(self, count: int) -> float:
        """Returns the delay before restart number `count` in a row."""
        doublings = min(count - 1, 1000)  # More would overflow a float.
        return min(self.backoff * 2.0**doublings, self.backoff_limit)


class RunFailed(WorkerError):
    """A worker failed for good, which ended the run.

    Attributes, besides those of `WorkerError`:
      role: the worker's role.
    """

    def __init__(
        self,
        name: str,
        reason: str,
        traceback: str = "",
        role: str = "",
        kind: str = "",
    ):
        super().__init__(name, reason, traceback, kind)
        self.args = (name, reason, traceback, role, kind)
        self.role = role


class RunStalled(RuntimeError):
    """No worker has progressed for so long that the run was ended."""


@dataclass(frozen=True)
class Status:
    """State of a worker, for display.

    Attributes:
      name: name of the worker.
      role: what it does, shared by all workers that do the same.
      state: 'starting' (nothing reported yet), 'running', 'backing off' or 'ended'.
      waiting: whether it reports that it waits for another worker.
      pid: id of its process; None if no process is running.
      restarts: how often it was restarted.
      idle: seconds since its last step; None if it has made none.
    """

    name: str
    role: str
    state: str
    waiting: bool
    pid: int | None
    restarts: int
    idle: float | None
