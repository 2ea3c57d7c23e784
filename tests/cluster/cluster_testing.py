"""Starts Ray clusters of several nodes on this machine, and runs on them."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import subprocess
import sys
import time

import psutil
from parallel_testing import SMALL, Program, import_path
from waiting_testing import wait_until

from benchmarks.chaos.audit import read_stored
from benchmarks.chaos.numbered_env import TRACES

# Environments in which every step is unique and leaves a trace.
NUMBERED = ["--task", "benchmarks.chaos.numbered_env:Numbered"]
SERVER = pathlib.Path(__file__).with_name("node_server.py")
MARK = "CLUSTER_MARK"
LEAVE_SECONDS = 60.0
WAIT = 180.0  # Seconds; far above what anything here takes, also on a busy machine.


class LocalCluster:
    """Nodes of a Ray cluster that listen at the loopback address alone.

    with LocalCluster(tmp_path) as cluster:
      node = cluster.add(num_cpus=2)
      cluster.kill(node)

    Args:
      folder: receives the output of Ray and the traces of environments.
    """

    def __init__(self, folder):
        self._log = folder / "cluster.txt"
        self.traces = folder / "traces"
        self.traces.mkdir()
        self.mark = secrets.token_hex(8)
        self.address = ""
        self.environ = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # Despite its name, this keeps Ray at the loopback address on all systems.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            MARK: self.mark,
            TRACES: str(self.traces),
            "PYTHONPATH": import_path(),
            "PYTHONUNBUFFERED": "1",
        }
        self._nodes = []  # Process ids of the raylets.

    def __enter__(self):
        self._output = self._log.open("wb")
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER)],
            env={**os.environ, **self.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
        )
        return self

    def __exit__(self, *error):
        self._server.stdin.close()
        try:
            self._server.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()
        self._output.close()
        left = self.processes()
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)

    def add(self, num_cpus=1, **options):
        """Adds a node and returns its number; the first node runs Ray's own servers."""
        answer = self._ask(f"add {json.dumps({'num_cpus': num_cpus, **options})}")
        self.address = answer["address"]
        self.dashboard = answer["dashboard"]
        self.environ["RAY_ADDRESS"] = self.address
        self._nodes.append(answer["raylet"])
        return len(self._nodes) - 1

    def kill(self, node):
        """Kills all processes of a node at once."""
        self._ask(f"kill {node}")

    def processes(self):
        """Returns all processes of this cluster and its runs that still run."""
        return marked_processes(self.mark)

    def roles(self):
        """Returns the processes of our programs, by name."""
        found = {}
        for process in self.processes():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if any(part.endswith("workers/child.py") for part in command):
                found[command[-1]] = process
        return found

    def acting(self, since):
        """Returns the environments that have made a step since a time."""
        return {
            int(path.stem.split("-")[0])
            for path in self.traces.glob("*.trace")
            if path.stat().st_mtime > since
        }

    def lives(self):
        """Returns the traces of all environments that have acted, one for each life."""
        return set(self.traces.glob("*.trace"))

    def wait_for_actions(self, driver, envs, since):
        """Waits until all environments have made steps; returns how long it took."""
        driver.wait_until(lambda: len(self.acting(since)) == envs, WAIT)
        return time.time() - since

    def node_of(self, role):
        """Returns the number of the node where a program of ours runs."""
        parents = {process.pid for process in self.roles()[role].parents()}
        return next(x for x, pid in enumerate(self._nodes) if pid in parents)

    def run(self, logdir, *argv, steps=10**9, envs=4):
        """Returns the program of a small run on this cluster."""
        flags = ["--run.steps", steps, "--run.envs", envs]
        flags = [*small_run(logdir), *flags, "--ray.head_resources", "head=1", *argv]
        return Program(*flags, environ=self.environ)

    def end_run(self, driver):
        """Terminates a run; checks that it ends cleanly and leaves no process."""
        driver.terminate()
        assert driver.wait(WAIT) == 0, driver.output()
        assert "Finished after" in driver.output()
        assert "Traceback" not in driver.output()
        self.check_nothing_left()

    def check_nothing_left(self):
        """Checks that soon no process of a run is left on any node."""
        wait_until(lambda: not self.roles(), seconds=LEAVE_SECONDS)

    def _ask(self, line):
        self._server.stdin.write(f"{line}\n")
        self._server.stdin.flush()
        for answer in self._server.stdout:
            if answer.startswith("ANSWER "):
                return json.loads(answer.removeprefix("ANSWER "))
        raise AssertionError(f"The nodes have ended.\n{self._log.read_text()}")


def small_run(logdir):
    """Returns the arguments of a small run on a cluster, with remote links."""
    flags = [*SMALL, *NUMBERED, "--script", "ray", "--logdir", str(logdir)]
    flags += ["--run.eval_envs", "0", "--run.link", "remote"]
    return [*flags, "--ray.envs_per_bundle", "2"]


def marked_processes(mark):
    """Returns the processes that have a mark in their environment."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            path = pathlib.Path(f"/proc/{process.pid}/environ")
            ours = needle in path.read_bytes().split(b"\0")
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            pass
    return found


def check_stored(logdir):
    """Checks the newest checkpoint with an independent reader; returns its contents."""
    stored = read_stored(logdir)
    wrong = {name: stored.counts[name] for name in ("gaps", "duplicates", "mixed")}
    assert not stored.problems and not any(wrong.values()), (stored.problems, wrong)
    return stored
