"""SIGKILL at random moments: no orphan, no leaked memory, no hang."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from waiting_testing import wait_until

from embodied.rpc import BatchServer, Client, Disconnected, Keys, free_port
from embodied.workers import Process

KEYS = Keys.generate()
ROUNDS = [1, pytest.param(50, marks=pytest.mark.slow)]


def shared_blocks(pid):
    """Counts the blocks of shared memory that a process has mapped."""
    gc.collect()
    with open(f"/proc/{pid}/maps") as file:
        return sum("embodied-bulk" in line for line in file)


def serve(port, keys):
    server = BatchServer(port, keys=keys)
    server.bind("act", lambda x: {"image": x["image"]}, batch=2, timeout=0.01)
    server.bind("echo", lambda x: x)
    server.start(block=True)


def ask_for_ever(port, keys):
    with Client(port, keys=keys, slots=1) as client:
        number = 0
        while True:
            image = np.full((64, 64, 3), number % 256, np.uint8)
            acted, echoed = client.act({"image": image}), client.echo(image)
            assert np.array_equal(acted.result(30)["image"], image)
            assert np.array_equal(echoed.result(30), image)
            number += 1


@pytest.mark.parametrize("rounds", ROUNDS)
def test_killed_clients_leave_nothing_in_the_server(rounds, monkeypatch):
    monkeypatch.setattr("embodied.rpc.server.CLIENT_TIMEOUT", 1000.0)
    rng = random.Random(rounds)
    left = []
    before = shared_blocks(os.getpid())  # Blocks of other tests.
    server = BatchServer(free_port(), keys=KEYS)
    server.bind("act", lambda x: x, batch=2, timeout=0.01)
    server.bind("echo", lambda x: x)
    server.sessions.on_leave.append(lambda session: left.append(session.name))
    with server, Client(server.addr, "good", keys=KEYS) as good:
        for number in range(rounds):
            process = Process(ask_for_ever, server.addr, KEYS, start=True)
            wait_until(lambda: server.sessions.slots(None) == 1)
            time.sleep(rng.uniform(0, 0.1))
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            # Its slot is free at once, not when a heartbeat is missed.
            wait_until(lambda: server.sessions.slots(None) == 0)
            assert good.echo(number).result(10) == number
        assert left == ["Client"] * rounds
        wait_until(lambda: shared_blocks(os.getpid()) <= before)
        assert server.stats()["clients"] == 1


@pytest.fixture
def without_collector():
    """Nothing that must be closed may wait until cycles of references are found."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("link", ["auto", "remote"])
def test_clients_outlive_killed_servers(rounds, link, without_collector):
    rng = random.Random(rounds)
    port = free_port()
    descriptors = None
    with Client(port, keys=KEYS, maxinflight=8, link=link) as client:
        for number in range(rounds):
            process = Process(serve, port, KEYS, start=True)
            image = np.full((64, 64, 3), number, np.uint8)
            # Calls are open before the server is up, and while it is killed.
            assert np.array_equal(client.echo(image).result(30), image)
            futures = [client.echo(image) for _ in range(4)]
            time.sleep(rng.uniform(0, 0.05))
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            with Process(serve, port, KEYS, start=True):
                for future in futures:
                    # A call without an answer may or may not have been applied.
                    with contextlib.suppress(Disconnected):
                        assert np.array_equal(future.result(30), image)
                # The first call may still have gone to the server that was killed.
                with contextlib.suppress(Disconnected):
                    client.echo(image).result(30)
                assert np.array_equal(client.echo(image).result(30), image)
            wait_until(lambda: not client.connected)
            if number == 1:
                descriptors = psutil.Process().num_fds()
        # A constant number of blocks and sockets, however many servers there were.
        assert psutil.Process().num_fds() <= (descriptors or 1000) + 8


@pytest.mark.parametrize("link", ["local", "remote"])
def test_a_client_that_does_not_reconnect_is_told_that_the_server_died(link):
    port = free_port()
    with Process(serve, port, KEYS) as process:
        with Client(port, keys=KEYS, autoconn=False, link=link) as client:
            assert client.echo(1).result(30) == 1
            os.kill(process.pid, signal.SIGSTOP)
            future = client.echo(2)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(Disconnected, match="gone"):
                future.result(30)
            with pytest.raises(Disconnected):
                client.echo(3)


PARENT = """
import sys, threading
sys.path[:] = {path!r}
from embodied.rpc import (Keys, free_port)
from embodied.workers import Process
from test_kill import ask_for_ever, serve
keys, port = Keys.generate(), free_port()
workers = [Process(serve, port, keys), Process(serve, free_port(), keys)]
workers += [Process(ask_for_ever, port, keys) for _ in range(3)]
for worker in workers:
    worker.start()
print(*[worker.pid for worker in workers], flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_killed_parent_takes_servers_and_clients_along(rounds):
    rng = random.Random(rounds)
    script = PARENT.format(path=sys.path)
    for _ in range(rounds):
        parent = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 5
        time.sleep(rng.uniform(0, 1))
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
        wait_until(lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids))
