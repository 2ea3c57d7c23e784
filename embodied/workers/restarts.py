"""Restart rules of supervised workers, and how a run fails. Launching process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from embodied.workers.thread import WorkerError


@dataclass(frozen=True)
class RestartPolicy:
    """When a worker is restarted. All times are in seconds.

    Attributes:
      restarts: failures within `window` that are answered by a restart; one more
        ends the run.
      window: how long a failure counts.
      backoff: delay of the first restart; doubles with each that follows.
      backoff_limit: what the delay grows to.
      steady: a worker that ran this long starts again with the first delay.
      hang: without a report for this long, the worker is killed and restarted; 0
        for never.
      startup: what a worker gets on top of `hang` for its first report.
      restart_on_success: whether a worker that ends well is restarted as well.
      limits: like `restarts`, for failures that tend to come again: by the name of the
        exception's type, each counted by itself.
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

    def __post_init__(self) -> None:
        numbers = {key: value for key, value in vars(self).items() if key != "limits"}
        for name, value in (*numbers.items(), *self.limits.items()):
            if not value >= 0:
                raise ValueError(
                    f"RestartPolicy expected {name} of at least 0, got {value}."
                )

    def delay(self, count: int) -> float:
        """Seconds before the restart that is number `count` in a row."""
        doublings = min(count - 1, 1000)  # More overflow a float.
        return min(self.backoff * 2.0**doublings, self.backoff_limit)


class RunFailed(WorkerError):
    """A worker failed for good, and with it the run.

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
      name: of the worker.
      role: what it does, shared by all workers that do the same.
      state: 'starting' (nothing reported yet), 'running', 'backing off' or 'ended'.
      waiting: whether it says that it waits for somebody else.
      pid: number of its process; None where there is none.
      restarts: how often it was restarted.
      error: its last failure.
      idle: seconds since its last step; None if it has made none.
    """

    name: str
    role: str
    state: str
    waiting: bool
    pid: int | None
    restarts: int
    error: WorkerError | None
    idle: float | None
