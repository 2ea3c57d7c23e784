"""Shared by the tests of the supervisor."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from embodied.workers import (
    Process,
    RestartPolicy,
    Thread,
)

QUICK = RestartPolicy(restarts=1000, backoff=0.01, backoff_limit=0.05)


ROUNDS = [5, pytest.param(50, marks=pytest.mark.slow)]


@contextlib.contextmanager
def running(supervisor):
    """Runs a supervisor in another thread; what its `run` raises is raised here."""
    with Thread(supervisor.run, name="run") as thread:
        try:
            yield thread
        finally:
            supervisor.stop()
    if thread.error is not None:
        raise thread.error.__cause__


def set_after(seconds):
    """Returns an event that is set after some seconds."""
    event = threading.Event()
    timer = threading.Timer(seconds, event.set)
    timer.daemon = True
    timer.start()
    return event


def status_of(supervisor, name):
    return {status.name: status for status in supervisor.status()}[name]


def make(function, *args, **options):
    return lambda: Process(function, *args, **options)


def reporter(progress, then="step"):
    """Returns the factory of a process that steps once and then does `then`."""

    def work(progress, then):

        progress.step()
        while then == "step":
            time.sleep(0.02)
            progress.step()
        with (
            progress.waiting(then == "beat")
            if then != "hang"
            else contextlib.nullcontext()
        ):
            while not threading.Event().wait(0.1 if then == "beat" else None):
                progress.alive()

    return make(work, progress, then, fds=[progress.fd])


def is_ours(thread):
    return thread.name.startswith(("watch ", "follow "))


@contextlib.contextmanager
def launch(tmp_path, code, **options):
    """Runs a script that can use `say` and the classes of the supervisor."""
    path = tmp_path / "script.py"
    head = """
        import os
        from embodied.workers import (Progress, RestartPolicy, Supervisor)
        from embodied.workers import Process

        def say(*words):
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(code))
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
        **options,
    ) as script:
        try:
            yield script
        finally:
            script.kill()


def read_pid(script, word):
    text = script.stdout.readline()
    assert text.startswith(f"{word} "), text
    return int(text.split()[1])
