"""No answer waits for the next heartbeat: wake-ups are not lost between threads."""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from waiting_testing import WAIT, wait_until

from embodied.rpc import BatchServer, Client, Server, free_port
from embodied.rpc.threads import Wakeup

SLOW = 20.0  # Seconds; a lost wake-up would cost a heartbeat.


@pytest.fixture(autouse=True)
def rare_heartbeats(monkeypatch):
    monkeypatch.setattr("embodied.rpc.server.HEARTBEAT", 60.0)
    monkeypatch.setattr("embodied.rpc.server.CLIENT_TIMEOUT", 240.0)


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
    """Makes threads switch as often as possible, to provoke races."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(target, count):
    """Calls a function with 0, 1, 2, ... in threads, and waits for them."""
    workers = [threading.Thread(target=target, args=(i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


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

    in_threads(ask, threads)
    assert max(slowest) < SLOW


def test_callbacks_come_without_anybody_waiting(client, eager_switches):
    for number in range(300):
        called = threading.Event()
        started = time.perf_counter()
        client.echo(number).add_callback(lambda _, called=called: called.set())
        assert called.wait(10)
        assert time.perf_counter() - started < SLOW


def test_nobody_spins_after_an_interrupt(client):
    """A wake-up that no thread waited for is cleared, so that it does not stay set."""
    client.echo(1).result(10)
    client._caller._turn.interrupt()
    started = sum(psutil.Process().cpu_times()[:2])
    time.sleep(1)
    assert sum(psutil.Process().cpu_times()[:2]) - started < 0.3
    assert client.echo(2).result(10) == 2


def by_result(future):
    return future.result(10)


def by_callback(future):
    called = threading.Event()
    future.add_callback(lambda _: called.set())
    assert called.wait(10)
    return future.result(0)


def by_looking(future):
    deadline = time.perf_counter() + 10
    while not future.done():
        assert time.perf_counter() < deadline
        time.sleep(1e-4)
    return future.result(0)


@pytest.mark.parametrize("threads", [1, 3])
def test_ways_to_learn_of_an_answer_mix(client, eager_switches, threads):
    """One waiting thread listens for all; the others must not miss their answers."""
    slowest = [0.0] * threads

    def ask(index):
        choices = random.Random(index)
        for number in range(300):
            learn = choices.choice([by_result, by_callback, by_looking])
            started = time.perf_counter()
            assert learn(client.echo(number)) == number
            slowest[index] = max(slowest[index], time.perf_counter() - started)

    in_threads(ask, threads)
    assert max(slowest) < SLOW


def test_a_callback_outlasts_who_else_waited():
    """When the listening thread leaves, another one has to continue."""
    answers, called = queue.SimpleQueue(), threading.Event()
    server = Server(free_port())
    server.bind("next", lambda: answers.get(timeout=WAIT))
    with server, Client(server.addr) as client:
        client.connect(10)
        listening = threading.Thread(target=lambda: client.next().result(WAIT))
        listening.start()
        wait_until(lambda: client._caller._turn.taken, "a thread that listens")
        client.next().add_callback(lambda _: called.set())
        answers.put("for the thread")
        listening.join()
        answers.put("for the callback")
        assert called.wait(SLOW)


def test_room_is_made_without_anybody_waiting():
    port = free_port()
    server = Server(port)
    server.bind("echo", lambda x: x)
    with server, Client(port, maxinflight=1) as client:
        client.echo(0).result(10)
        started = time.perf_counter()
        client.echo(1)
        assert client.echo(2).result(10) == 2
        assert time.perf_counter() - started < SLOW


def test_waiting_for_one_call_after_another_wakes_nobody(client, monkeypatch):
    for number in range(100):
        assert client.echo(number).result(10) == number
    wakes = []
    wait = client._caller._turn.background

    def background(timeout):
        wakes.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(client._caller._turn, "background", background)
    for number in range(100):
        assert client.echo(number).result(10) == number
    assert len(wakes) < 10  # There may be heartbeats, on a busy machine.


def test_a_closed_wakeup_leaves_the_next_owner_of_its_descriptor_alone():
    wakeup = Wakeup()
    wakeup.close()
    stranger = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        assert stranger == wakeup.fileno()  # The kernel takes the lowest that is free.
        wakeup.set()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(stranger)
        os.eventfd_write(stranger, 1)
        wakeup.clear()
        wakeup.close()
        assert os.eventfd_read(stranger) == 1
    finally:
        os.close(stranger)


def test_a_batch_whose_deadline_passes_before_the_wait_goes_out():
    class Late(BatchServer):
        """Its loop is held up once, between the look for ready batches and the wait."""

        held = False

        def _due(self):
            if not self.held and self._rows_waiting():
                self.held = True
                time.sleep(0.06)
            return super()._due()

    port = free_port()
    server = Late(port)
    server.bind("act", lambda obs: obs, batch=4, timeout=0.05)
    with server, Client(port) as client:
        client.connect(10)
        begin = time.monotonic()
        client.act({"x": np.zeros(3)}).result(10)
    assert server.held and time.monotonic() - begin < SLOW
