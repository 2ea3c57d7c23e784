"""Calls of a client: their results, their errors and their counts. Any process."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from embodied.rpc.buffers import Block

log = logging.getLogger("embodied.rpc")

PENDING, DONE, FAILED = range(3)  # The first is False.


class Unanswered(Exception):
    """Raised by a bound function that ends before it can answer.

    The caller hears nothing from this server. Its call fails with Disconnected when the
    server that comes next welcomes it.
    """


class Disconnected(ConnectionError):
    """The server is gone or was restarted, or the client is closed."""


class RemoteError(RuntimeError):
    """The server answered with an error.

    Attributes:
      kind: 'exception' if the method raised, 'bad' if the request was refused.
      type: name of the exception's type on the server.
      message: the text alone, without the traceback.
      traceback: its text there.
    """

    def __init__(self, kind: str, message: str, type: str = "", traceback: str = ""):
        super().__init__(message)
        self.kind = kind
        self.type = type
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        if self.traceback:
            return f"{self.message}\n\nOn the server:\n{self.traceback}"
        return self.message


class Receiver(Protocol):
    """The receiver of the answers to calls: a client."""

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Receives in the calling thread until a future is done, or time is over."""

    def attend(self) -> None:
        """Receives from now on although nobody waits."""


class Future:
    """A call: its result or its error, and what is needed to send it again.

    `result` gives the same answer however often and from however many threads it is
    asked. The thread that receives the answer completes it, once.

    Args:
      method: of the server.
      addr: of the server.
      receiver: the client.
    """

    # Guards the change of state and the two below, of all futures: it is held for a
    # moment only, and one for each would be most of what a future costs.
    _lock = threading.Lock()
    _event: threading.Event | None = None
    _callbacks: tuple[Callable[[Future], None], ...] = ()
    state = PENDING  # For the client, which looks at it often, as are the next.
    frame: bytes = b""
    sent = False  # Whether a server may have got it.
    request: Block | None = None  # Where the arguments lie.
    reply: Block | None = None  # Where the reply may be put.
    _value: Any = None

    def __init__(self, method: str, addr: str, receiver: Receiver):
        self.method = method
        self._addr = addr
        self._receiver = receiver
        self.started = time.perf_counter()

    def done(self) -> bool:
        """Returns whether there is a result or an error."""
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
        if self.state == DONE:
            return self._value
        raise self._value if self.state else self._timed_out(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the call's error, or None if it has a result."""
        if not self.wait(timeout):
            raise self._timed_out(timeout)
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

    def block(self, timeout: float | None) -> None:
        """Waits for another thread to complete it. For the client."""
        with self._lock:
            if self.state != PENDING:
                return
            if self._event is None:
                self._event = threading.Event()
        self._event.wait(timeout)

    def _timed_out(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(
            f"No answer to '{self.method}' from {self._addr} within {timeout} s."
        )

    def release(self) -> None:
        """Gives its memory back, when the server is done with it."""
        if self.request is not None:
            self.request.free()
            self.request = None
        if self.reply is not None:
            self.reply.free()
            self.reply = None


class Statistics:
    """Counts, rates and latencies of a server or client since it was last asked.

    Any thread counts, without a lock: an increment that another one overtakes may be
    lost, which costs nothing but a little precision.

    Args:
      name: of the server or client, for messages.
      counts: what is counted; 'calls' is among it.
    """

    def __init__(self, name: str, *counts: str):
        self._name = name
        self._since = time.monotonic()
        self.counts = dict.fromkeys(counts, 0)  # Since the start.
        self._before = dict(self.counts)  # When it was last asked.
        self.rejected: Counter = Counter()  # By reason, since the start.
        self.latencies: deque[float] = deque(maxlen=1024)

    def reject(self, reason: str, text: str) -> None:
        """Counts a message that is not served, and mentions it now and then."""
        self.rejected[reason] += 1
        count = self.rejected[reason]
        if count & (count - 1) == 0:  # The 1st, 2nd, 4th, 8th, ...
            log.warning("%s rejected (%s, %d): %s", self._name, reason, count, text)

    def collect(self) -> dict[str, float]:
        """Returns all counts, the call rate and latencies, and starts anew."""
        now, counts = time.monotonic(), dict(self.counts)
        before, self._before = self._before, counts
        duration, self._since = max(1e-9, now - self._since), now
        new = {name: count - before[name] for name, count in counts.items()}
        return {**new, "call_rate": new["calls"] / duration, **self._latencies()}

    def totals(self) -> dict[str, float]:
        """Returns counts since the start and latencies, and changes nothing."""
        return {**self.counts, **self._latencies()}

    def _latencies(self) -> dict[str, float]:
        values = np.percentile(np.array(self.latencies or [0.0]), (50, 99))
        return {"latency_p50": float(values[0]), "latency_p99": float(values[1])}
