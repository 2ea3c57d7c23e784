"""How actor and learner begin, end and fail together. Agent process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Self


class Ending:
    """One thread's side of a barrier of two that actor and learner meet at twice.

        with ending:
          ending.meet()            # When both may begin.
          while not ending.broken: # The learner; the actor waits.
            ...
          ending.meet()            # When the run is over.

    Whoever fails breaks the barrier, and the other one fails with the same error. What
    the two sides share beside the barrier is kept in attributes of it. The first time
    they may not meet at all: the learner calls it off if it is told to end before.

    Args:
      barrier: of two, new.
      name: of this side.
      other: of the other side.
    """

    def __init__(self, barrier: threading.Barrier, name: str, other: str):
        if barrier.parties != 2:
            raise ValueError(
                f"Actor and learner expected a barrier of 2, got {barrier.parties}."
            )
        self._barrier = barrier
        self._name = name
        self._other = other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self.fail(error)

    @property
    def broken(self) -> bool:
        """Whether the other side has failed."""
        return self._barrier.broken

    @property
    def abandoned(self) -> bool:
        """Whether all is to end at once."""
        return "abandoned" in vars(self._barrier)

    def meet(self, timeout: float | None = None) -> bool:
        """Waits for the other side; False if that has called it off.

        Raises:
          RuntimeError: the other side has failed, with its error as the cause.
          TimeoutError: it did not come in time; it fails when it does.
        """
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(timeout)
            return True
        if "failure" in vars(self._barrier):
            self.check()
        if "called_off" in vars(self._barrier):
            return False
        raise TimeoutError(
            f"The {self._name} waited {timeout} s for the {self._other}."
        )

    def wait(self) -> None:
        """Waits until the other side is done, which is the end of the run."""
        self.meet()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Has a function called, by the thread that fails, if either side does.

        It may be called twice.
        """
        vars(self._barrier).setdefault("callbacks", []).append(callback)
        if "failure" in vars(self._barrier):
            callback()

    def fail(self, error: BaseException) -> None:
        """Breaks the barrier; the first error is the one that counts."""
        vars(self._barrier).setdefault("failure", (self._name, error))
        self._barrier.abort()
        for callback in vars(self._barrier).get("callbacks", []):
            callback()

    def abandon(self) -> None:
        """Fails, and has the other sides wait for nothing any more."""
        vars(self._barrier)["abandoned"] = True
        self.fail(RuntimeError("The run was ended."))

    def call_off(self) -> None:
        """Leaves well before both have met."""
        vars(self._barrier)["called_off"] = True
        self._barrier.abort()

    def check(self) -> None:
        """Raises the failure of either side, if there is one."""
        if not self._barrier.broken:
            return
        name, error = vars(self._barrier).get("failure", (self._other, None))
        if error is not None and name == self._name:
            raise error
        raise RuntimeError(
            f"The {self._name} ends because the {name} failed: {error}"
        ) from error
