"""Runs programs on a real terminal and reads what they display."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time


def run_on_terminal(command, columns=80, seconds=60, **environ):
    """Runs a command on a terminal and returns all that it showed."""
    controller, terminal = pty.openpty()
    size = {"TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, **size, **environ},
        start_new_session=True,
    )
    os.close(terminal)
    deadline = time.monotonic() + seconds
    data = b""
    try:
        while select.select([controller], [], [], max(0, deadline - time.monotonic()))[
            0
        ]:
            try:
                part = os.read(controller, 65536)
            except OSError:  # Linux raises this when the other end has closed.
                part = b""
            if not part:
                break
            data += part
    finally:
        os.close(controller)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"The program goes on. It shows:\n{data!r}") from None
    return data.decode()


def without_codes(text):
    """Returns text without control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def drawn_lines(text):
    """Returns all lines that were drawn, including those drawn over later."""
    parts = re.split("[\r\n]+", without_codes(text))
    return [line.rstrip() for line in parts if line.strip()]
