"""Programs that the chaos test starts: their roles, their output, their end.

Every program is the leader of a session of its own and has the mark of its run in its
environment, so that exactly this program and its descendants can be found.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

MARK = "CHAOS_MARK"
ROLE = re.compile(r"agent|replay|logger|env-\d+(-\d+)?")
ROOT = pathlib.Path(__file__).parents[2]


class Failure(Exception):
    """A promise of the product was not kept; the message says which."""


class Program:
    """A program in a session of its own.

    Args:
      argv: the command.
      output: file to which its output is appended.
      environ: changes to the environment variables.
    """

    def __init__(
        self, argv: Sequence[str], output: pathlib.Path, environ: dict[str, str]
    ):
        self.started = time.time()
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                list(argv),
                cwd=ROOT,
                env={**os.environ, **environ},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def tell(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def family(self) -> list[psutil.Process]:
        """Returns the program and all of its descendants."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def roles(self) -> dict[str, int]:
        """Returns the ids of the processes that are roles, by their names."""
        found = {}
        for process in self.family()[1:]:
            with contextlib.suppress(psutil.Error, IndexError):
                name = process.cmdline()[-1]
                if ROLE.fullmatch(name):
                    found[name] = process.pid
        return found

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the program, but not its descendants, if it is running."""
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Waits for its end; returns the exit code, or None if it did not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.code

    def destroy(self) -> None:
        """Kills the program and all of its descendants."""
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(30)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        psutil.wait_procs(family[1:], timeout=10)


class Mark:
    """The mark in the environment variables of all processes of one run."""

    def __init__(self) -> None:
        self.value = secrets.token_hex(8)

    def processes(self) -> list[psutil.Process]:
        """Returns all processes with the mark, whatever their parents are now."""
        needle = f"{MARK}={self.value}".encode()
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError, psutil.Error):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    process = psutil.Process(int(entry.name))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def usage(self) -> dict[str, float]:
        """Returns memory in MB, descriptors and number of its processes."""
        usage = {"mb": 0.0, "files": 0, "processes": 0}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                usage["mb"] += process.memory_info().rss / 2**20
                usage["files"] += process.num_fds()
                usage["processes"] += 1
        return usage

    def shared_files(self) -> set[str]:
        """Returns the paths of shared memory that its processes have mapped."""
        found: set[str] = set()
        for process in self.processes():
            with contextlib.suppress(OSError):
                text = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
                found.update(re.findall(r"(/dev/shm/\S+)", text))
        return found

    def destroy(self) -> None:
        """Kills all processes with the mark."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def python(*argv: str) -> list[str]:
    """Returns the command that runs a module in this interpreter."""
    return [sys.executable, "-m", *argv]


def poll(condition: Callable[[], object], seconds: float, every: float = 0.1) -> bool:
    """Waits until a condition holds; False if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt, so that everything is cleaned up."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
