"""Threads whose errors are kept, and the base class of workers. Any process."""

from __future__ import annotations

import functools
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from embodied.workers import child


class WorkerError(RuntimeError):
    """A worker failed.

    Attributes:
      name: the worker's name.
      reason: what happened to it, a phrase that follows its name.
      traceback: where it happened, as text; empty if that is unknown.
      kind: type name of the exception, without the module; empty without an exception.
    """

    def __init__(self, name: str, reason: str, traceback: str = "", kind: str = ""):
        super().__init__(name, reason, traceback, kind)
        self.name = name
        self.reason = reason
        self.traceback = traceback
        self.kind = kind

    def __str__(self) -> str:
        text = f"Worker '{self.name}' {self.reason}"
        # A cause is printed with its traceback by Python itself.
        if self.traceback and self.__cause__ is None:
            text += f"\n\n{textwrap.indent(self.traceback.rstrip(), '  ')}"
        return text


class Worker:
    """Base class of processes and threads.

    `_lock` guards the transition from running to ended, `_callbacks`, and whatever a
    subclass says. The thread that notices the worker's end makes the transition, once,
    in `_finish`.
    """

    def __init__(self, function: Callable[..., Any], args: tuple, name: str | None):
        self.name = name or _name_of(function)
        self._call: tuple[Callable[..., Any], tuple] | None = (function, args)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: WorkerError | None = None
        self._callbacks: list[Callable[[Any], None]] = []

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._call is None

    @property
    def running(self) -> bool:
        """Whether the worker has started and not ended."""
        return self.started and not self._over.is_set()

    @property
    def error(self) -> WorkerError | None:
        """Why the worker failed; None while it runs or if it succeeded."""
        return self._error

    def start(self) -> None:
        """Starts the worker, which is possible only once."""
        raise NotImplementedError(f"{type(self).__name__}.start")

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the worker to end; returns False after `timeout` seconds."""
        assert self.started, f"Worker '{self.name}' must be started before join."
        return self._over.wait(timeout)

    def on_exit(self, callback: Callable[[Any], None]) -> None:
        """Calls `callback(worker)` once, after the worker has ended.

        The thread that notices the end makes the call, or this thread if the worker
        has ended already.
        """
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def __enter__(self) -> Self:
        if not self.started:
            self.start()
        return self

    def _take_call(self) -> tuple[Callable[..., Any], tuple]:
        assert self._call is not None, f"Worker '{self.name}' was started before."
        return self._call

    def _finish(self, error: WorkerError | None) -> None:
        with self._lock:
            self._error = error
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # The other callbacks must still run.
                details = (*sys.exc_info(), threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(details))


class Thread(Worker):
    """A daemon thread that keeps its error.

        with Thread(serve, stop_event) as thread:
          ...
          stop_event.set()    # Leaving the block waits for the thread.

    A thread cannot be stopped from outside: tell its function to return.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        start: bool = False,
    ):
        super().__init__(fn, args, name)
        if start:
            self.start()

    def start(self) -> None:
        """Starts the thread."""
        with self._lock:
            function, args = self._take_call()
            threading.Thread(
                target=self._run, args=(function, args), name=self.name, daemon=True
            ).start()
            self._call = None

    def __exit__(self, *exc_info: object) -> None:
        self.join()

    def _run(self, function: Callable[..., Any], args: tuple) -> None:
        error = None
        try:
            function(*args)
        except SystemExit as leave:
            if leave.code not in (None, 0):
                error = WorkerError(self.name, exit_reason(leave.code))
        except BaseException as cause:
            error = error_from(self.name, child.describe(cause))
            error.__cause__ = cause
        self._finish(error)


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def error_from(name: str, outcome: Mapping[str, str]) -> WorkerError:
    """Returns the error for an exception that `child.describe` described."""
    reason = f"failed with {outcome['type']}: {outcome['message']}"
    kind = outcome["type"].rpartition(".")[2]
    return WorkerError(name, reason, outcome["traceback"], kind)


def exit_reason(code: object) -> str:
    """Returns the failure phrase of a worker that ended with an exit code."""
    return f"ended with exit code {code}; 0 was expected."
