"""Processes end with their parent, seen from outside: real scripts, real signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import psutil
import pytest
from process_testing import is_gone
from waiting_testing import WAIT, wait_until

# Starts: script → child → (sleep, nested → sleep), and a sibling of the child.
TREE = """
    import os, subprocess, threading
    from embodied.workers import Process

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())

    def leaf():
        say("nested", os.getpid())
        say("sleep", subprocess.Popen(["sleep", "600"]).pid)
        threading.Event().wait()

    def branch():
        say("child", os.getpid())
        say("sleep", subprocess.Popen(["sleep", "600"]).pid)
        with Process(leaf):
            threading.Event().wait()

    def sibling():
        say("sibling", os.getpid())
        threading.Event().wait()

    first, second = Process(branch, start=True), Process(sibling, start=True)
    threading.Event().wait()
"""
TREE_SIZE = 5


@pytest.fixture
def launch(tmp_path):
    """Starts scripts in new sessions, and kills what is left of them after the test.

    All their descendants carry a mark in their environment, so that even those started
    at the moment of a kill are found.
    """
    mark = uuid.uuid4().hex
    scripts = []

    def launch(code, **options):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(code))
        script = subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, "ORPHANS_MARK": mark},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
            **options,
        )
        script.mark = mark
        scripts.append(script)
        return script

    yield launch
    for script in scripts:
        script.kill()
        script.wait()
        script.stdout.close()
    for process in marked(mark):
        process.kill()


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ORPHANS_MARK") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if not is_gone(process.pid)]


def read_tree(script):
    lines = [script.stdout.readline().split() for _ in range(TREE_SIZE)]
    return [(role, psutil.Process(int(pid))) for role, pid in lines]


def test_a_script_needs_no_main_guard(launch, tmp_path):
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "embodied").mkdir(parents=True)
    (elsewhere / "embodied" / "__init__.py").write_text("raise ImportError('wrong')\n")
    (elsewhere / "json.py").write_text("raise ImportError('wrong')\n")
    script = launch(
        """
        import sys
        import helper
        from embodied.workers import Process

        print("script", flush=True)

        class Task:
            factor = 10

        def work(task, x):
            from embodied import workers
            print(task.factor * helper.double(x), sys.argv[0] == __file__, flush=True)

        def fail():
            raise ValueError("on purpose")

        for process in Process(work, Task(), 2), Process(helper.double, 3):
            with process:
                process.join()
                assert process.error is None
        failed = Process(fail, start=True)
        failed.join()
        print("raise ValueError" in failed.error.traceback, flush=True)
        """,
        cwd=elsewhere,
    )
    output, _ = script.communicate(timeout=WAIT)
    assert output.split("\n") == ["script", "40 True", "True", ""]
    assert script.returncode == 0


@pytest.mark.parametrize("system", ["this", "without signals from pipes"])
def test_kill_9_of_the_parent_leaves_nobody(launch, tmp_path, monkeypatch, system):
    if system != "this":
        code = "import fcntl\nif hasattr(fcntl, 'F_SETSIG'): del fcntl.F_SETSIG\n"
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    script = launch(TREE)
    tree = read_tree(script)
    assert sorted(role for role, _ in tree) == [
        "child",
        "nested",
        "sibling",
        "sleep",
        "sleep",
    ]
    script.kill()
    wait_until(lambda: all(is_gone(process.pid) for _, process in tree))
    assert not marked(script.mark)


@pytest.mark.skipif(sys.platform != "linux", reason="Needs signals from pipes.")
def test_kill_9_of_the_parent_ends_a_child_that_hangs_with_the_gil(launch):
    script = launch(
        """
        import threading
        from embodied.workers import Process

        def hang():
            import ctypes
            print("hanging", flush=True)
            ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL during the call.

        process = Process(hang, start=True)
        threading.Event().wait()
        """
    )
    assert script.stdout.readline() == "hanging\n"
    script.kill()
    wait_until(lambda: not marked(script.mark))


def test_a_script_that_ends_takes_its_processes_along(launch):
    script = launch(
        """
        import subprocess, threading
        from embodied.workers import Process

        def work():
            subprocess.Popen(["sleep", "600"])
            print("ready", flush=True)
            threading.Event().wait()

        process = Process(work, start=True)
        input()
        """,
        stdin=subprocess.PIPE,
    )
    assert script.stdout.readline() == "ready\n"
    wait_until(lambda: len(marked(script.mark)) == 3)
    script.stdin.write("\n")
    script.stdin.close()
    assert script.wait(WAIT) == 0
    wait_until(lambda: not marked(script.mark))


def test_sigint_to_the_parents_group_leaves_the_decision_to_the_parent(launch):
    script = launch(
        """
        import os, socket, threading
        from embodied.workers import Process

        here, there = socket.socketpair()

        def work(fd):
            os.write(fd, b"ready")
            os.read(fd, 2)
            os.write(fd, b"alive")

        process = Process(work, there.fileno(), fds=[there.fileno()], start=True)
        try:
            print(here.recv(5).decode(), flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            here.send(b"go")
            print(here.recv(5).decode(), process.join(), process.exitcode, flush=True)
        """
    )
    assert script.stdout.readline() == "ready\n"
    os.killpg(script.pid, signal.SIGINT)
    assert script.stdout.readline() == "alive True 0\n"
    assert script.wait(WAIT) == 0


def test_an_interrupt_stops_the_children_before_it_propagates(launch):
    script = launch(
        """
        import threading
        from embodied.workers import Process

        def work():
            try:
                print("ready", flush=True)
                threading.Event().wait()
            finally:
                print("cleaned", flush=True)

        process = Process(work)
        try:
            with process:
                process.join()
        except KeyboardInterrupt:
            print("interrupted", process.running, process.error, flush=True)
        """
    )
    assert script.stdout.readline() == "ready\n"
    os.killpg(script.pid, signal.SIGINT)
    output, _ = script.communicate(timeout=WAIT)
    assert output.split("\n") == ["cleaned", "interrupted False None", ""]


@pytest.mark.parametrize(
    "rounds", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_kill_9_at_random_moments_leaves_nobody(launch, rounds):
    rng = random.Random(rounds)
    for _ in range(rounds):
        script = launch(TREE)
        if rng.random() < 0.5:
            # Somewhere in the start of the tree, which takes a few tenths of a second.
            time.sleep(rng.uniform(0.0, 0.5))
        else:
            tree = read_tree(script)
            role, victim = rng.choice(tree)
            below = victim.children(recursive=True)
            victim.kill()
            wait_until(
                lambda gone=(victim, *below): all(is_gone(each.pid) for each in gone)
            )
            assert script.poll() is None, f"The end of the {role} ended the script."
        script.kill()
        script.wait()
        wait_until(lambda mark=script.mark: not marked(mark))
