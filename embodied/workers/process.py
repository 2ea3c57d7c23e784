"""Processes that end with this one and whose failures are noticed. In any parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle

from embodied.workers import child
from embodied.workers.progress import anonymous_file
from embodied.workers.thread import Worker, WorkerError, error_from, exit_reason

# After SIGKILL. A process that is left then hangs in the kernel; nothing can end it.
KILL_SECONDS = 10.0


class Process(Worker):
    """A function call in a fresh Python process, bound to this process's life.

        with Process(parallel_env, make_env, 0, args, name='env-0') as process:
          ...
        # Leaving the block kills the process if it is still running.

    The function and its arguments are cloudpickled, so they may be defined in the
    user's script, which needs no `__main__` guard and is not imported again. The
    child has this process's `sys.path`, standard output and standard error. It
    leads a process group of its own, ignores SIGINT, and on SIGTERM unwinds as by
    `sys.exit`; see `shielded`. When this process ends, in whatever way, the child and
    its group get SIGKILL; when the child ends, the rest of its group gets it.

    A watcher thread waits for the child to end. `_lock` ensures that no signal is sent
    once the child is reaped, when its pid may belong to another process.

    Args:
      fn: the function.
      *args: its arguments.
      name: name of the process in errors; default: the function's name.
      start: whether to start it at once.
      fds: open descriptors that the child inherits under the same numbers.
      env: environment variables for the child besides those of this process.
      shielded: whether only this process stops the child, by a signal of its own, and
        SIGTERM of others is ignored: a host that shuts down sends it to all processes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        start: bool = False,
        fds: Iterable[int] = (),
        env: Mapping[str, str] | None = None,
        shielded: bool = False,
    ):
        super().__init__(fn, args, name)
        self._shielded = shielded
        self._stop_signal = child.STOP if shielded else signal.SIGTERM
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
        """The process id; None before `start`."""
        return None if self._popen is None else self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative for a signal; None until the process has ended."""
        return self._exitcode

    def start(self) -> None:
        """Starts the process; returns before its function runs."""
        with self._lock:
            payload = child.pack(cloudpickle.dumps(self._take_call()), self._fds)
            with contextlib.ExitStack() as always, contextlib.ExitStack() as undo:
                inherited, lifeline = os.pipe()
                always.callback(os.close, inherited)
                undo.callback(os.close, lifeline)  # Ends the child, if there is one.
                # Not a pipe: a long traceback would block the child until it is read,
                # and a descendant that inherited it would delay the end of file.
                report = anonymous_file("report")
                undo.callback(os.close, report)
                popen = self._spawn(inherited, report)
                # In a list that the watcher empties, to free a large call once sent.
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
        """Sends SIGTERM, or its own signal, unless it has ended; does not wait."""
        self._signal(self._stop_signal)

    def kill(self, timeout: float = 1.0) -> bool:
        """Like `terminate`, then SIGKILL to the whole group after `timeout` seconds.

        Returns whether the process has ended. A process that is stopped this way has
        no error, unless its function raised one.
        """
        stop([self], timeout)
        return not self.running

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def _spawn(self, inherited: int, report: int) -> subprocess.Popen:
        # If it is ignored, as a parent may have left it, the exit code of a child that
        # crashes is lost. Suppressed: only the main thread can change it.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Run by path, not as a module: the child runs this version of the script,
        # wherever this process found it and whatever is in the working directory, and
        # does not import the packages around it. With -P, nothing is imported from the
        # script's folder. The child notices the parent's end by the pipe, not by
        # PR_SET_PDEATHSIG, which acts when the thread that called `start` ends.
        command = [sys.executable, "-P", child.__file__, str(inherited), str(report)]
        return subprocess.Popen(
            [*command, str(int(self._shielded)), self.name],
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
            # Suppressed: a SIGCHLD handler of the user has reaped the child.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        else:
            popen.wait()
        with self._lock:
            # Before the child is reaped, which frees the id of its group.
            # Suppressed: the group is empty, or (macOS) consists of a zombie.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)
            code = popen.wait()
            self._reaped = True
        outcome = child.read_report(report)
        os.close(lifeline)
        os.close(report)
        # The signal itself ends a child that has not installed its handler yet.
        stopped = code in (child.TERMINATED, -self._stop_signal)
        self._exitcode = -signal.SIGTERM if stopped else code
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
        """Signals the process unless it has ended; the watcher then kills its group."""
        with self._lock:
            if self._popen is None or self._reaped:
                return
            self._stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._popen.pid, number)


def stop(workers: Iterable[Worker], timeout: float = 1.0) -> None:
    """Terminates all processes, and sends SIGKILL to those left after `timeout`.

    All processes share the deadline, in seconds. An interrupt in between brings SIGKILL
    forward. Threads among the workers are ignored.
    """
    processes = [worker for worker in workers if isinstance(worker, Process)]
    processes = [process for process in processes if process.running]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.terminate()
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
