"""Futures of a client's calls, their errors, and call statistics. Any process."""

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

PENDING, DONE, FAILED = range(3)  # PENDING is falsy.


class Unanswered(Exception):
    """Raised by a bound function that has to end before it can answer.

    The caller gets no answer from this server. Its call fails with Disconnected when
    the next server welcomes the client.
    """


class Disconnected(ConnectionError):
    """The server is gone or was restarted, or the client is closed."""


class RemoteError(RuntimeError):
    """The server answered with an error.

    Attributes:
      kind: 'exception' if the method raised, 'bad' if the request was refused,
        'credits' if too many calls were open, 'hello' if the client was refused.
      type: name of the exception's type on the server.
      message: the text alone, without the traceback.
      traceback: text of the traceback on the server.
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
        """Receives until a future is done or time is up, unless another thread does."""

    def attend(self) -> None:
        """Receives from now on even while no thread waits for a result."""


class Future:
    """A call: its result or its error, and what is needed to send it again.

    `result` may be called repeatedly and by several threads; it gives the same answer.
    A future is completed once, by the thread that receives the answer or that fails the
    client's calls.

    Args:
      method: name of the server's method.
      addr: address of the server.
      receiver: the client that makes the call.
    """

    # Guards changes of state and of the next two attributes, for all futures: it is
    # held only briefly, and a lock for each would be most of the cost of a future.
    _lock = threading.Lock()
    _event: threading.Event | None = None
    _callbacks: tuple[Callable[[Future], None], ...] = ()
    state = PENDING  # For the client, which reads it often, like the next four.
    frame: bytes = b""
    sent = False  # Whether a server may have received the call.
    request: Block | None = None  # Holds the arguments.
    reply: Block | None = None  # Offered to the server for the reply.
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
        """Waits until the call is done; False if it is not done in time."""
        if self.state == PENDING:
            self._receiver.wait_for(self, timeout)
        return self.state != PENDING

    def result(self, timeout: float | None = None) -> Any:
        """Returns the result, or raises the call's error.

        Raises:
          TimeoutError: the call was not done in time; `result` may be called again.
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
        """Calls back from the thread that completes the call; at once if it is done.

        Nothing is received meanwhile, so the callback must not wait for a call, nor
        close the client.
        """
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
            callbacks, event = self._callbacks, self._event
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

    def abandon(self, error: BaseException) -> None:
        """Completes it with an error while the server may still write to its blocks.

        They are not used again. They are closed at once: an error that was raised is in
        a cycle with the frames that it passed, and this future may be in one of them.
        """
        self.request = self.reply = None
        self.set_error(error)

    def release(self) -> None:
        """Gives its blocks back. The server must be done with them."""
        if self.request is not None:
            self.request.free()
            self.request = None
        if self.reply is not None:
            self.reply.free()
            self.reply = None


class Statistics:
    """Counts, rates and latencies of a server or client.

    Any thread counts, without a lock: of concurrent increments one may be lost, which
    costs only a little precision. Latencies are those of the latest 1024 calls.

    Args:
      name: name of the server or client, for messages.
      counts: names of the counts, with 'calls' among them.
    """

    def __init__(self, name: str, *counts: str):
        self._name = name
        self._since = time.monotonic()
        self.counts = dict.fromkeys(counts, 0)  # Since the start.
        self._before = dict(self.counts)  # At the last `collect`.
        self.rejected: Counter = Counter()  # By reason, since the start.
        self.latencies: deque[float] = deque(maxlen=1024)

    def reject(self, reason: str, text: str) -> None:
        """Counts a message that is not served, and logs some of them."""
        self.rejected[reason] += 1
        count = self.rejected[reason]
        if count & (count - 1) == 0:  # The 1st, 2nd, 4th, 8th, ...
            log.warning("%s rejected (%s, %d): %s", self._name, reason, count, text)

    def collect(self) -> dict[str, float]:
        """Returns counts and call rate since the last `collect`, and latencies."""
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
