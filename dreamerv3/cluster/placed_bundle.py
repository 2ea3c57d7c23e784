"""State of a bundle: where its actor is, and how often it was lost. Driver."""

from __future__ import annotations

import time
from typing import Any

from dreamerv3.cluster.bundle_actor import Place
from dreamerv3.cluster.bundles import Resources
from embodied.workers import RestartPolicy


class Bundle:
    """A bundle and its actor, which is made again when it is lost.

    Attributes:
      name: of the bundle.
      resources: needed by the bundle.
      policy: how often it may be lost.
      actor: handle of the actor; None while there is none.
      actors: how many actors were made so far.
      place: where the actor is; None until Ray has placed it.
      number: of the last start of its program.
      told: number of the last start that was told to stop.
      running: whether start `number` is running.
      began: when the actor was made or, later, its program started.
    """

    def __init__(self, name: str, resources: Resources, restarts: int):
        self.name = name
        self.resources = resources
        self.policy = RestartPolicy(restarts)
        self.actor: Any = None
        self.actors = 0
        self.place: Place | None = None
        self.number = 0
        self.told = 0
        self.running = False
        self.began = time.monotonic()
        self._losses: list[float] = []
        self._in_a_row = 0

    @property
    def title(self) -> str:
        """The name, capitalised to begin a message."""
        return self.name.capitalize()

    def limit_message(self, key: str) -> str:
        """Returns the message for a bundle that was lost more often than `key` allows.

        Args:
          key: configuration key with the number of restarts.
        """
        return (
            f"{self.title}: lost more than {self.policy.restarts} times within "
            f"{self.policy.window:g} s (--{key})."
        )

    def delay(self) -> float | None:
        """Counts a loss; returns the seconds until the next start, None to give up."""
        now, policy = time.monotonic(), self.policy
        self._losses = [x for x in self._losses if now - x < policy.window] + [now]
        if len(self._losses) > policy.restarts:
            return None
        steady = now - self.began >= policy.steady
        self._in_a_row = 1 if steady else self._in_a_row + 1
        return policy.delay(self._in_a_row)


def explain_loss(reason: Any) -> str:
    """Returns the part of a Ray error that a person needs.

    Args:
      reason: an error, or a text that explains the loss already.
    """
    if type(reason).__name__ == "ActorUnavailableError":
        return "its node or its process cannot be reached"
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    # The last line has the cause, the others tell where it was noticed.
    return lines[-1].rstrip(".")[:500] if lines else type(reason).__name__
