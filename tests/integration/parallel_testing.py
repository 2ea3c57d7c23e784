"""Starts runs as separate programs, and inspects their output and their files."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import psutil
from waiting_testing import wait_until

from embodied.checkpoint import Checkpoint
from embodied.rpc import Keys, free_port

WAIT = 90.0  # Seconds; far above what anything here takes, also on a busy machine.

SMALL = ["--configs", "debug", "--random_agent", "True", "--logger.outputs", "jsonl"]
SMALL += ["--run.envs", "2", "--run.eval_envs", "1", "--run.log_every", "0.25"]
SMALL += ["--run.report_every", "0.25", "--run.save_every", "1000"]
SMALL += [
    "--task",
    "tiny_testing:Task",
    "--batch_size",
    "4",
    "--batch_length",
    "8",
    "--report_length",
    "4",
]


# As few processes as possible, for tests that do not depend on their number.
LEAN = ["--run.eval_envs", "0", "--run.envs_per_worker", "2"]

# Replaces the command line in tests that would mostly wait.
HASTY = pathlib.Path(__file__).parent / "hasty_program.py"


def small(logdir, *argv, script="parallel", steps=300):
    """The arguments of a small run."""
    steps = ["--run.steps", str(steps)]
    return [*SMALL, "--logdir", str(logdir), "--script", script, *steps, *argv]


class Program:
    """A program in a session of its own; leaving the block ends it and its children.

    with Program(*small(tmp_path)) as program:
      program.wait_for("Starting")
      assert program.wait() == 0, program.output()

    Args:
      argv: arguments of `python -m dreamerv3.main`, or of `script` if it is given.
      script: a file to run instead.
      environ: environment variables to add or change.
      prefix: words to put before the command.
    """

    def __init__(self, *argv, script=None, environ=None, prefix=()):
        command = [*prefix, sys.executable]
        command += [str(script)] if script else ["-m", "dreamerv3.main"]
        self._command = [*command, *map(str, argv)]
        self._environ = {**os.environ, "PYTHONPATH": import_path(), **(environ or {})}

    def __enter__(self):
        self._shown = open(_memory_file(), "w+b")
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=self._shown,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self._shown.close()
            raise
        return self

    def __exit__(self, *error):
        try:
            children = self.children()
            self._process.kill()
            self._process.wait()
            for child in psutil.wait_procs(children, timeout=10)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        finally:
            self._shown.close()

    @property
    def pid(self):
        return self._process.pid

    @property
    def running(self):
        return self._process.poll() is None

    def children(self):
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def roles(self):
        """Returns the processes of the roles that have one, by the name of the role."""
        found = {}
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = child.cmdline()
                if any(part.endswith("workers/child.py") for part in command):
                    found[command[-1]] = child
        return found

    def interrupt(self):
        """Sends SIGINT to the process group, as a terminal does for Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, seconds=WAIT):
        """Waits for the end; returns the exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"It did not end.\n{self.output()}") from None

    def output(self):
        """Returns what was printed so far, including stderr."""
        size = os.fstat(self._shown.fileno()).st_size
        return os.pread(self._shown.fileno(), size, 0).decode(errors="replace")

    def wait_until(self, condition, seconds=WAIT):
        """Waits until a condition is true; fails if the program ends before."""
        return wait_until(condition, seconds=seconds, program=self)

    def wait_for(self, text, seconds=WAIT):
        """Waits until a text is printed."""
        self.wait_until(lambda: text in self.output(), seconds)

    def wait_for_step(self, logdir, step, seconds=WAIT):
        """Waits until the metrics of a step are written."""
        self.wait_until(lambda: last_step(logdir) >= step, seconds)

    def wait_for_envs(self, logdir, count, seconds=WAIT):
        """Waits until the actor has reported that it serves `count` environments."""
        self.wait_for_metrics(
            logdir, lambda found: count in found.get("parallel/envs", []), seconds
        )

    def wait_for_metrics(self, logdir, condition, seconds=WAIT):
        """Waits until the metrics written so far fulfil a condition."""
        self.wait_until(lambda: condition(metrics(logdir)), seconds)


_parsed = {}  # By path: number of bytes, parsed lines, and the last line as bytes.


def read_lines(path):
    """Returns the lines of a JSONL file, without one that is still being written.

    Each line is parsed once, since a wait for a line reads the file many times.
    """
    if not path.exists():
        return []
    size, lines, last = _parsed.get(path, (0, [], b""))
    with path.open("rb") as file:
        file.seek(max(0, size - len(last)))
        if file.read(len(last)) != last:  # A write was undone, or a resume cut it.
            size, lines, last = 0, [], b""
        file.seek(size)
        new = file.read()
    new = new[: new.rfind(b"\n") + 1]
    whole = new.splitlines(keepends=True)
    lines = lines + [json.loads(line) for line in whole]
    _parsed[path] = size + len(new), lines, whole[-1] if whole else last
    return list(lines)


def metrics(logdir):
    """Returns all values of every metric, in the order in which they were written."""
    found = {}
    for line in read_lines(pathlib.Path(logdir, "metrics.jsonl")):
        for name, value in line.items():
            found.setdefault(name, []).append(value)
    return found


def last_step(logdir):
    lines = read_lines(pathlib.Path(logdir, "metrics.jsonl"))
    return lines[-1]["step"] if lines else -1


class Saved:
    """The newest checkpoint of a logdir: `saved.step` and `saved["limiter"]`."""

    def __init__(self, logdir):
        self._checkpoint = Checkpoint(pathlib.Path(logdir))
        self._manifest = self._checkpoint.newest()
        assert self._manifest is not None, f"{logdir} has no checkpoint."
        self.tag = self._manifest.tag
        self.step = self._manifest.meta["step"]

    def __getitem__(self, name):
        return self._checkpoint.read_part(self._manifest, name)


def shared_addresses(folder):
    """Flags that all commands of a run share: explicit addresses and a key file."""
    Keys.generate().save(folder / "keys.json")
    flags = ["--run.keyfile", folder / "keys.json"]
    for role in ("actor", "replay", "logger"):
        flags += [f"--run.{role}_addr", f"localhost:{free_port()}"]
    return list(map(str, flags))


def import_path():
    """Returns the PYTHONPATH of programs: the packages, then the folders of helpers.

    In this order, since the folders of helpers have `dreamerv3` and `embodied`, too.
    """
    here = pathlib.Path(__file__).parent
    path = [here.parents[1], here, here.parent, os.environ.get("PYTHONPATH")]
    return os.pathsep.join(str(folder) for folder in path if folder)


def _memory_file():
    return os.memfd_create("output")
