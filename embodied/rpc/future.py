"""The answer of a call that may still be on its way. The client's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

PENDING, DONE, FAILED = range(3)  # The first is False.


class Receiver(Protocol):
    """Who receives the answers to calls: a client."""

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Receives in the calling thread until a future is done, or time is over."""

    def attend(self) -> None:
        """Receives from now on although nobody waits."""


class Future:
    """The result of a call, or its error.

    `result` gives the same answer however often and from however many threads it is
    asked. The client's receiving thread completes it, once.
    """

    # Guards the change of state and the two below, of all futures: it is held for a
    # moment only, and one for each would be most of what a future costs.
    _lock = threading.Lock()
    _event: threading.Event | None = None
    _callbacks: tuple[Callable[[Future], None], ...] = ()
    state = PENDING  # For the client, which looks at it often.
    _value: Any = None

    def __init__(self, call: str, receiver: Receiver):
        self.call = call  # Whom it waits for, for messages.
        self._receiver = receiver

    def done(self) -> bool:
        """Whether there is a result or an error."""
        if self.state == PENDING:
            self._receiver.attend()
        return self.state != PENDING

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is done; False if it is not in time."""
        if self.state == PENDING:
            self._receiver.wait_for(self, timeout)
        return self.state != PENDING

    def result(self, timeout: float | None = None) -> Any:
        """Returns the result, or raises the call's error.

        Raises:
          TimeoutError: it was not done in time; asking again later is fine.
        """
        if not self.state:
            self._receiver.wait_for(self, timeout)
            if not self.state:
                raise TimeoutError(f"No answer to {self.call} within {timeout} s.")
        if self.state == FAILED:
            raise self._value
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the call's error, or None if it has a result."""
        if not self.wait(timeout):
            raise TimeoutError(f"No answer to {self.call} within {timeout} s.")
        return self._value if self.state == FAILED else None

    def add_callback(self, callback: Callable[[Future], None]) -> None:
        """Calls back when done, from the thread that receives; at once if done."""
        with self._lock:
            pending = self.state == PENDING
            if pending:
                self._callbacks = (*self._callbacks, callback)
        if not pending:
            callback(self)
        else:
            self._receiver.attend()

    def set_result(self, value: Any, state: int = DONE) -> None:
        """Completes the future. For the client."""
        with self._lock:
            if self.state != PENDING:
                return
            self._value = value
            self.state = state
            callbacks, self._callbacks = self._callbacks, ()
            event = self._event
        if event is not None:
            event.set()
        for callback in callbacks:
            callback(self)

    def set_error(self, error: BaseException) -> None:
        """Completes the future with an error. For the client."""
        self.set_result(error, FAILED)

    def block(self, deadline: float | None) -> None:
        """Waits for another thread to complete it. For the client."""
        with self._lock:
            if self.state != PENDING:
                return
            if self._event is None:
                self._event = threading.Event()
        self._event.wait(None if deadline is None else deadline - time.monotonic())
