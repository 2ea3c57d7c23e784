"""Prints what the framework says while a program runs. Any process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Through `print`, since a live display redirects it to above itself.
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        print(f"{kind}{record.getMessage()}", flush=True)


@contextlib.contextmanager
def show_messages() -> Iterator[None]:
    """Prints what the framework logs, from notes on, within the body.

    Does nothing where something shows messages already.
    """
    log = logging.getLogger("embodied")
    if any(isinstance(handler, _Printer) for handler in log.handlers):
        yield
        return
    printer, level = _Printer(), log.level
    log.addHandler(printer)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(printer)
