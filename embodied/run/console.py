"""Messages to and signals from the person who runs a program. Any process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Notes that the process that a person has started prints at once.
SAVING = "Interrupted: saving, then leaving. Ctrl-C again leaves now."
STOPPING = "Interrupted: stopping. Ctrl-C again leaves now."

ERASE_LINE = "\r\x1b[K"  # Control codes for a terminal.

_STDOUT = 1
_USUAL: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


@contextlib.contextmanager
def stop_on_signals(note: str = "") -> Iterator[threading.Event]:
    """Turns the first Ctrl-C or SIGTERM into an event; the second acts as usual.

    So it does where signals were ignored before, as shells have it for what they run
    in the background of a script. Only the main thread of a process can do so;
    elsewhere signals are left alone.

    Args:
      note: printed at once when the first one comes.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in _USUAL}

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        for each, handler in previous.items():
            ignored = handler == signal.SIG_IGN
            signal.signal(each, _USUAL[each] if ignored else handler)
        if note:
            # Not `print`, which the signal may have interrupted; on a line of its own,
            # since terminals show ^C on this one.
            with contextlib.suppress(OSError):
                os.write(_STDOUT, f"\n{note}\n".encode())

    for number in previous:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Through `print`, since a live display redirects it to above itself. That of
        # another process is on this line of the terminal, and is drawn again below.
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        erase = ERASE_LINE if sys.stdout.isatty() else ""
        print(f"{erase}{kind}{record.getMessage()}", flush=True)
        for handler in logging.getLogger().handlers:
            if record.levelno >= handler.level and not _is_on_terminal(handler):
                handler.handle(record)


def _is_on_terminal(handler: logging.Handler) -> bool:
    """Whether a handler prints, so that a person would read messages twice."""
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    # That of absl, which dm_control brings, has another handler inside.
    inner = getattr(handler, "python_handler", handler)
    return getattr(inner, "stream", None) in standard


@contextlib.contextmanager
def show_messages() -> Iterator[None]:
    """Prints log messages of the framework, of level INFO and above, in the body.

    Handlers of the root logger get them, too, unless they print: some libraries add
    such a one when they are imported. Does nothing where messages are printed already.
    """
    log = logging.getLogger("embodied")
    if any(isinstance(handler, _Printer) for handler in log.handlers):
        yield
        return
    printer, level, propagate = _Printer(), log.level, log.propagate
    log.addHandler(printer)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.propagate = propagate
        log.setLevel(level)
        log.removeHandler(printer)
