"""Faults that functions, the kernel or a host seldom have. They must end nothing."""

from __future__ import annotations

import errno
import gc
import os
import socket
import sys
import threading
import time

import numpy as np
import pytest
from waiting_testing import WAIT, wait_until

from embodied.rpc import (
    BatchServer,
    Client,
    RemoteError,
    Server,
    auth,
    buffers,
    free_port,
    links,
)
from embodied.rpc.connection import RETRY_SECONDS
from embodied.rpc.links import LinkEnded, LocalLink


class Unspeakable(Exception):
    """It cannot be shown."""

    def __str__(self):
        raise ValueError("no text")


def leave():
    sys.exit(3)


def speak():
    raise Unspeakable


@pytest.fixture
def server():
    server = Server(free_port())
    server.bind("leave", leave, workers=1)
    server.bind("speak", speak)
    server.bind("echo", lambda x: x)
    with server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.addr) as client:
        client.connect(WAIT)
        yield client


class TestFunctions:
    def test_one_that_leaves_the_program_is_an_error_of_its_call(self, client):
        for _ in range(2):  # Its only worker is still there.
            with pytest.raises(RemoteError, match="SystemExit"):
                client.leave().result(WAIT)

    def test_an_error_that_cannot_be_shown_is_told(self, client):
        with pytest.raises(RemoteError, match="cannot be shown"):
            client.speak().result(WAIT)

    def test_a_quick_batch_that_leaves_does_not_take_the_loop_along(self):
        leaving = threading.Event()

        def act(data):
            if leaving.is_set():
                leaving.clear()
                sys.exit(1)
            return data

        server = BatchServer(free_port())
        server.bind("act", act, batch=1)
        server.bind("echo", lambda x: x)
        data = {"x": np.zeros(3)}
        with server, Client(server.addr) as client:
            for _ in range(30):
                client.act(data).result(WAIT)
            leaving.set()
            with pytest.raises(RemoteError, match="SystemExit"):
                client.act(data).result(WAIT)
            assert client.echo(5).result(WAIT) == 5
            client.act(data).result(WAIT)

    def test_a_postfn_that_leaves_does_not_stop_the_next(self):
        ran = []

        def post(x):
            ran.append(x)
            sys.exit(1)

        server = Server(free_port())
        server.bind("put", lambda x: (None, x), post)
        with server, Client(server.addr) as client:
            for x in range(40):  # More than may wait for their turn.
                client.put(x).result(WAIT)
        assert ran == list(range(40))

    def test_workers_that_wait_for_their_turn_do_not_wait_for_each_other(self):
        server = Server(free_port(), backlog=4)

        def work(seconds):
            time.sleep(seconds)
            return 0, None

        server.bind("work", work, lambda _: None, workers=2)
        with server:
            clients = [Client(server.addr) for _ in range(13)]
            try:
                for client in clients:
                    client.connect(WAIT)
                # The second call of the first client comes last, but arrived early.
                calls = [clients[0].work(0.5), clients[0].work(0.0)]
                time.sleep(0.1)
                calls += [client.work(0.02) for client in clients[1:]]
                for call in calls:
                    assert call.result(WAIT) == 0
            finally:
                for client in clients:
                    client.close()


def test_a_failure_of_the_server_itself_answers_the_call(server, client, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no memory for the arrays")

    with monkeypatch.context() as patch:
        patch.setattr(server, "_accept", fail)
        with pytest.raises(RemoteError, match="no memory for the arrays"):
            client.echo(1).result(WAIT)
    assert client.echo(2).result(WAIT) == 2
    assert server.rejected["internal"] == 1


class TestLinks:
    def test_a_send_that_fails_ends_the_link(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link, other = LocalLink(ours, 1 << 20), LocalLink(theirs, 1 << 20)

        def fail(frame):
            raise OSError(errno.ENOBUFS, "No buffer space available")

        link._send = fail
        assert not link.send(b"reply")
        with pytest.raises(LinkEnded):
            while True:
                other.receive()
        link.close()
        other.close()

    def test_links_that_end_at_once_are_not_opened_without_pause(
        self, server, monkeypatch
    ):
        connect, opened, whole = links.connect_local, [], threading.Event()

        def connect_badly(*arguments):
            link = connect(*arguments)
            if link is not None and not whole.is_set():
                opened.append(link)
                monkeypatch.setattr(link, "receive", fail_to_receive)
            return link

        def fail_to_receive():
            raise LinkEnded

        monkeypatch.setattr(links, "connect_local", connect_badly)
        with Client(server.addr, link="local") as client:
            begin = time.monotonic()
            wait_until(lambda: len(opened) >= 4)
            count, seconds = len(opened), time.monotonic() - begin
            assert count <= 2 + seconds / RETRY_SECONDS
            whole.set()
            client.connect(WAIT)
            assert client.echo(1).result(WAIT) == 1


class TestBlocks:
    def test_a_larger_one_serves_rather_than_a_new_one(self):
        arena = buffers.Arena()
        arena.allocate(16384).free()
        assert arena.allocate(8192).number == 1
        assert arena.allocate(8192).number == 2

    def test_those_that_are_gone_do_not_count(self, monkeypatch):
        monkeypatch.setattr(buffers, "MAX_OWN", 3 * 8192)
        arena = buffers.Arena()
        for _ in range(10):
            assert arena.allocate(8192) is not None
            gc.collect()


class TestAddresses:
    def answers(self, monkeypatch, *families):
        places = {socket.AF_INET: ("127.0.0.1", 0), socket.AF_INET6: ("::1", 0, 0, 0)}
        found = [(x, socket.SOCK_STREAM, 6, "", places[x]) for x in families]
        monkeypatch.setattr(auth.sockets, "getaddrinfo", lambda *args: found)

    def test_a_name_with_both_kinds_is_that_of_ipv4(self, monkeypatch):
        self.answers(monkeypatch, socket.AF_INET6, socket.AF_INET)
        assert auth.resolve("both") == "127.0.0.1"
        assert not auth.needs_ipv6("both:5000")

    def test_a_name_without_ipv4_is_reached_over_ipv6(self, monkeypatch):
        self.answers(monkeypatch, socket.AF_INET6)
        assert auth.resolve("six") == "[::1]"
        assert auth.needs_ipv6("six:5000")

    def test_a_name_that_is_not_known_yet_is_none_of_both(self, monkeypatch):
        def fail(*args):
            raise socket.gaierror("Name or service not known")

        monkeypatch.setattr(auth.sockets, "getaddrinfo", fail)
        assert not auth.needs_ipv6("later:5000")


def test_a_server_that_never_started_leaves_no_descriptor():
    Server(free_port()).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Server(free_port()).close()
    assert len(os.listdir("/proc/self/fd")) <= before
