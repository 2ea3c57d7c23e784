"""Synchronises start, end and failure of actor and learner. Agent process."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Self


@dataclasses.dataclass
class _Shared:
    """State that the sides of one barrier share beside it."""

    failure: tuple[str, BaseException] | None = None  # Who failed first, and how.
    abandoned: bool = False
    called_off: bool = False
    callbacks: list[Callable[[], None]] = dataclasses.field(default_factory=list)


# By barrier, which the caller has made, and which is all that the sides share.
_SHARED: weakref.WeakKeyDictionary[threading.Barrier, _Shared]
_SHARED = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()  # Guards changes of the dictionary, failures, callbacks.


class Rendezvous:
    """One side of a two-party barrier at which actor and learner meet twice.

        with rendezvous:
          rendezvous.meet()            # When both may begin.
          while not rendezvous.broken: # The learner; the actor waits.
            ...
          rendezvous.meet()            # When the run is over.

    A side that fails breaks the barrier, and the other one fails because of the same
    error. The first meeting may not take place: the learner calls it off if it is told
    to end before, or finds that the run has made its steps.

    Args:
      barrier: of two parties, not used before.
      name: of this side.
      other: of the other side.
    """

    def __init__(self, barrier: threading.Barrier, name: str, other: str):
        if barrier.parties != 2:
            raise ValueError(
                f"Actor and learner expected a barrier of 2, got {barrier.parties}."
            )
        self._barrier = barrier
        with _LOCK:
            self._shared = _SHARED.setdefault(barrier, _Shared())
        self._name = name
        self._other = other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self.fail(error)

    @property
    def broken(self) -> bool:
        """Whether a side has failed, timed out, or called off the meeting."""
        return self._barrier.broken

    @property
    def abandoned(self) -> bool:
        """Whether all sides are to end at once, without waiting."""
        return self._shared.abandoned

    @property
    def failure(self) -> BaseException | None:
        """The first error of either side."""
        return self._shared.failure[1] if self._shared.failure else None

    def meet(self, timeout: float | None = None) -> bool:
        """Waits for the other side; returns False if that has called off the meeting.

        Raises:
          RuntimeError: the other side has failed, with its error as the cause.
          TimeoutError: the other side did not come in time; it fails when it comes.
        """
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(timeout)
            return True
        if self._shared.failure:
            self.check()
        if self._shared.called_off:
            return False
        raise TimeoutError(
            f"The {self._other} did not wait for the {self._name}."
            if timeout is None
            else f"The {self._name} waited {timeout} s for the {self._other}."
        )

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Registers a callback, called by the failing thread if either side fails.

        If a side has failed before, it is called at once. It may be called twice.
        """
        with _LOCK:
            self._shared.callbacks.append(callback)
        if self._shared.failure:
            callback()

    def fail(self, error: BaseException) -> None:
        """Breaks the barrier; the first error is the one that counts."""
        with _LOCK:
            self._shared.failure = self._shared.failure or (self._name, error)
            callbacks = list(self._shared.callbacks)
        self._barrier.abort()
        for callback in callbacks:
            callback()

    def abandon(self, error: BaseException | None = None) -> None:
        """Fails, and tells the other sides to end without waiting."""
        self._shared.abandoned = True
        self.fail(error or RuntimeError("The run was ended."))

    def call_off(self) -> None:
        """Calls off the first meeting, without a failure."""
        self._shared.called_off = True
        self._barrier.abort()

    def check(self) -> None:
        """Raises the failure of either side, if there is one."""
        if not self._barrier.broken:
            return
        name, error = self._shared.failure or (self._other, None)
        if error is not None and name == self._name:
            raise error
        raise RuntimeError(
            f"The {self._name} ends because the {name} failed: {error}"
        ) from error
