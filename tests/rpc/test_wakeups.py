"""No answer waits for the next heartbeat: wake-ups are not lost between threads."""

from __future__ import annotations

import sys
import threading
import time

import psutil
import pytest

from embodied.rpc import Client, Server, free_port

SLOW = 1.0  # Seconds; a lost wake-up would take a heartbeat, two seconds.


@pytest.fixture
def client():
    port = free_port()
    server = Server(port)
    server.bind("echo", lambda x: x)
    with server, Client(port, maxinflight=8) as client:
        client.connect(10)
        yield client


@pytest.fixture
def eager_switches():
    """Threads take turns as often as possible, so that races come out."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("rounds", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_every_answer_arrives_at_once(client, eager_switches, threads, rounds):
    slowest = [0.0] * threads

    def ask(index):
        for number in range(rounds):
            started = time.perf_counter()
            future = client.echo(number)
            if number % 3 == 0:
                # The answer may come before anybody waits for it.
                deadline = time.perf_counter() + 5e-4
                while time.perf_counter() < deadline:
                    pass
            assert future.result(30) == number
            slowest[index] = max(slowest[index], time.perf_counter() - started)

    workers = [threading.Thread(target=ask, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert max(slowest) < SLOW


def test_callbacks_come_without_anybody_waiting(client, eager_switches):
    for number in range(300):
        called = threading.Event()
        started = time.perf_counter()
        client.echo(number).add_callback(lambda _, called=called: called.set())
        assert called.wait(10)
        assert time.perf_counter() - started < SLOW


def test_nobody_spins_after_an_interrupt(client):
    """A wake-up that nobody waited for is taken back, not seen for ever."""
    client.echo(1).result(10)
    client._listener.interrupt()
    started = sum(psutil.Process().cpu_times()[:2])
    time.sleep(1)
    assert sum(psutil.Process().cpu_times()[:2]) - started < 0.3
    assert client.echo(2).result(10) == 2
