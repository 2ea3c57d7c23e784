"""The other end of `workers.Process`: receives one function call and runs it.

Runs as a script in each child process, before anything else is imported there. It
uses the standard library only, so that a child imports no more than its function
needs.
"""

from __future__ import annotations

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

TERMINATED = 128 + signal.SIGTERM  # Exit code after SIGTERM, as shells have it.
LEAVE_SECONDS = 5.0  # For the threads and exit handlers of a call that failed.
AGAIN_SECONDS = 0.02  # Until an end that was lost is asked for again.


def pack(call: bytes, fds: Iterable[int]) -> bytes:
    """Returns what the child reads from its pipe.

    Args:
      call: the pickled pair of a function and its arguments. It stays opaque until
        the child has the parent's import path and can notice the parent's death.
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
    """Returns what `describe` said of the child's exception, if there was one."""
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    try:
        return json.loads(content)
    except ValueError:  # Killed before or while it was written.
        return None


def main() -> int:
    """Runs the call that the parent sends and returns the exit code."""
    lifeline, report = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
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
        # A thread that never ends must not keep a failed process, and whoever waits
        # for it, alive.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS)
        return 1
    finally:
        # Nothing is left to unwind, and an exception would only disturb the exit.
        if signal.getsignal(signal.SIGALRM) is _terminate:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 0


def _receive(lifeline: int, report: int) -> tuple[Any, tuple[Any, ...]]:
    with open(lifeline, "rb", closefd=False) as stream:
        setup = pickle.load(stream)  # noqa: S301 (only the parent holds the pipe)
    for fd in (lifeline, report, *setup["fds"]):
        os.set_inheritable(fd, False)  # This process decides who gets them next.
    _end_with_parent(lifeline)
    sys.path[:] = setup["path"]
    sys.argv[:] = setup["argv"]
    return pickle.loads(setup["call"])  # noqa: S301 (likewise)


def _end_with_parent(lifeline: int) -> None:
    if hasattr(fcntl, "F_SETSIG"):
        # Linux itself kills the group when the parent's end of the pipe closes, also
        # where native code that hangs with the GIL would hold up the thread below.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: int) -> None:
    """Waits for the parent's end, also by SIGKILL, and ends the whole group."""
    # The parent writes nothing after the call, so this returns at the end of file.
    os.read(lifeline, 1)
    try:
        os.killpg(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)  # Only where this process was not made the leader of a group.


def _terminate(number: int, frame: FrameType | None) -> None:
    """Unwinds the call, so that its `finally` blocks run."""
    # A second SIGTERM must not interrupt what the first one set off.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def _terminate_again(lost: sys.UnraisableHookArgs) -> None:
    """Repeats what `_terminate` did where it could unwind nothing.

    An exception does not leave a finaliser or the callback of a weak reference, which
    may be what the signal has interrupted.
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
