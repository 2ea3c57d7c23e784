"""Every call is applied at most once, and exactly once while its server lives."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter

import numpy as np
import pytest
from waiting_testing import wait_until

from embodied.rpc import (
    BatchServer,
    Client,
    Disconnected,
    Keys,
    Server,
    free_port,
    zmq_links,
)
from embodied.rpc.links import Link
from embodied.rpc.sessions import NEW, PROTOCOL, REPEATED, ClientSession, Sessions


class Proxy:
    """Forwards TCP connections to a port, until they are cut."""

    def __init__(self, target):
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.lock = threading.Lock()
        self.pairs = []
        self.broken = False  # Whether new connections are cut in the handshake.
        self.cuts = 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if self.broken:
                near.recv(1)
                near.close()
                self.cuts += 1
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                self.cuts += 1
                continue
            with self.lock:
                self.pairs.append((near, far))
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(
                    target=self.forward, args=(one, other), daemon=True
                )
                thread.start()

    def forward(self, source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            self.shutdown(end)

    def shutdown(self, end):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It is closed already.
        end.close()

    def cut(self):
        with self.lock:
            pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for end in pair:
                self.shutdown(end)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.listener.close()
        self.cut()


@pytest.mark.parametrize("known", [True, False])
def test_handshakes_that_are_cut_are_not_taken_for_wrong_keys(monkeypatch, known):
    monkeypatch.setattr(zmq_links, "FAILED_SECONDS", 0.1 if known else 60.0)
    server = Server(free_port())
    server.bind("echo", lambda x: x)
    with server, Proxy(int(server.addr.split(":")[1])) as proxy:
        proxy.broken = not known
        with Client(proxy.port) as client:
            if known:
                assert client.echo(1).result(30) == 1
            proxy.broken = True
            proxy.cut()
            future = client.echo(2)
            wait_until(lambda: proxy.cuts > zmq_links.FAILED_HANDSHAKES)
            proxy.broken = False
            assert future.result(30) == 2


def test_a_proxy_without_a_server_is_waited_for(monkeypatch):
    """Some proxies accept and close connections while the server is not up yet."""
    monkeypatch.setattr(zmq_links, "FAILED_SECONDS", 0.1)
    monkeypatch.setattr(zmq_links, "GREETING_SECONDS", 0.2)
    server = Server(free_port())
    server.bind("echo", lambda x: x)
    with Proxy(int(server.addr.split(":")[1])) as proxy, Client(proxy.port) as client:
        future = client.echo(1)
        wait_until(lambda: proxy.cuts > zmq_links.FAILED_HANDSHAKES + 2)
        assert not future.done()
        with server:
            assert future.result(30) == 1


class Cutter:
    """Breaks the local links of clients, as a proxy breaks remote ones."""

    def __init__(self, clients):
        self.clients = clients

    def cut(self):
        for client in self.clients:
            link = client._caller._link
            if link is not None:
                link.abort()


@pytest.fixture(params=["local", "remote"])
def link(request):
    return request.param


@pytest.mark.parametrize("cuts", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_calls_survive_cut_connections(cuts, link):
    applied: Counter = Counter()
    rows: Counter = Counter()

    def add(number, data):
        applied[int(number)] += 1
        return {"number": number, "data": data}

    def act(batch):
        rows.update(batch["number"].tolist())
        return {"number": batch["number"]}

    server = BatchServer(free_port(), workers=3)
    server.bind("add", add)
    server.bind("act", act, batch=4, timeout=0.005)
    rng = random.Random(cuts)
    done = threading.Event()
    sent = [0]

    def ask(client, first):
        number = first
        while not done.is_set():
            data = np.full(2000, number)
            added = client.add(np.int64(number), data)
            acted = client.act({"number": np.int64(number)})
            answer = added.result(30)
            assert answer["number"] == number
            assert np.all(answer["data"] == number)
            assert acted.result(30)["number"] == number
            sent[0] += 1
            number += 4

    with server, Proxy(int(server.addr.split(":")[1])) as proxy:
        addr = server.addr if link == "local" else proxy.port
        clients = [Client(addr, link=link, maxinflight=4) for _ in range(2)]
        cutter = Cutter(clients) if link == "local" else proxy
        errors: list[BaseException] = []

        def guarded(*args):
            try:
                ask(*args)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=guarded, args=(clients[index // 2], index))
            for index in range(4)
        ]
        for thread in threads:
            thread.start()
        for _ in range(cuts):
            time.sleep(rng.uniform(0, 0.06))
            cutter.cut()
        done.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        reconnects = sum(client.stats()["reconnects"] for client in clients)
        for client in clients:
            client.close()
    assert not errors, errors[0]
    assert reconnects >= cuts / 5, "the connections were not cut while in use"
    assert set(applied.values()) == {1}
    assert set(rows.values()) == {1}
    assert len(applied) == sent[0]


@pytest.mark.parametrize("restarts", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_calls_to_restarted_servers_are_answered_or_fail(restarts, link):
    """No call is applied twice, and later calls of the client are answered."""
    port, keys = free_port(), Keys.generate()
    applied: Counter = Counter()

    def make_server():
        def add(number, data):
            applied[int(number)] += 1
            return data + number

        server = Server(port, keys=keys, workers=2)
        server.bind("add", add)
        server.start(block=False)
        return server

    answered, failed = set(), set()
    done = threading.Event()
    errors: list[BaseException] = []

    def ask(client):
        try:
            futures, number = [], 0
            while not done.is_set() or futures:
                while len(futures) < 6 and not done.is_set():
                    data = np.zeros(1000)
                    futures.append((number, client.add(np.int64(number), data)))
                    number += 1
                asked, future = futures.pop(0)
                try:
                    assert np.all(future.result(60) == asked)
                    answered.add(asked)
                except Disconnected:
                    failed.add(asked)
        except BaseException as error:
            errors.append(error)

    server = make_server()
    client = Client(port, keys=keys, link=link)
    thread = threading.Thread(target=ask, args=(client,))
    thread.start()
    rng = random.Random(restarts)
    for _ in range(restarts):
        time.sleep(rng.uniform(0.02, 0.15))
        server.close()
        server = make_server()
    done.set()
    thread.join(60)
    assert not thread.is_alive()
    client.close()
    server.close()
    assert not errors, errors[0]
    assert set(applied.values()) == {1}
    assert answered <= applied.keys()
    assert len(answered) > restarts and not answered & failed


def test_a_call_that_a_restarted_server_never_got_is_sent_to_it(link, monkeypatch):
    # No thread listens between calls, so a loss is noticed at the next heartbeat.
    monkeypatch.setattr("embodied.rpc.server.HEARTBEAT", 0.1)
    port, keys = free_port(), Keys.generate()
    with Client(port, keys=keys, link=link) as client:
        early = client.echo("early")
        for number in range(3):
            server = Server(port, keys=keys)
            server.bind("echo", lambda x: x)
            with server:
                assert early.result(30) == "early"
                assert client.echo(number).result(30) == number
            wait_until(lambda: not client.connected)
            early = client.echo("early")


def test_a_client_that_comes_back_by_another_link_continues_its_session(monkeypatch):
    running, gate, applied = threading.Event(), threading.Event(), []

    def add(number, data):
        applied.append(number)
        running.set()
        assert gate.wait(30)
        return data + 1

    keys = Keys.generate()
    server = BatchServer(free_port(), keys=keys)
    server.bind("add", add)
    server.bind("act", lambda obs: {"x": obs["x"] + 1}, batch=2, timeout=0.01)
    with server, Client(server.addr, keys=keys, maxinflight=4) as client:
        gate.set()
        for number in range(2):  # From the second reply on, memory is shared.
            client.add(number, np.zeros(5000)).result(30)
        gate.clear()
        running.clear()
        futures = [client.add(x, np.full(5000, x)) for x in (2, 3)]
        acted = client.act({"x": np.zeros(5000)})
        assert running.wait(30)
        assert acted.result(30)["x"][0] == 1
        (session,) = server.sessions
        before = session.link
        monkeypatch.setattr("embodied.rpc.links.LOCAL_AVAILABLE", False)
        client._caller._link.abort()
        wait_until(lambda: client.connected and session.link not in (None, before))
        assert isinstance(client._caller._link, zmq_links.DealerLink)
        gate.set()
        for x, future in zip((2, 3), futures):
            assert np.all(future.result(30) == x + 1)
        assert client.add(4, np.zeros(5000)).result(30)[0] == 1
        assert client.act({"x": np.zeros(5000)}).result(30)["x"][0] == 1
        assert list(server.sessions) == [session]
    assert applied == [0, 1, 2, 3, 4]


def test_one_slow_call_does_not_hold_up_the_confirmation_of_others():
    """The server keeps no more replies than there are open calls."""
    release = threading.Event()
    server = Server(free_port())
    server.bind("slow", lambda: release.wait(30), workers=1)
    server.bind("fast", lambda x: x)
    with server, Client(server.addr, maxinflight=4) as client:
        slow = client.slow()
        for number in range(500):
            assert client.fast(number).result(10) == number
        (session,) = server.sessions
        assert len(session._replies) <= 4
        release.set()
        assert slow.result(10)
    assert server.rejected == {}


HELLO = {
    "version": PROTOCOL,
    "client": b"c" * 16,
    "name": "x",
    "slots": 0,
    "group": None,
    "info": None,
    "max_inflight": 4,
}


def test_a_call_in_two_copies_is_applied_once():
    session = ClientSession(b"x", HELLO)
    assert session.begin(0, []) == (NEW, None)
    assert session.begin(0, []) == (REPEATED, None)
    session.finish(0, b"reply")
    assert session.begin(0, []) == (REPEATED, b"reply")
    # Call 1 stays open, 2 is answered and confirmed by 3, then 2 arrives again.
    assert session.begin(1, [])[0] == NEW
    assert session.begin(2, [1])[0] == NEW
    session.finish(2, b"reply")
    assert session.begin(3, [1])[0] == NEW
    assert session.begin(2, [1]) == (REPEATED, None)
    # To a new server, calls listed as open are new, and unlisted earlier ones repeated.
    later = ClientSession(b"x", HELLO)
    assert later.begin(7, [5])[0] == NEW
    assert later.begin(5, [])[0] == NEW
    assert later.begin(6, [5]) == (REPEATED, None)


def test_a_client_with_another_link_must_introduce_itself_before_it_is_served():
    """A call that was queued on the way may come ahead of the HELLO."""
    given_up = []
    sessions = Sessions(timeout=8, discard=given_up.append)
    first, second = Link(), Link()
    session = sessions.hello(first, HELLO)
    assert sessions.get(first) is session
    assert sessions.get(second) is None
    assert sessions.hello(second, HELLO) is session
    assert given_up == [first]
    assert sessions.get(first) is None
    assert sessions.get(second) is session
    assert len(sessions) == 1
    sessions.bye(session)
    assert sessions.get(second) is None
    assert len(sessions) == 0
