"""The Ray actor of a bundle: runs its program on the node that Ray has chosen.

In a worker process of Ray. The program's output goes to the log file of this worker;
Ray's dashboard and the driver show it under the name of the bundle. Each start of a
program is a child process, because it has its own signals, roles and perhaps an
accelerator. It always ends with the actor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import elements
import psutil

from dreamerv3.cluster.run_keys import digest, private_keyfile, remove_keyfiles
from embodied.rpc import Keys
from embodied.workers import Process

THREADS = 4  # Of an actor: one runs the program while another one stops it.
# Below the ephemeral ports of outgoing connections, of which Ray has many.
PORTS = range(20000, 32000)
METRICS_SECONDS = 10.0

BundleProgram = Callable[[elements.Config, Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an actor is.

    Attributes:
      host: name of the machine.
      address: IP address of the node.
      ports: free ports of the node, for the servers of a head.
      sees_keys: whether the node sees the run's key file, and thus the run's logdir.
    """

    host: str
    address: str
    ports: tuple[int, ...]
    sees_keys: bool

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"

    def at(self, port: int | None = None) -> str:
        """Returns the address to connect to, with the port if one is given."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return host if port is None else f"{host}:{port}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a program.

    Attributes:
      code: its exit code, or minus the signal that ended it.
      problems: lines that it has printed about a failure.
    """

    code: int
    problems: tuple[str, ...] = ()


class BundleActor:
    """Runs the program of a bundle, one start at a time.

    Threads of Ray call the methods; `_lock` guards the fields.

    Args:
      name: of the bundle.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._number = 0  # Of the start that is running.
        self._stopped = 0  # Number of the last start that is to stop.

    def __repr__(self) -> str:
        return self._name  # Ray puts it before every line.

    def place(self, keyfile: str, expected: str, ports: int = 0) -> Place:
        """Returns where this actor is.

        Args:
          keyfile: path of the run's key file.
          expected: its digest.
          ports: how many to choose.
        """
        import ray

        address = ray.util.get_node_ip_address()
        return Place(
            host=socket.gethostname(),
            address=address,
            ports=free_ports(address, ports),
            sees_keys=digest(keyfile) == expected,
        )

    def run(
        self,
        number: int,
        program: BundleProgram,
        config: elements.Config,
        host: Mapping[str, Any],
        keys: Keys | None,
    ) -> Outcome:
        """Runs a program to its end.

        Args:
          number: of this start, one more than that of the start before.
          program: of this bundle.
          config: of the run.
          host: keys of its `run` block that hold for this start.
          keys: of the run, if this node does not see `host["keyfile"]`.
        """
        report = os.memfd_create("report")
        try:
            with private_keyfile(keys, host["keyfile"]) as keyfile:
                host = {**host, "keyfile": keyfile}
                call = (program, config, host, report)
                process = Process(run_bundle, *call, name=self._name, fds=[report])
                with self._lock:
                    if self._stopped >= number:
                        return Outcome(-signal.SIGTERM)
                    process.start()
                    self._process, self._number = process, number
                with self._metrics(process):
                    process.join()
            code = process.exitcode
            assert code is not None
            problems = read_problems(report)
            if process.error is not None and not problems and code > 0:
                problems = [str(process.error)]
            return Outcome(code, tuple(problems))
        finally:
            with self._lock:
                self._process = None  # Freed here, not while Ray ends this worker.
            os.close(report)

    def stop(self, number: int) -> None:
        """Tells a start to save and leave, even if it has not begun yet."""
        with self._lock:
            self._stopped = max(self._stopped, number)
            process = self._process if self._number == number else None
        if process is not None:
            process.terminate()

    @contextlib.contextmanager
    def _metrics(self, process: Process) -> Iterator[None]:
        """Reports the program's usage to Ray, which only measures the actor itself."""
        left = threading.Event()
        arguments = (process.pid, self._name, left)
        thread = threading.Thread(target=_report_usage, args=arguments, daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()


def free_ports(address: str, count: int) -> tuple[int, ...]:
    """Returns distinct ports of an address that are free at the moment."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            found.append(port)
    return tuple(found)


def _report_usage(pid: int, name: str, left: threading.Event) -> None:
    gauges: list[Any] = []
    known: dict[int, psutil.Process] = {}
    while not left.wait(METRICS_SECONDS):
        gauges = gauges or _make_gauges()
        cores, memory = 0.0, 0.0
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
            # `cpu_percent` covers the time since the last call on the same object.
            known = {x.pid: known.get(x.pid, x) for x in family}
            for process in known.values():
                with contextlib.suppress(psutil.Error, OSError):
                    cores += process.cpu_percent() / 100
                    memory += process.memory_info().rss
        for gauge, value in zip(gauges, (cores, memory)):
            gauge.set(value, {"bundle": name})


def _make_gauges() -> list[Any]:
    from ray.util.metrics import Gauge

    return [
        Gauge("dreamerv3_cores", "Cores that a bundle uses.", ("bundle",)),
        Gauge("dreamerv3_memory_bytes", "Memory that a bundle uses.", ("bundle",)),
    ]


def run_head(
    config: elements.Config, host: Mapping[str, Any], patience: float = 0.0
) -> None:
    """Runs agent, replay and logger of a run, or of one of its replicas.

    Args:
      config: of the run.
      host: keys of its `run` block that hold for this start.
      patience: seconds for which a lost head may still hold the lock of the logdir.
    """
    from dreamerv3.cli.logdir import wait_until_free
    from dreamerv3.cli.scripts import SCRIPTS

    logdir = pathlib.Path(config.logdir)
    owns = config.replica == 0
    if owns:
        wait_until_free(logdir, patience)
    SCRIPTS["parallel"](config, host=host)
    if owns:
        remove_keyfiles(logdir)  # Also those of runs that were killed.


def run_env_bundle(config: elements.Config, host: Mapping[str, Any]) -> None:
    """Runs the environments of a bundle; the arguments are those of `run_head`."""
    from dreamerv3.cli.scripts import SCRIPTS

    flags = {f"run.{key}": value for key, value in host.items()}
    SCRIPTS["parallel_envs"](config.update({"script": "parallel_envs", **flags}))


def run_bundle(
    program: BundleProgram,
    config: elements.Config,
    host: Mapping[str, Any],
    report: int,
) -> None:
    """Runs a program and ends the process with its exit code.

    Args:
      program: of the bundle.
      config: of the run.
      host: keys of its `run` block that hold for this start.
      report: descriptor of a file for the lines that are printed about a failure.
    """
    from dreamerv3.main import exit_code, run_script

    def write(problems: Sequence[str]) -> None:
        os.write(report, json.dumps(list(problems)).encode())

    script = functools.partial(program, config, host)
    try:
        code = exit_code(functools.partial(run_script, config, script), write)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def read_problems(report: int) -> list[str]:
    """Returns the lines about a failure that `run_bundle` has written."""
    content = os.pread(report, os.fstat(report).st_size, 0)
    try:
        return json.loads(content or b"[]")
    except ValueError:  # The program was killed while it wrote them.
        return []
