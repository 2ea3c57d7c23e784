"""Measures our transport against portal's in one run, on the same work.

    python -m benchmarks.rpc [--quick]

Both sides run with their default settings: ours with keys and, on one machine, the
local link with shared memory. Rows are counted in the served function, so that results
do not depend on when a worker started.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import portal
import psutil

from embodied.rpc import BatchServer, Client, Server, free_port
from embodied.workers import Process

BULK_BYTES = 13_000_000


def main() -> None:
    """Runs all measurements and prints the ratios as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under 60 seconds")
    quick = parser.parse_args().quick
    seconds, rounds = (1.5, 1) if quick else (5.0, 5)
    comparisons: list[tuple[str, str, Callable[[str], float]]] = [
        (
            "16 workers, batch 8, rows/s",
            "act_ratio",
            lambda kind: rows_per_second(kind, 16, 8, 0, seconds),
        ),
        (
            "4 workers of 8 envs, batch 16, rows/s",
            "act_stacked_ratio",
            lambda kind: rows_per_second(kind, 4, 16, 8, seconds),
        ),
        (
            "round trips/s of one client, at the median",
            "latency_ratio",
            lambda kind: latency(kind, seconds),
        ),
        ("13 MB replies, GB/s", "bulk_ratio", lambda kind: bulk(kind, seconds)),
    ]
    result = {}
    print(f"{'':<47} {'portal':>10} {'ours':>10} {'ratio':>8}")
    for title, key, measure in comparisons:
        # Taking turns, so that other load on the machine affects both.
        pairs = [(measure("portal"), measure("ours")) for _ in range(rounds)]
        theirs, ours = (float(np.median(values)) for values in zip(*pairs))
        print(f"{title:<47} {theirs:>10.5g} {ours:>10.5g} {ours / theirs:>7.1f}x")
        if rounds > 1:
            print(f"{'  each round':<47} {spread(pairs)}")
        sys.stdout.flush()
        result[key] = round(ours / theirs, 2)
    result["idle_cpu_percent"] = round(idle("ours", 10.0), 2)
    print(f"{'idle, % of a core':<47} {'':>10} {result['idle_cpu_percent']:>10.3g}")
    extras(1.0 if quick else 5.0)
    print(json.dumps(result))


def spread(pairs: list[tuple[float, float]]) -> str:
    """Returns both figures of every round, which show how stable the medians are."""
    return ", ".join(f"{theirs:.4g} {ours:.4g}" for theirs, ours in pairs)


def extras(seconds: float) -> None:
    """Prints measurements that have no counterpart in portal, for the record."""
    alone, beside = slow_client(seconds)
    lines = {
        "16 workers, batch 8, remote link, rows/s": rows_per_second(
            "ours-remote", 16, 8, 0, seconds
        ),
        "4 workers of 8 envs, remote link, rows/s": rows_per_second(
            "ours-remote", 4, 16, 8, seconds
        ),
        "13 MB replies, remote link, GB/s": bulk("ours-remote", seconds),
        "200 clients in 4 processes, batch 64, rows/s": many_clients(200, seconds),
        "15 workers beside a slow one, of their rate": beside / alone,
    }
    for title, value in lines.items():
        print(f"{title:<47} {'':>10} {value:>10.5g}")


# The work, the same for both.


def observation(rows: int) -> dict[str, np.ndarray]:
    """One observation as environments send it, or a stack of them."""
    single: dict[str, Any] = {
        "image": np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8),
        "reward": np.float32(1),
        "is_first": np.bool_(False),
        "is_last": np.bool_(False),
        "is_terminal": np.bool_(False),
        "envid": np.int32(0),
        "is_eval": np.bool_(False),
    }
    if rows:
        return {key: np.stack([value] * rows) for key, value in single.items()}
    return {key: np.asarray(value) for key, value in single.items()}


def make_client(kind: str, port: int, **kwargs: Any) -> Any:
    """A client of either side."""
    if kind == "portal":
        return portal.Client(port, logging=False)
    link = "remote" if kind == "ours-remote" else "auto"
    return Client(port, link=link, **kwargs)


def act_worker(kind: str, port: int, rows: int) -> None:
    """Asks for actions until it is killed."""
    client = make_client(kind, port, slots=rows or 1)
    call, obs = caller(kind, client, rows), observation(rows)
    while True:
        call(obs).result()


def caller(kind: str, client: Any, rows: int) -> Callable:
    """Returns the function by which a stack of rows is sent."""
    if kind == "portal" or not rows:
        return client.act
    return lambda obs: client.call("act", obs, rows=rows)


class Counted:
    """A policy that computes nothing and counts the rows of its requests."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, obs: dict) -> dict:
        """Returns an action for each row."""
        reward = obs["reward"]
        self.rows += reward.size
        return {"action": np.zeros(reward.shape, np.int32), "reset": obs["is_last"]}


def act_server(kind: str, port: int, batch: int, rows: int, policy: Counted) -> Any:
    """A batch server of either side, not started yet."""
    server: Any
    if kind == "portal":
        server = portal.BatchServer(port, errors=False, logging=False)
        server.bind("act", policy, batch=batch // (rows or 1))
    else:
        server = BatchServer(port)
        server.bind("act", policy, batch=batch)
    return server


# What is measured.


def rows_per_second(
    kind: str, workers: int, batch: int, rows: int, seconds: float
) -> float:
    """Returns env rows served per second, with worker processes that never pause."""
    port, policy = free_port(), Counted()
    server = act_server(kind, port, batch, rows, policy)
    processes = [Process(act_worker, kind, port, rows) for _ in range(workers)]
    with server:
        with_processes(processes)
        try:
            return measured_rate(policy, workers * max(1, rows), seconds)
        finally:
            stop(processes)


def measured_rate(policy: Counted, everyone: int, seconds: float) -> float:
    """Waits until all workers are busy, then counts rows for some seconds."""
    deadline = time.monotonic() + 60
    while policy.rows < 20 * everyone and time.monotonic() < deadline:
        time.sleep(0.1)
    before, start = policy.rows, time.perf_counter()
    time.sleep(seconds)
    return (policy.rows - before) / (time.perf_counter() - start)


def latency(kind: str, seconds: float) -> float:
    """Returns one over the median round trip of one client, in batches of one row."""
    port, policy = free_port(), Counted()
    with act_server(kind, port, 1, 0, policy):
        return run_in_child(round_trips, kind, port, seconds)


def round_trips(kind: str, port: int, seconds: float) -> float:
    """Measures round trips in a process of its own."""
    client, obs, times = make_client(kind, port), observation(0), []
    for _ in range(100):
        client.act(obs).result()
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        client.act(obs).result()
        times.append(time.perf_counter() - start)
    return 1 / float(np.median(times))


def bulk(kind: str, seconds: float) -> float:
    """Returns GB/s of large replies, with two requests open; every byte is read."""
    port = free_port()
    data = np.random.default_rng(0).integers(0, 255, BULK_BYTES, np.uint8)
    server: Any = (
        portal.Server(port, errors=False, logging=False)
        if kind == "portal"
        else Server(port)
    )
    server.bind("sample", lambda: {"data": data})
    with server:
        return run_in_child(consume, kind, port, seconds)


def consume(kind: str, port: int, seconds: float) -> float:
    """Reads replies in a process of its own."""
    client = make_client(kind, port)
    futures = [client.sample(), client.sample()]
    count, start = 0, 0.0
    end = float("inf")
    while time.perf_counter() < end:
        data = futures.pop(0).result()["data"]
        futures.append(client.sample())
        np.asarray(data).view(np.uint64).max()  # Reads every byte.
        del data
        count += 1
        if count == 5:
            start = time.perf_counter()
            end = start + seconds
    return (count - 5) * BULK_BYTES / (time.perf_counter() - start) / 1e9


def idle(kind: str, seconds: float) -> float:
    """Returns the CPU use of two servers and 16 idle clients, in % of a core."""
    ports = [free_port(), free_port()]
    servers = Process(idle_servers, kind, ports)
    clients = [Process(idle_client, kind, ports) for _ in range(16)]
    processes = [servers, *clients]
    with_processes(processes)
    try:
        wait_until_settled(processes)
        before = cpu_seconds(processes)
        time.sleep(seconds)
        return 100 * (cpu_seconds(processes) - before) / seconds
    finally:
        stop(processes)


def wait_until_settled(processes: list[Process]) -> None:
    """Waits until imports are done and all have connected."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        before = cpu_seconds(processes)
        time.sleep(1)
        if cpu_seconds(processes) - before < 0.1:
            return


def idle_servers(kind: str, ports: list[int]) -> None:
    """A server and a batch server that wait."""
    server: Any = (
        portal.Server(ports[0], errors=False, logging=False)
        if kind == "portal"
        else Server(ports[0])
    )
    server.bind("act", lambda: None)
    with server, act_server(kind, ports[1], 8, 0, Counted()):
        threading.Event().wait()


def idle_client(kind: str, ports: list[int]) -> None:
    """A client that is connected to both and waits."""
    clients = [make_client(kind, port) for port in ports]
    for client in clients:
        client.connect()
    threading.Event().wait()


def many_clients(count: int, seconds: float) -> float:
    """Returns rows per second with far more clients than cores."""
    port, policy = free_port(), Counted()
    processes = [Process(client_threads, port, count // 4) for _ in range(4)]
    with act_server("ours", port, 64, 0, policy):
        with_processes(processes)
        try:
            return measured_rate(policy, count, seconds)
        finally:
            stop(processes)


def client_threads(port: int, count: int) -> None:
    """Many clients in one process."""
    threads = [
        threading.Thread(target=act_worker, args=("ours", port, 0), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    threading.Event().wait()


def slow_client(seconds: float) -> tuple[float, float]:
    """Returns rows per second of 15 workers, alone and beside one with 1 s per step."""
    rates = []
    for slow in (0, 1):
        port, policy = free_port(), Counted()
        processes = [Process(act_worker, "ours", port, 0) for _ in range(15)]
        processes += [Process(slow_worker, port) for _ in range(slow)]
        with act_server("ours", port, 8, 0, policy):
            with_processes(processes)
            try:
                rates.append(measured_rate(policy, 15, seconds))
            finally:
                stop(processes)
    return rates[0], rates[1]


def slow_worker(port: int) -> None:
    """Asks for an action once per second."""
    client = make_client("ours", port, slots=1)
    while True:
        client.act(observation(0)).result()
        time.sleep(1)


# Processes.


def with_processes(processes: list[Process]) -> None:
    """Starts all processes."""
    for process in processes:
        process.start()


def stop(processes: list[Process]) -> None:
    """Kills all processes at the same time."""
    threads = [
        threading.Thread(target=process.kill, args=(0,)) for process in processes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_in_child(function: Callable[..., float], *args: Any) -> float:
    """Calls a function in another process and returns its result."""
    port = free_port()
    answers: list[float] = []
    server = Server(port)
    server.bind("answer", lambda value: answers.append(value))
    with server, Process(report, function, args, port) as process:
        process.join()
        if process.error is not None:
            raise process.error
    return answers[0]


def report(function: Callable[..., float], args: tuple, port: int) -> None:
    """Sends the result of a function to the parent."""
    with Client(port) as client:
        client.answer(function(*args)).result(30)


def cpu_seconds(processes: list[Process]) -> float:
    """Returns the CPU time that processes and their children have used."""
    total = 0.0
    for process in processes:
        parent = psutil.Process(process.pid)
        for one in (parent, *parent.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
