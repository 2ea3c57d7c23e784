"""One actor and one replay with up to 1,000 env clients, over TCP.

    python -m benchmarks.scale [--quick]

The roles are those of a run, each in its process, with a random agent and the remote
link (ZeroMQ with encryption, no shared memory). Many env clients share a process, and
do nothing but ask for actions, each with an observation of 64 x 64 x 3 bytes:

- as fast as they can: rows/s, and how much memory actor and replay need per client;
- at half of that rate: p50 and p99 of a round trip;
- the process of 200 of them is killed, and started again.

Then stacked environments behind a relay that delays every byte, compared with the same
relay without a delay. The last line is one JSON object. Clients and servers share the
processors of this machine, so that rates are lower than on several machines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil

from benchmarks.crowd import (
    OBS,
    PER_PROCESS,
    ROW_BYTES,
    WAIT_SECONDS,
    Crowds,
    relay,
    wait_until,
)
from dreamerv3.cli import factories
from dreamerv3.cli.config import load_config, make_args
from embodied import RandomAgent, Space
from embodied.rpc import Client, free_port
from embodied.run.parallel import parallel_actor, parallel_logger, parallel_replay
from embodied.workers import Process

ACT = {"action": Space(np.int32, (), 0, 17)}
CHUNKSIZE = 64
ERRORS = ("errors", "rejected", "post_errors", "reconnects")
MB = 1e6


# Processes of the roles.


def serve_actor(args: Any) -> None:
    """Runs the actor with an agent that acts at random, until it is killed."""
    barrier = threading.Barrier(2)
    thread = threading.Thread(
        target=parallel_actor, args=(RandomAgent(OBS, ACT), barrier, args), daemon=True
    )
    thread.start()
    barrier.wait()  # In place of the learner; there is no checkpoint to restore.
    thread.join()


def serve_replay(config: Any, args: Any) -> None:
    """Runs the replay until it is killed."""
    parallel_replay(
        lambda: factories.make_replay(config, "replay"),
        lambda: factories.make_replay(config, "replay_eval", "eval"),
        lambda replay, mode: factories.make_stream(config, replay, mode),
        args,
    )


def serve_logger(config: Any, args: Any) -> None:
    """Runs the logger until it is killed."""
    parallel_logger(lambda: factories.make_logger(config), args)


class Roles:
    """Actor, replay and logger of a run, in their processes. A context manager.

    Args:
      count: environments.
      folder: for the logdir.
    """

    def __init__(self, count: int, folder: str):
        self.port = free_port()
        addresses = {"actor": self.port, "replay": free_port(), "logger": free_port()}
        flags = ["--configs", "debug", "--script", "parallel", "--logdir", folder]
        flags += ["--run.envs", str(count), "--run.eval_envs", "0"]
        flags += ["--run.train_ratio", "0", "--run.link", "remote"]
        # A replay needs two chunks for each environment.
        flags += ["--replay.size", "1e6", "--replay.chunksize", str(CHUNKSIZE)]
        flags += ["--logger.outputs", "jsonl", "--run.log_every", "1"]
        for name, port in addresses.items():
            flags += [f"--run.{name}_addr", f"localhost:{port}"]
        self._metrics = pathlib.Path(folder, "metrics.jsonl")
        config = load_config(flags)
        args = make_args(config)
        self._processes = {
            "logger": Process(serve_logger, config, args, name="logger"),
            "replay": Process(serve_replay, config, args, name="replay"),
            "actor": Process(serve_actor, args, name="actor"),
        }

    def __enter__(self) -> Roles:
        for process in self._processes.values():
            process.start()
        self._client = Client(self.port, "benchmark")
        self._client.connect(WAIT_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        for process in self._processes.values():
            process.kill(0)

    def memory(self) -> dict[str, float]:
        """Returns the resident memory of actor and replay in bytes."""
        return {
            name: psutil.Process(self._processes[name].pid).memory_info().rss
            for name in ("actor", "replay")
        }

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the processor time that each role has used."""
        times = {
            name: psutil.Process(process.pid).cpu_times()
            for name, process in self._processes.items()
        }
        return {name: used.user + used.system for name, used in times.items()}

    def errors(self) -> dict[str, float]:
        """Returns the error counts of the links that are not zero, by metric."""
        counts: dict[str, float] = {}
        for line in self._metrics.read_text().splitlines():
            for key, value in json.loads(line).items():
                link = key.startswith(("server/", "client/"))
                if link and key.endswith(ERRORS) and value:
                    counts[key] = max(value, counts.get(key, 0))
        return counts

    def envs(self) -> int:
        """Returns the number of environments whose clients the actor knows."""
        return len(self._client.env_ids().result(WAIT_SECONDS))


@contextlib.contextmanager
def started_roles(count: int) -> Iterator[Roles]:
    """Starts the roles, and warms them up with a few clients."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        with Roles(count, folder) as roles:
            with Crowds(roles.port, min(16, count)) as crowds:
                crowds.measure(1.0)
                crowds.dismiss()
            yield roles


# What is measured.


def many_clients(count: int, seconds: float, vanish: int = 0) -> dict[str, Any]:
    """Measures `count` env clients; at last, kills `vanish` of them if it is not 0."""
    per_process = vanish or PER_PROCESS
    with started_roles(count) as roles:
        before = roles.memory()
        begin = time.monotonic()
        with Crowds(roles.port, count, per_process=per_process) as crowds:
            crowds.wait()
            result: dict[str, Any] = {"connect_s": time.monotonic() - begin}
            full, result["cpu_us_per_row"] = saturated(crowds, roles, seconds)
            after, stored = roles.memory(), crowds.rows * ROW_BYTES
            result["rows_per_s"] = full["rows_per_s"]
            result["saturated"] = {x: full[x] for x in ("p50_ms", "p99_ms")}
            rate = full["rows_per_s"] / count
            half = crowds.measure(seconds, interval=2 / rate)
            result["half_load"] = half
            result["actor_mb_per_client"] = (
                (after["actor"] - before["actor"]) / count / MB
            )
            # Less the stored steps, which are not memory for clients.
            grown = after["replay"] - before["replay"] - stored
            result["replay_mb_per_client"] = grown / count / MB
            result["replay_stored_mb"] = stored / MB
            if vanish:
                result["vanish"] = vanished(crowds, roles, vanish, count, seconds)
            result["errors"] = len(crowds.errors) + len(roles.errors())
            for error in (*crowds.errors[:3], *roles.errors().items()):
                print(f"  error: {error}")
    return result


def saturated(
    crowds: Crowds, roles: Roles, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Lets all clients ask as fast as they can.

    Returns:
      Rates and round trips, and the processor time of each role per row, which is
      meaningful even on a machine with other load.
    """
    before, rows = roles.cpu_seconds(), crowds.rows
    full = crowds.measure(seconds)
    after, rows = roles.cpu_seconds(), crowds.rows - rows
    used = {name: 1e6 * (after[name] - before[name]) / max(1, rows) for name in after}
    return full, used


def vanished(
    crowds: Crowds, roles: Roles, vanish: int, count: int, seconds: float
) -> dict[str, Any]:
    """Kills the process of the first `vanish` clients, and starts it again."""
    before = crowds.measure(seconds)
    crowds.processes[0].kill(0)
    after = crowds.measure(seconds)
    forgotten = wait_until(lambda: roles.envs() == count - vanish, "them to be noticed")
    crowds.start(0)
    back = wait_until(lambda: roles.envs() == count, "them to be back")
    return {
        "clients": vanish,
        "rows_per_s_before": before["rows_per_s"],
        "rows_per_s_after": after["rows_per_s"],
        "longest_ms_before": before["longest_ms"],
        "longest_ms_after": after["longest_ms"],
        "noticed_s": forgotten + 1.25 * seconds,
        "back_s": back,
    }


def delayed(count: int, stacked: int, delay: float, seconds: float) -> dict[str, Any]:
    """Measures environments behind a relay; `stacked` of them share a call.

    Like env workers, clients with several environments have two calls open.
    """
    groups = 2 if stacked > 1 else 1
    port = free_port()
    with started_roles(count) as roles:
        cable = Process(relay, port, roles.port, delay / 2)
        cable.start()
        try:
            with Crowds(port, count, stacked, groups) as crowds:
                crowds.wait()
                result, used = saturated(crowds, roles, seconds)
                if crowds.errors:
                    raise RuntimeError(f"An env client has failed: {crowds.errors[0]}")
        finally:
            cable.kill(0)
    figures = {key: result[key] for key in ("rows_per_s", "p50_ms", "p99_ms")}
    return {**figures, "cpu_us_per_row": used}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all measurements; returns 1 if a client has failed."""
    options = parse(argv)
    result: dict[str, Any] = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    failed = 0
    for count in options.clients:
        vanish = options.vanish if count == max(options.clients) else 0
        found = many_clients(count, options.seconds, vanish)
        failed += found["errors"]
        result[f"clients_{count}"] = found
        show(f"{count} clients", found)
    cases = {}
    for stacked in options.stacked:
        for delay in (0.0, options.delay):
            name = f"{options.envs} envs, {stacked} to a call, {delay * 1e3:.0f} ms"
            found = delayed(options.envs, stacked, delay, options.seconds)
            cases[name] = found
            show(name, found)
    result["delayed"] = cases
    print(json.dumps(rounded(result)))
    return 1 if failed else 0


def show(title: str, found: dict[str, Any]) -> None:
    """Prints the figures of a measurement."""
    print(f"{title}: {json.dumps(rounded(found))}", flush=True)


def rounded(value: Any) -> Any:
    """Returns figures with four digits."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 clients, 1 s each")
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--vanish", type=int, default=PER_PROCESS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--envs", type=int, default=256, help="behind the relay")
    parser.add_argument("--stacked", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--delay", type=float, default=0.05, help="of a round trip")
    options = parser.parse_args(argv)
    if options.quick:
        options.clients, options.vanish, options.seconds = [64], 32, 1.0
    return options


if __name__ == "__main__":
    raise SystemExit(main())
