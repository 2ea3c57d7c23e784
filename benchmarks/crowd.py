"""Many env clients in few processes, and a relay that delays their traffic.

For `benchmarks.scale`: clients do nothing but ask for actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from embodied import Space
from embodied.envs.keys import SIGNALS
from embodied.rpc import Client, Server, free_port
from embodied.run.parallel.owners import worker_info
from embodied.workers import Process

OBS = {"image": Space(np.uint8, (64, 64, 3)), **SIGNALS}
ROW_BYTES = 64 * 64 * 3  # Nearly all of a stored step.
PER_PROCESS = 200  # Env clients.
WAIT_SECONDS = 120.0  # For clients to connect, on a busy machine.
LEAVE = -1  # The phase in which clients leave.


class Crowd:
    """Env clients of one process, whose threads ask for one action after the other.

    Args:
      port: of the actor.
      ids: of the environments.
      stacked: environments in each call of a client.
      groups: calls that a client has open, each for environments of its own.
    """

    def __init__(self, port: int, ids: Sequence[int], stacked: int, groups: int):
        self.errors: list[str] = []
        self.interval = 0.0  # Seconds between two calls of a client.
        self._trips: list[float] = []
        per_client = stacked * groups
        self._clients = []
        for start in range(0, len(ids), per_client):
            own = list(ids[start : start + per_client])
            client = Client(
                port,
                f"env-{own[0]}",
                link="remote",
                slots=len(own),
                group=False,
                info=worker_info(own, f"crowd {ids[0]} of {os.getpid()}"),
            )
            parts = [own[i : i + stacked] for i in range(0, len(own), stacked)]
            self._clients.append((client, parts))
        for client, _ in self._clients:
            client.connect(WAIT_SECONDS)
        for client, parts in self._clients:
            for part in parts:
                threading.Thread(
                    target=self._act, args=(client, part), daemon=True
                ).start()

    def take(self) -> np.ndarray:
        """Returns the seconds of all round trips since the last call."""
        trips, self._trips = self._trips, []
        return np.array(trips, np.float64)

    def close(self) -> None:
        """Closes all clients in order."""
        for client, _ in self._clients:
            client.close()

    def _act(self, client: Client, ids: list[int]) -> None:
        obs, rows = observation(ids), len(ids) if len(ids) > 1 else 0
        rng = np.random.default_rng(ids[0])
        try:
            while True:
                if self.interval:  # Random, so that clients do not ask all at once.
                    time.sleep(self.interval * rng.uniform(0.5, 1.5))
                begin = time.perf_counter()
                client.call("act", obs, rows=rows).result()
                self._trips.append(time.perf_counter() - begin)
        except Exception as error:
            self.errors.append(repr(error))


def observation(ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns the observation of an environment, or a stack of several."""
    count = len(ids)
    stack: dict[str, Any] = {
        key: np.zeros((count, *space.shape), space.dtype) for key, space in OBS.items()
    }
    noise = np.random.default_rng(ids[0]).integers(0, 255, stack["image"].shape)
    stack["image"] = noise.astype(np.uint8)
    stack["envid"] = np.array(ids, np.int32)
    stack["is_eval"] = np.zeros(count, bool)
    return stack if count > 1 else {key: value[0] for key, value in stack.items()}


def run_crowd(
    port: int, control: int, ids: Sequence[int], stacked: int, groups: int
) -> None:
    """Runs a crowd, and reports to the parent until it is told to leave."""
    with Client(control, f"crowd-{ids[0]}") as parent:
        crowd = Crowd(port, ids, stacked, groups)
        phase = 0
        while phase != LEAVE:
            asked = parent.phase(ids[0], phase, crowd.take(), list(crowd.errors))
            phase, crowd.interval = asked.result(WAIT_SECONDS)
            time.sleep(0.05)
        crowd.close()


# The parent's side.


class Crowds:
    """All crowds of env clients, and what they report. A context manager.

    The server's threads write the reports and the thread that measures reads them;
    `_lock` guards them.

    Args:
      port: of the actor, or of a relay in front of it.
      count: number of environments.
      stacked: see Crowd.
      groups: see Crowd.
      per_process: environments of a process.
    """

    def __init__(
        self,
        port: int,
        count: int,
        stacked: int = 1,
        groups: int = 1,
        per_process: int = PER_PROCESS,
    ):
        self.rows = 0  # Answered so far.
        self.stacked = stacked
        self.processes: dict[int, Process] = {}
        self._lock = threading.Lock()
        self._phase = (1, 0.0)
        self._began = time.perf_counter()
        self._trips: list[np.ndarray] = []
        self._heard: dict[int, tuple[int, list[str]]] = {}  # Phase and errors.
        self._control = free_port()
        self._server = Server(self._control)
        self._server.bind("phase", self._hear)
        each = max(1, per_process // (stacked * groups)) * stacked * groups
        self._start = lambda first: Process(
            run_crowd,
            *(port, self._control, range(first, min(count, first + each))),
            *(stacked, groups),
        )
        self._firsts = range(0, count, each)

    def __enter__(self) -> Crowds:
        self._server.start(block=False)
        for first in self._firsts:
            self.start(first)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill(0)
        self._server.close()

    def start(self, first: int) -> None:
        """Starts the process of the environments from `first` on."""
        self.processes[first] = self._start(first)
        self.processes[first].start()

    def dismiss(self) -> None:
        """Tells all clients to leave, and waits for their processes to end."""
        with self._lock:
            self._phase = (LEAVE, 0.0)
        for process in self.processes.values():
            process.join(WAIT_SECONDS)

    def wait(self) -> None:
        """Waits until all crowds have connected and know the present phase."""
        wait_until(
            lambda: all(
                self._heard.get(first, (0, []))[0] == self._phase[0]
                for first, process in self.processes.items()
                if process.running
            ),
            "env clients to connect",
        )

    def measure(self, seconds: float, interval: float = 0.0) -> dict[str, float]:
        """Lets all clients ask for some seconds; returns rate and round trips.

        Args:
          seconds: how long to measure, after at least a quarter as long to warm up.
          interval: mean seconds between calls of a client.
        """
        with self._lock:
            self._phase = (self._phase[0] + 1, interval)
        self.wait()
        time.sleep(max(seconds / 4, 2 * interval))
        with self._lock:
            self._trips, self._began = [], time.perf_counter()
        time.sleep(seconds)
        with self._lock:
            trips = np.concatenate([*self._trips, np.zeros(0)])
            elapsed = time.perf_counter() - self._began
        if not len(trips):
            return {"rows_per_s": 0.0}
        p50, p99 = np.percentile(trips, (50, 99)) * 1e3
        return {
            "rows_per_s": len(trips) * self.stacked / elapsed,
            "p50_ms": p50,
            "p99_ms": p99,
            "longest_ms": trips.max() * 1e3,
        }

    @property
    def errors(self) -> list[str]:
        """Errors of all clients."""
        with self._lock:
            return [error for _, errors in self._heard.values() for error in errors]

    def _hear(
        self, first: int, phase: int, trips: np.ndarray, errors: list[str]
    ) -> tuple[int, float]:
        with self._lock:
            self._heard[int(first)] = (int(phase), list(errors))
            self._trips.append(np.array(trips))
            self.rows += len(trips) * self.stacked
            return self._phase


def wait_until(condition: Callable[[], bool], what: str) -> float:
    """Waits until a condition holds; returns the seconds that it took."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > WAIT_SECONDS:
            raise TimeoutError(
                f"Timed out after {WAIT_SECONDS:.0f} s, waiting for {what}."
            )
        time.sleep(0.05)
    return time.monotonic() - begin


def relay(port: int, target: int, delay: float) -> None:
    """Relays TCP connections, with every byte delayed by `delay` seconds both ways.

    A stand-in for a long cable. Unlike `tc netem`, it works with every kernel and needs
    no privileges.
    """

    async def pump(reader: Any, writer: Any) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                loop.call_later(delay, writer.write, data)
        loop.call_later(delay, writer.close)

    async def connect(reader: Any, writer: Any) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    async def serve() -> None:
        server = await asyncio.start_server(connect, "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    asyncio.run(serve())
