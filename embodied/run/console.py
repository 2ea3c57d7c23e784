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

from embodied.workers import child

# Printed on the first signal by the process that a person has started.
SAVING = "Interrupted: saving, then leaving. Ctrl-C again leaves now."
STOPPING = "Interrupted: stopping. Ctrl-C again leaves now."

SET_SECONDS = 0.1  # For another thread to set the event of a signal.
ERASE_LINE = "\r\x1b[K"  # Control codes for a terminal.

_STDOUT = 1
_USUAL: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


@contextlib.contextmanager
def stop_on_signals(note: str = "") -> Iterator[threading.Event]:
    """Turns the first Ctrl-C or SIGTERM into an event; the second acts as usual.

    This includes signals that were ignored before, as they are for background commands
    of a shell script. In a process that its parent shields from them, only the signal
    of the parent counts (`workers.Process`). Only the main thread of a process can
    handle signals; in another thread they are left alone, and the event is never set.

    A thread of its own sets the event. The interpreter calls a handler once the main
    thread executes Python code again, and a signal that arrives just before that thread
    waits for a lock does not end the wait. To a file descriptor it writes at once.

    Args:
      note: message to print at once on the first signal.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    usual = {child.STOP: signal.SIG_DFL} if child.is_shielded() else _USUAL
    previous = {number: signal.getsignal(number) for number in usual}
    arrived, arrives = os.pipe()
    os.set_blocking(arrives, False)

    def on_signal(number: int, frame: FrameType | None) -> None:
        # So that what follows finds the event set. Not for longer: the signal may have
        # come while this thread holds the lock of the event.
        thread.join(SET_SECONDS)
        signal.set_wakeup_fd(previous_fd)
        for each, handler in previous.items():
            ignored = handler == signal.SIG_IGN
            signal.signal(each, usual[each] if ignored else handler)
        if not thread.is_alive() and signal.SIGINT in previous:
            _repeat_interrupts(arrived)

    def set_stop() -> None:
        while number := os.read(arrived, 1):
            if number[0] in previous:
                if note:
                    # On a line of its own, since terminals show ^C on this one.
                    with contextlib.suppress(OSError):
                        os.write(_STDOUT, f"\n{note}\n".encode())
                stop.set()
                return

    thread = threading.Thread(target=set_stop, name="signals", daemon=True)
    thread.start()
    previous_fd = signal.set_wakeup_fd(arrives, warn_on_full_buffer=False)
    for number in previous:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(arrives)
        thread.join()
        os.close(arrived)


def _repeat_interrupts(arrived: int) -> None:
    """Sends SIGINT again if it came before the handler of the first one was called.

    The interpreter calls it only once for them. SIGTERM is not repeated: programs such
    as `timeout` send it twice, to the process and to its group, and mean it once.
    """
    os.set_blocking(arrived, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            if os.read(arrived, 1)[0] == signal.SIGINT:
                signal.raise_signal(signal.SIGINT)


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Through `print`, since a live display redirects it to the lines above itself.
        # A display of another process is on this line of the terminal: it is erased
        # here, and draws itself again below.
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        erase = ERASE_LINE if sys.stdout.isatty() else ""
        # Nobody may be left to read it, or the disk may be full.
        with contextlib.suppress(OSError):
            print(f"{erase}{kind}{record.getMessage()}", flush=True)
        for handler in logging.getLogger().handlers:
            if record.levelno >= handler.level and not _is_on_terminal(handler):
                handler.handle(record)


def _is_on_terminal(handler: logging.Handler) -> bool:
    """Whether a handler prints to the terminal, where messages would appear twice."""
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    # The handler of absl, which dm_control imports, contains another handler.
    inner = getattr(handler, "python_handler", handler)
    return getattr(inner, "stream", None) in standard


@contextlib.contextmanager
def show_messages() -> Iterator[None]:
    """Prints log messages of the framework, of level INFO and above, in the body.

    Handlers of the root logger get them, too, except for handlers that print, which
    some libraries add when they are imported. Does nothing if messages are printed
    already.
    """
    log = logging.getLogger("embodied")
    if any(isinstance(handler, _Printer) for handler in log.handlers):
        yield
        return
    with take_over(log, _Printer()):
        yield


@contextlib.contextmanager
def take_over(log: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    """Gives records of level INFO and above to this handler, not to parent loggers."""
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)  # An assignment would not clear the cached level.
        log.propagate = propagate
