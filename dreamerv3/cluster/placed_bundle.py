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
      resources: that it needs.
      policy: how often it may be lost.
      actor: handle of the actor; None while there is none.
      actors: how many were made so far.
      place: where that is; None until Ray has placed it.
      number: of the last start of its program.
      told: the last start that was told to stop.
      running: whether that of `number` has not ended.
      began: when.
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
        """The name, to begin a message with."""
        return self.name.capitalize()

    def too_often(self, key: str) -> str:
        """Returns the message for a bundle that was lost once too often, by the key."""
        return (
            f"{self.title}: lost more than {self.policy.restarts} times within "
            f"{self.policy.window:g} s (--{key})."
        )

    def delay(self) -> float | None:
        """Counts a loss; returns the seconds before the next start, None for none."""
        now, policy = time.monotonic(), self.policy
        self._losses = [x for x in self._losses if now - x < policy.window] + [now]
        if len(self._losses) > policy.restarts:
            return None
        steady = now - self.began >= policy.steady
        self._in_a_row = 1 if steady else self._in_a_row + 1
        return policy.delay(self._in_a_row)


def explain_loss(reason: Any) -> str:
    """Returns the part of an error of Ray that a person needs.

    Args:
      reason: an error, or a text that says it already.
    """
    if type(reason).__name__ == "ActorUnavailableError":
        return "its node or its process cannot be reached"
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    # The last one has the cause, the others where it was noticed.
    return lines[-1].rstrip(".")[:500] if lines else type(reason).__name__
