"""What outputs of metrics have in common; in the process that logs."""

from __future__ import annotations

import collections
import functools
import re
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

# The step, the metric's name, and its value: a string, or an array that is a scalar
# [], a vector [N], an image [H, W] or [H, W, C] uint8, or a video [T, H, W, C] uint8.
Summary = tuple[int, str, str | np.ndarray]


class MissingPackageError(ImportError):
    """An output needs a package that is an extra and is not installed."""

    def __init__(self, package: str, extra: str):
        super().__init__(
            f"The {extra} output expected the package {package!r}, which is not "
            f"installed. Run: pip install 'dreamerv3-parallel[{extra}]'"
        )


class Output:
    """One destination of metrics.

        output(summaries)    # Raises when they could not be written.
        output.close()

    Args:
      pattern: regular expression that a metric's whole name must match.
    """

    def __init__(self, pattern: str = ".*"):
        self._pattern = compile_pattern(pattern)

    def __call__(self, summaries: Sequence[Summary]) -> None:
        """Writes the summaries whose name matches the pattern."""
        raise NotImplementedError(f"{type(self).__name__}.__call__")

    def flush(self) -> None:
        """Returns when all that was given has been written."""

    def close(self) -> None:
        """Writes what is left and frees what is held. May be called more than once."""

    def selected(self, summaries: Sequence[Summary]) -> list[Summary]:
        """Returns the summaries whose name matches the pattern."""
        return [item for item in summaries if self._pattern.fullmatch(item[1])]


class AsyncOutput(Output):
    """An output that writes in a thread of its own, since it may be slow.

    A subclass implements `_write`, `_flush` and `_close`, which run in that thread
    only, one at a time; it owns whatever they touch. What passes between the threads
    is guarded by one condition variable. Nothing is dropped while the output makes
    progress: a full queue holds the caller until there is room. An error is raised
    by the next call from outside, which is itself carried out.

    Args:
      pattern: regular expression that a metric's whole name must match.
      queue_size: calls that may wait to be written.
      stall_timeout: seconds without progress after which a full queue raises
        `TimeoutError` at once instead of holding the caller.
      close_timeout: seconds that `flush` and `close` wait for the queue to drain.
    """

    def __init__(
        self,
        pattern: str = ".*",
        queue_size: int = 16,
        stall_timeout: float = 300.0,
        close_timeout: float = 60.0,
    ):
        super().__init__(pattern)
        if queue_size < 1:
            raise ValueError(f"Expected a queue_size of at least 1, got {queue_size}.")
        self._queue_size = queue_size
        self._stall_timeout = stall_timeout
        self._close_timeout = close_timeout
        # The condition guards everything below.
        self._condition = threading.Condition()
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._given = 0
        self._done = 0
        self._progress = time.monotonic()
        self._error: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def __call__(self, summaries: Sequence[Summary]) -> None:
        """Queues the summaries whose name matches the pattern."""
        selected = self.selected(summaries)
        with self._condition:
            if selected:
                self._wait_for_room()
            # Taken first, since it is of earlier calls and not of this one.
            error, self._error = self._error, None
            if selected:
                self._give(functools.partial(self._write, selected))
        if error:
            raise error

    def flush(self) -> None:
        """Returns when all that was given is written; raises after the timeout."""
        with self._condition:
            if self._thread and not self._closing:
                self._give(self._flush)
                self._wait_until_done()
        self._raise_error()

    def close(self) -> None:
        """Writes what is queued, raises after the timeout, and ends the thread."""
        with self._condition:
            if self._closing:
                return
            self._closing = True
            self._condition.notify_all()
            thread = self._thread
        if thread is None:
            self._close()
            return
        thread.join(self._close_timeout)
        with self._condition:
            lost = len(self._jobs)
            self._jobs.clear()
        if thread.is_alive():
            raise TimeoutError(
                f"{type(self).__name__} was not done {self._close_timeout:g} s after "
                f"it was closed; {lost + 1} writes may be lost."
            )
        self._raise_error()

    def _write(self, summaries: list[Summary]) -> None:
        raise NotImplementedError(f"{type(self).__name__}._write")

    def _flush(self) -> None:
        """Passes on what the destination itself holds back."""

    def _close(self) -> None:
        """Closes the destination."""

    def _wait_for_room(self) -> None:
        """Waits for the writing thread; under the condition."""
        while len(self._jobs) >= self._queue_size and not self._closing:
            remaining = self._progress + self._stall_timeout - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(
                    f"{type(self).__name__} has written nothing for more than "
                    f"{self._stall_timeout:g} s and {len(self._jobs)} writes wait for "
                    "it: this one was dropped. Check the disk or the network it "
                    "writes to."
                )
            self._condition.wait(remaining)
        if self._closing:
            raise RuntimeError(f"{type(self).__name__} is closed and takes no writes.")

    def _give(self, job: Callable[[], None]) -> None:
        if self._given == self._done:
            self._progress = time.monotonic()
        self._given += 1
        self._jobs.append(job)
        self._condition.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_thread, name=type(self).__name__, daemon=True
            )
            self._thread.start()

    def _wait_until_done(self) -> None:
        ticket = self._given
        drained = self._condition.wait_for(
            lambda: self._done >= ticket, self._close_timeout
        )
        if not drained:
            raise TimeoutError(
                f"{type(self).__name__} had {ticket - self._done} writes left after "
                f"{self._close_timeout:g} s."
            )

    def _raise_error(self) -> None:
        with self._condition:
            error, self._error = self._error, None
        if error:
            raise error

    def _run_thread(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    break
                job = self._jobs.popleft()
                self._condition.notify_all()
            self._try(job)
            with self._condition:
                self._done += 1
                self._progress = time.monotonic()
                self._condition.notify_all()
        self._try(self._close)

    def _try(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            with self._condition:
                self._error = self._error or error


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern of metric names, with an error that says what was wrong."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"Expected a regular expression of metric names, got {pattern!r}: {error}."
        ) from None
