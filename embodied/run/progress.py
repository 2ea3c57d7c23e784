"""When a loop ends, and what it has done then. The process that runs the loop."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable


class Limit:
    """Ends a loop by its steps, by its duration, or by a signal.

    Args:
      step: returns the number of steps until now.
      steps: at which the loop ends.
      duration: seconds from now after which it ends; 0 for no limit.
      stop: ends it once set.
    """

    def __init__(
        self,
        step: Callable[[], int],
        steps: float,
        duration: float,
        stop: threading.Event,
    ):
        self._step = step
        self._steps = steps
        self._stop = stop
        self._start = time.monotonic()
        self._end = self._start + duration if duration else math.inf

    @property
    def seconds(self) -> float:
        """How long it has taken until now."""
        return time.monotonic() - self._start

    def interrupted(self) -> bool:
        """Whether a signal has come, or the duration is over."""
        return self._stop.is_set() or time.monotonic() >= self._end

    def reached(self) -> bool:
        """Whether the loop is over, for one of these reasons or by its steps."""
        return self.interrupted() or self._step() >= self._steps


@dataclasses.dataclass(frozen=True)
class Result:
    """What a call of a training loop did.

    Attributes:
      step: agent steps of training environments, over all resumes.
      steps: those of this call.
      updates: of the agent, in this call.
      seconds: how long it took, without the start.
      episodes: finished in this call.
      mean_score: of the last 10 of them; None if there were none.
    """

    step: int
    steps: int
    updates: int
    seconds: float
    episodes: int
    mean_score: float | None
