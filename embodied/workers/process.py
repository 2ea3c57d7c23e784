"""Processes that end with this one and whose failures are noticed. In any parent."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle

from embodied.workers import child
from embodied.workers.thread import Worker, WorkerError, error_from, exit_reason

# What SIGKILL does not end by then hangs in the kernel, and nobody can end it.
KILL_SECONDS = 10.0


class Process(Worker):
    """A function call in a fresh Python process, bound to this process's life.

        with Process(parallel_env, make_env, 0, args, name='env-0') as process:
          ...
          process.check()
        # Leaving the block kills the process if it is still running.

    The function and its arguments are cloudpickled, so they may be defined in the
    user's script, which needs no `__main__` guard and is not imported again. The
    child has this process's `sys.path`, standard output and standard error. It
    leads a process group of its own, ignores SIGINT, and is unwound like by
    `sys.exit` on SIGTERM. When this process ends, in whatever way, the child and its
    group get SIGKILL; when the child ends, the rest of its group does.

    A watcher thread waits for the child's end. `_lock` makes sure that no signal is
    sent once the child is reaped, when its number may belong to another process.

    Args:
      fn: the function.
      *args: its arguments.
      name: what errors call the process; default: the function's name.
      start: whether to start it at once.
      fds: open descriptors that the child gets under the same numbers.
      env: environment variables for the child besides those of this process.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        start: bool = False,
        fds: Iterable[int] = (),
        env: Mapping[str, str] | None = None,
    ):
        super().__init__(fn, args, name)
        self._fds = tuple(fds)
        self._env = dict(env or {})
        self._popen: subprocess.Popen | None = None
        self._reaped = False
        self._stopping = False
        self._exitcode: int | None = None
        if start:
            self.start()

    @property
    def pid(self) -> int | None:
        """The process's number; None before `start`."""
        return None if self._popen is None else self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None until the end."""
        return self._exitcode

    def start(self) -> None:
        """Starts the process; returns before its function runs."""
        with self._lock:
            payload = child.pack(cloudpickle.dumps(self._take_call()), self._fds)
            with contextlib.ExitStack() as always, contextlib.ExitStack() as undo:
                inherited, lifeline = os.pipe()
                always.callback(os.close, inherited)
                undo.callback(os.close, lifeline)  # Ends the child, if there is one.
                report = _open_report()
                undo.callback(os.close, report)
                popen = self._spawn(inherited, report)
                # In a list that the watcher empties, since the call may be large.
                threading.Thread(
                    target=self._watch,
                    args=(popen, lifeline, report, [payload]),
                    name=f"watch {self.name}",
                    daemon=True,
                ).start()
                undo.pop_all()
            self._popen = popen
            self._call = None

    def terminate(self) -> None:
        """Sends SIGTERM, unless the process is over, and does not wait."""
        self._signal(signal.SIGTERM)

    def kill(self, timeout: float = 1.0) -> bool:
        """Sends SIGTERM, then SIGKILL to the whole group after `timeout` seconds.

        Returns whether the process is over. One that is stopped so has no error,
        unless its function raised one.
        """
        stop([self], timeout)
        return not self.running

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def _spawn(self, inherited: int, report: int) -> subprocess.Popen:
        # By path instead of as a module: the child runs this version of the script,
        # wherever this process found it and whatever lies in the working directory,
        # and does not import the packages around it. With -P the script's folder is
        # no place to import from. The pipe tells the parent's end and not
        # PR_SET_PDEATHSIG, which acts when the thread that called `start` ends.
        command = [sys.executable, "-P", child.__file__, str(inherited), str(report)]
        return subprocess.Popen(
            [*command, self.name],
            stdin=subprocess.DEVNULL,
            pass_fds=(inherited, report, *self._fds),
            env={**os.environ, **self._env},
            start_new_session=True,
        )

    def _watch(
        self, popen: subprocess.Popen, lifeline: int, report: int, payload: list[bytes]
    ) -> None:
        _send(lifeline, payload.pop())
        if hasattr(os, "waitid"):
            # Suppressed: the user's SIGCHLD handler took the child.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        else:
            popen.wait()
        with self._lock:
            # Before the child is reaped, which frees the number of its group.
            # Suppressed: the group is empty, or (macOS) consists of a zombie.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)
            code = popen.wait()
            self._reaped = True
        outcome = child.read_report(report)
        os.close(lifeline)
        os.close(report)
        self._exitcode = -signal.SIGTERM if code == child.TERMINATED else code
        self._finish(self._diagnose(self._exitcode, outcome))

    def _diagnose(
        self, code: int, outcome: dict[str, str] | None
    ) -> WorkerError | None:
        if outcome is not None:
            return error_from(self.name, outcome)
        if code == 0:
            return None
        if self._stopping and code in (-signal.SIGTERM, -signal.SIGKILL):
            return None
        reason = exit_reason(code) if code > 0 else _signal_reason(-code)
        return WorkerError(self.name, reason)

    def _signal(self, number: int) -> None:
        """Signals the process unless it is over; the watcher then ends its group."""
        with self._lock:
            if self._popen is None or self._reaped:
                return
            self._stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._popen.pid, number)


def stop(workers: Iterable[Worker], timeout: float = 1.0) -> None:
    """Sends all processes SIGTERM, then SIGKILL to what is left after `timeout`.

    They share the deadline. An interrupt in between brings SIGKILL forward. Threads
    among the workers are passed over.
    """
    processes = [worker for worker in workers if isinstance(worker, Process)]
    processes = [process for process in processes if process.running]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process._signal(signal.SIGTERM)
        for process in processes:
            process.join(_seconds_to(deadline))
    finally:
        for process in processes:
            process._signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        for process in processes:
            process.join(_seconds_to(deadline))


def _seconds_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _open_report() -> int:
    """Opens an anonymous file for what the child has to say about its end.

    Not a pipe: a long traceback would block a child until somebody reads, and a
    descendant that inherited the pipe would keep it from reaching its end.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("report")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _send(pipe: int, payload: bytes) -> None:
    view = memoryview(payload)
    # Suppressed: the child is dead, which the caller notices next.
    with contextlib.suppress(BrokenPipeError):
        while view:
            view = view[os.write(pipe, view) :]


def _signal_reason(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        name += ", from outside or because the system ran out of memory"
    return f"was killed by {name}."


def run(
    workers: Iterable[Worker], duration: float | None = None, grace: float = 5.0
) -> None:
    """Runs workers until all have ended well or the first one fails.

    Whatever ends the wait, an interrupt included, the processes that are still
    running are stopped. Threads cannot be: those that nobody told to return are left
    behind as daemons.

    Args:
      workers: processes and threads; those not started yet are started.
      duration: seconds after which everything is stopped; None or 0 for no limit.
      grace: seconds between SIGTERM and SIGKILL for processes that are stopped.

    Raises:
      WorkerError: of the worker that failed first.
    """
    workers = list(workers)
    ended: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    deadline = time.monotonic() + duration if duration else None
    try:
        for worker in workers:
            if not worker.started:
                worker.start()
            worker.on_exit(ended.put)
        for _ in workers:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended.get(timeout=left).check()
    except queue.Empty:
        pass  # The duration is over.
    finally:
        stop(workers, grace)
