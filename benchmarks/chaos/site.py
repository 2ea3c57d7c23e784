"""One run with its folders, programs, hosts and small disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable

import numpy as np
import psutil

from benchmarks.chaos import numbered_env, reader
from benchmarks.chaos.audit import Stored, Window, forgotten, read_stored
from benchmarks.chaos.network import Hosts
from benchmarks.chaos.programs import MARK, ROOT, Failure, Mark, Program, poll, python

ENVS, EVAL_ENVS = 3, 1
BATCH, LENGTH, CONTEXT = 4, 8, 1
SEQUENCE = LENGTH + CONTEXT  # Streams shorter than a sequence may be dropped.
RATIO = 1.0  # Samples per insert.
SAVE_EVERY = 2.0
DISK = "60m"
UPDATES = "parallel/updates_per_second"  # The metric that shows training.
# Seconds within which a run must begin, go on and end, even on a busy machine.
START, AGAIN, LEAVE = 240.0, 150.0, 90.0

FLAGS = ["--configs", "debug", "--task", "benchmarks.chaos.numbered_env:Numbered"]
FLAGS += ["--logger.outputs", "jsonl", "--run.steps", "1e9", "--replay.size", "1e6"]
FLAGS += ["--run.envs", str(ENVS), "--run.eval_envs", str(EVAL_ENVS)]
FLAGS += ["--run.log_every", "0.5", "--run.report_every", "5"]
FLAGS += ["--run.save_every", str(SAVE_EVERY), "--replay.chunksize", "256"]
FLAGS += ["--batch_size", str(BATCH), "--batch_length", str(LENGTH)]
FLAGS += ["--report_length", "4", "--replay_context", str(CONTEXT)]
FLAGS += ["--run.train_ratio", str(RATIO * LENGTH), "--run.actor_batch", "2"]
for _role in ("env", "replay", "logger", "agent"):
    FLAGS += [f"--run.restarts.{_role}", "1000"]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Which roles run where.

    Args:
      name: in the summary.
      dreamer: whether the agent is a tiny real one rather than a random one.
      process: whether the agent is a process of its own.
      remote_envs: whether the environments are another program, on another host.
      remote_replay: whether the replay is another program.
      disk: whether the logdir is on a disk that can be filled.
    """

    name: str
    dreamer: bool = False
    process: bool = False
    remote_envs: bool = False
    remote_replay: bool = False
    disk: bool = False

    @property
    def shortest(self) -> float:
        """Seconds that a run needs for its start, some faults and its end."""
        return 90.0 if self.dreamer else 40.0


class Site:
    """A run in one topology, and the means to look at it. A context manager.

    Args:
      topology: which roles run where.
      folder: an empty folder for everything.
      notes: list that gets a line for everything that this machine cannot do.
    """

    def __init__(self, topology: Topology, folder: pathlib.Path, notes: list[str]):
        self.topology = topology
        self.folder = folder
        self.disk = folder / "disk"
        self.logdir = self.disk / "run"
        self.traces = folder / "traces"
        self.mark = Mark()
        self.programs: dict[str, Program] = {}
        self.windows: list[Window] = []
        self.excused: set[tuple[int, int]] = set()
        self.damaged: set[str] = set()  # Files that were damaged on purpose.
        self.kept: dict[int, np.ndarray] = {}  # Counters by life that must be stored.
        self.shared_files: set[str] = set()  # Shared memory that has names.
        self.limited = False  # Whether the disk can be filled.
        self.hosts: Hosts | None = None
        self._notes = notes
        self._stack = contextlib.ExitStack()
        self._address = "localhost"
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Site:
        try:
            for folder in (self.disk, self.traces, self.folder / "tmp"):
                folder.mkdir()
            self._stack.callback(self.mark.destroy)
            self._mount()
            self._connect_hosts()
            self._stack.callback(self._destroy_programs)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Starts all programs that are not running."""
        for name in self._names():
            if name not in self.programs or self.programs[name].code is not None:
                self.start_program(name)

    def start_program(self, name: str) -> None:
        """Starts one program."""
        self.programs[name] = Program(
            self._command(name), self.folder / f"{name}.txt", self._environ()
        )

    def roles(self) -> dict[str, int]:
        """Returns the processes that can be harmed, by role."""
        found = {}
        for name, program in self.programs.items():
            if name != "proxy" and program.code is None:
                found.update(program.roles())
                found[name] = program.pid
        return found

    def manifest(self) -> reader.Manifest | None:
        """Returns the newest manifest; None if there is none that can be read."""
        try:
            return reader.read_manifest(self.logdir / "ckpt" / "manifest.json")
        except reader.Unreadable:
            return None

    def saved(self) -> float:
        """Returns when the newest save began; 0 if there is none."""
        manifest = self.manifest()
        return manifest.time if manifest else 0.0

    def wait_for_training(self, seconds: float) -> float:
        """Waits until all envs step and the agent trains; returns how long it took."""
        begin = time.time()
        watch = MetricsWatch(self.logdir / "metrics.jsonl")

        def is_on() -> bool:
            self.check_running()
            return watch.updates() >= 2 and self._stepping(begin)

        if not poll(is_on, seconds):
            envs = "step" if self._stepping(begin) else "do not all step"
            raise Failure(
                f"it did not train again within {seconds:.0f} s: {watch.updates()} "
                f"lines with updates, environments {envs}"
            )
        return time.time() - begin

    def check_running(self) -> None:
        """Raises Failure if a program has ended, since none was told to."""
        for name, program in self.programs.items():
            if program.code is not None:
                raise Failure(f"the program '{name}' has ended with {program.code}")

    def wait_for_save(self, after: float, seconds: float = AGAIN) -> None:
        """Waits for a checkpoint whose save began after a time."""
        if not poll(lambda: self.saved() > after, seconds):
            raise Failure(f"there was no new checkpoint within {seconds:.0f} s")

    def crash(self) -> None:
        """Kills the launcher; its descendants must end soon after it."""
        launcher = self.programs["launcher"]
        family = launcher.family()
        launcher.send(signal.SIGKILL)
        launcher.wait(30)
        if not poll(lambda: not any(map(is_alive, family)), 20):
            raise Failure("children of the launcher outlived it by 20 s")

    def leave(self) -> None:
        """Tells the run to end; all of its programs must then end without an error."""
        begin = time.time()
        self.programs["launcher"].send(signal.SIGTERM)
        for name in ("launcher", "envs"):
            if name in self.programs:
                code = self.programs[name].wait(LEAVE)
                if code is None:
                    raise Failure(f"'{name}' did not end within {LEAVE:.0f} s")
                if code:
                    raise Failure(f"'{name}' ended with {code}")
        if "replay" in self.programs:  # It serves until it is told to end.
            self.programs["replay"].send(signal.SIGTERM)
            if self.programs["replay"].wait(LEAVE) != 0:
                raise Failure("the replay's program did not end well")
        self.expect_loss("end", ("end",), self.saved(), begin)
        self.close_windows()

    def audit(self) -> Stored:
        """Checks the files of a run that is not running at the moment.

        Raises:
          Failure: the newest checkpoint is not whole, or lacks transitions that were
            saved before.
        """
        stored = read_stored(self.logdir, self.damaged)
        wrong = {name: stored.counts[name] for name in ("gaps", "duplicates", "mixed")}
        wrong["forgotten"] = forgotten(self.kept, stored.counters(), self.excused)
        if stored.problems or any(wrong.values()):
            raise Failure(f"checkpoint: {stored.problems[:5]}, {wrong}")
        self.kept = stored.counters(SEQUENCE)
        return stored

    def shown(self, name: str = "launcher") -> str:
        """Returns the output of a program."""
        path = self.folder / f"{name}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def expect_loss(
        self, kind: str, roles: Iterable[str], begin: float, fault: float = 0.0
    ) -> None:
        """Opens a window in which transitions may be lost, until the run goes on.

        Args:
          kind: of the fault.
          roles: roles that go back to their last save.
          begin: when that save began.
          fault: when the fault happens; by default now.
        """
        fault = fault or time.time()
        self.windows.append(Window(kind, begin, fault, math.inf, tuple(roles)))

    def close_windows(self) -> None:
        """Closes all windows, since the run is on again or has ended."""
        now = time.time()
        self.windows = [
            dataclasses.replace(window, end=min(window.end, now))
            for window in self.windows
        ]

    def _stepping(self, since: float) -> bool:
        """Returns whether every environment has made a step since some time."""
        newest: dict[str, float] = {}
        for path in self.traces.glob("*.trace"):
            env = path.stem.split("-")[0]
            newest[env] = max(newest.get(env, 0.0), path.stat().st_mtime)
        on = [moment for moment in newest.values() if moment > since]
        return len(on) == ENVS + EVAL_ENVS

    def _names(self) -> list[str]:
        names = ["launcher"]
        if self.topology.remote_replay:
            names.append("replay")
        if self.topology.remote_envs:
            names += ["proxy", "envs"]
        return names

    def _command(self, name: str) -> list[str]:
        if name == "proxy":
            host, ports = self._address, self._ports
            listen, target = f"{host}:{ports['proxy']}", f"{host}:{ports['actor']}"
            command = python("benchmarks.chaos.proxy", "--listen", listen)
            return [*self._prefix("train"), *command, "--to", target]
        scripts = {"envs": "parallel_envs", "replay": "parallel_replay"}
        script = scripts.get(name, "parallel")
        command = python("dreamerv3.main", *FLAGS, "--script", script)
        command += ["--random_agent", str(not self.topology.dreamer)]
        logdir = self.folder / "unused" if name == "envs" else self.logdir
        command += ["--logdir", str(logdir)]
        for role, port in self._ports.items():
            if role != "proxy":
                if name == "envs" and role == "actor":
                    port = self._ports["proxy"]
                command += [f"--run.{role}_addr", f"{self._address}:{port}"]
        if self.topology.remote_envs:
            command += ["--run.keyfile", str(self.folder / "keys.json")]
        if name == "launcher":
            topology = self.topology
            command += ["--run.agent_process", str(topology.process)]
            command += ["--run.remote_envs", str(topology.remote_envs)]
            command += ["--run.remote_replay", str(topology.remote_replay)]
        return [*self._prefix("env" if name == "envs" else "train"), *command]

    def _environ(self) -> dict[str, str]:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            MARK: self.mark.value,
            numbered_env.TRACES: str(self.traces),
            "PYTHONPATH": os.pathsep.join(path),
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "PYTHONUNBUFFERED": "1",
        }

    def _prefix(self, host: str) -> list[str]:
        return self.hosts.prefix(host) if self.hosts else []

    def _mount(self) -> None:
        if not self.topology.disk:
            return
        options = ["-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk)]
        try:
            subprocess.run(
                ["mount", *options], check=True, capture_output=True, timeout=30
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._notes.append(f"no disk could be mounted, so none was filled: {error}")
            return
        self._stack.callback(
            subprocess.run, ["umount", str(self.disk)], check=True, timeout=30
        )
        self.limited = True

    def _connect_hosts(self) -> None:
        if self.topology.remote_replay:
            self._ports = {"replay": free_port(), "logger": free_port()}
        if not self.topology.remote_envs:
            return
        try:
            self.hosts = self._stack.enter_context(Hosts())
            self._address = self.hosts.address
            self._ports |= {"actor": 7001, "proxy": 7002}
        except OSError as error:
            self._notes.append(f"no network namespaces, loopback instead: {error}")
            self._ports |= {"actor": free_port(), "proxy": free_port()}
        make = "from embodied.rpc import Keys; Keys.generate().save('{}')"
        subprocess.run(
            [sys.executable, "-c", make.format(self.folder / "keys.json")],
            cwd=ROOT,
            env={**os.environ, **self._environ()},
            check=True,
            timeout=60,
        )

    def _destroy_programs(self) -> None:
        for program in self.programs.values():
            program.destroy()


class MetricsWatch:
    """Counts the lines with updates that are added to a metrics file."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._offset = self._size()
        self._found = 0

    def updates(self) -> int:
        """Returns how many lines with updates were written since this was made."""
        size = self._size()
        if size <= self._offset:
            self._offset = size  # A resume may cut off lines after its checkpoint.
            return self._found
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                self._found += json.loads(line).get(UPDATES, 0) > 0
        return self._found

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def is_alive(process: psutil.Process) -> bool:
    """Returns whether a process is still running."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    """Returns a port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
