"""Begin, end and failure of actor and learner together. Agent process."""

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


# The sides have nothing in common but the barrier, which the caller has made.
_SHARED: weakref.WeakKeyDictionary[threading.Barrier, _Shared]
_SHARED = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()  # Guards the dictionary, and all failures.


class Rendezvous:
    """One thread's side of a barrier of two that actor and learner meet at twice.

        with rendezvous:
          rendezvous.meet()            # When both may begin.
          while not rendezvous.broken: # The learner; the actor waits.
            ...
          rendezvous.meet()            # When the run is over.

    Whoever fails breaks the barrier, and the other one fails with the same error. The
    first time they may not meet at all: the learner calls it off if it is told to end
    before.

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
        """Whether the other side has failed."""
        return self._barrier.broken

    @property
    def abandoned(self) -> bool:
        """Whether all is to end at once."""
        return self._shared.abandoned

    @property
    def failure(self) -> BaseException | None:
        """The first error of either side."""
        return self._shared.failure[1] if self._shared.failure else None

    def meet(self, timeout: float | None = None) -> bool:
        """Waits for the other side; False if that has called it off.

        Raises:
          RuntimeError: the other side has failed, with its error as the cause.
          TimeoutError: it did not come in time; it fails when it does.
        """
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(timeout)
            return True
        if self._shared.failure:
            self.check()
        if self._shared.called_off:
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
        """Fails, and has the other sides wait for nothing any more."""
        self._shared.abandoned = True
        self.fail(error or RuntimeError("The run was ended."))

    def call_off(self) -> None:
        """Leaves well before both have met."""
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
