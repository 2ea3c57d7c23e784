"""The other end of `workers.Process`: receives one function call and runs it.

Runs as a script in each child process, before anything else is imported there. It
uses the standard library only, so that a child imports no more than its function
needs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any

# Signal by which a parent stops a child that is shielded from SIGTERM.
STOP = getattr(signal, "SIGRTMIN", signal.SIGUSR1)
TERMINATED = 128 + signal.SIGTERM  # Exit code after either of them, as in shells.
SHIELDED = "EMBODIED_SHIELDED"  # Environment variable: id of a shielded process.
LEAVE_SECONDS = 5.0  # For threads and exit handlers to end after a failed call.
AGAIN_SECONDS = 0.02  # Until a SystemExit that was lost is raised again.


def pack(call: bytes, fds: Iterable[int]) -> bytes:
    """Returns the message that the child reads from its pipe.

    Args:
      call: the pickled pair of a function and its arguments. The child unpickles it
        only once it has the parent's import path and can notice the parent's death.
      fds: descriptors the child inherits.
    """
    setup = {"path": sys.path, "argv": sys.argv, "fds": list(fds), "call": call}
    return pickle.dumps(setup, protocol=5)


def describe(error: BaseException) -> dict[str, str]:
    """Returns type name, message and traceback of an exception, as plain strings.

    The traceback leaves out the frame that caught the exception.
    """
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        message = str(error)
    except Exception as second:
        message = f"<its message raised {type(second).__name__}>"
    trace = error.__traceback__
    lines = traceback.format_exception(kind, error, trace and trace.tb_next)
    return {"type": name, "message": message, "traceback": "".join(lines)}


def read_report(fd: int) -> dict[str, str] | None:
    """Returns the child's exception as from `describe`; None if there is none."""
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    try:
        return json.loads(content)
    except ValueError:  # Empty, or cut off because the child was killed.
        return None


def is_shielded() -> bool:
    """Whether this process is a child that only its parent stops, by STOP."""
    return os.environ.get(SHIELDED) == str(os.getpid())


def main() -> int:
    """Runs the call that the parent sends and returns the exit code."""
    lifeline, report, shielded = (int(number) for number in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(STOP if shielded else signal.SIGTERM, _terminate)
    if shielded:
        # Not SIG_IGN, which programs that this process starts would inherit.
        signal.signal(signal.SIGTERM, _ignore)
        os.environ[SHIELDED] = str(os.getpid())
    sys.unraisablehook = _terminate_again
    if sys.stderr is not None:
        faulthandler.enable()
    try:
        function, args = _receive(lifeline, report)
        function(*args)
    except SystemExit:
        raise
    except BaseException as error:
        _write(report, json.dumps(describe(error)).encode())
        # A thread that never ends must not keep a failed process alive, nor block
        # those that wait for it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS)
        return 1
    finally:
        # Nothing is left to unwind, and an exception would only disturb the exit.
        if signal.getsignal(signal.SIGALRM) is _terminate:
            signal.setitimer(signal.ITIMER_REAL, 0)
        _replace_terminate(signal.SIG_DFL)
    return 0


def _receive(lifeline: int, report: int) -> tuple[Any, tuple[Any, ...]]:
    with open(lifeline, "rb", closefd=False) as stream:
        setup = pickle.load(stream)  # noqa: S301 (only the parent holds the pipe)
    for fd in (lifeline, report, *setup["fds"]):
        os.set_inheritable(fd, False)  # Its children do not inherit them by default.
    _end_with_parent(lifeline)
    sys.path[:] = setup["path"]
    sys.argv[:] = setup["argv"]
    return pickle.loads(setup["call"])  # noqa: S301 (likewise)


def _end_with_parent(lifeline: int) -> None:
    if hasattr(fcntl, "F_SETSIG"):
        # Linux itself kills the group when the parent's end of the pipe closes, even if
        # native code that holds the GIL hangs and blocks the thread below; unless a
        # sandbox refuses it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: int) -> None:
    """Waits for the parent to end, even by SIGKILL, then kills the whole group."""
    # The parent writes nothing after the call, so this returns at the end of file.
    os.read(lifeline, 1)
    try:
        os.killpg(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)  # Only reached if this process does not lead a group.


def _terminate(number: int, frame: FrameType | None) -> None:
    """Unwinds the call, so that its `finally` blocks run."""
    # A second signal must not interrupt the cleanup that the first one started.
    _replace_terminate(signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def _replace_terminate(action: signal.Handlers) -> None:
    for number in (signal.SIGTERM, STOP):
        if signal.getsignal(number) is _terminate:
            signal.signal(number, action)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Leaves it to the parent to stop this process."""


def _terminate_again(lost: sys.UnraisableHookArgs) -> None:
    """Schedules `_terminate` again if its SystemExit was lost.

    Exceptions do not propagate out of a finaliser or the callback of a weak reference,
    which the signal may have interrupted.
    """
    if isinstance(lost.exc_value, SystemExit) and lost.exc_value.code == TERMINATED:
        signal.signal(signal.SIGALRM, _terminate)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(lost)


def _write(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


if __name__ == "__main__":
    sys.exit(main())
