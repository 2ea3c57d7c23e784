"""Every call is applied exactly once, whatever happens to the connection."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter

import numpy as np
import pytest

from embodied.rpc import BatchServer, Client, Server, connection, free_port


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
    monkeypatch.setattr(connection, "FAILED_SECONDS", 0.1 if known else 60.0)
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
            deadline = time.monotonic() + 30
            while proxy.cuts <= connection.FAILED_HANDSHAKES:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            proxy.broken = False
            assert future.result(30) == 2


@pytest.fixture(params=["memory", "frames"])
def bulk(request):
    return request.param == "memory"


@pytest.mark.parametrize("cuts", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_calls_survive_cut_connections(cuts, bulk):
    applied: Counter = Counter()
    rows: Counter = Counter()

    def add(number, data):
        applied[int(number)] += 1
        return {"number": number, "data": data}

    def act(batch):
        rows.update(batch["number"].tolist())
        return {"number": batch["number"]}

    server = BatchServer(free_port(), workers=3)
    server.bind("add", add, once=True)
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
        clients = [Client(proxy.port, bulk=bulk, maxinflight=4) for _ in range(2)]
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
            proxy.cut()
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


@pytest.mark.parametrize("restarts", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_calls_survive_restarts_from_saved_state(restarts, bulk):
    """State and answered calls are saved together; open calls go to the next server."""
    port = free_port()
    saved = {"applied": {}, "sessions": {}}

    def make_server():
        applied = Counter(saved["applied"])

        def add(number, data):
            applied[int(number)] += 1
            return data + number

        server = Server(port, workers=2)
        server.bind("add", add, once=True)
        server.load(saved["sessions"])
        return server, applied

    total = [0]
    done = threading.Event()
    errors: list[BaseException] = []

    def ask(client):
        try:
            futures = []
            while not done.is_set() or futures:
                while len(futures) < 6 and not done.is_set():
                    number = total[0]
                    total[0] += 1
                    data = np.zeros(1000)
                    futures.append((number, client.add(np.int64(number), data)))
                number, future = futures.pop(0)
                assert np.all(future.result(60) == number)
        except BaseException as error:
            errors.append(error)

    server, applied = make_server()
    server.start(block=False)
    client = Client(port, bulk=bulk)
    thread = threading.Thread(target=ask, args=(client,))
    thread.start()
    rng = random.Random(restarts)
    for _ in range(restarts):
        time.sleep(rng.uniform(0.02, 0.15))
        with server.paused():
            saved["applied"] = dict(applied)
            saved["sessions"] = server.save()
            server.close()  # Nothing is applied after what was saved.
        server, applied = make_server()
        server.start(block=False)
    done.set()
    thread.join(60)
    assert not thread.is_alive()
    client.close()
    server.close()
    assert not errors, errors[0]
    assert set(applied.values()) == {1}
    assert len(applied) == total[0] > restarts


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
        assert len(session.save()["missing"]) <= 4
        release.set()
        assert slow.result(10)
    assert server.rejected == {}


def test_a_call_in_two_copies_is_applied_once():
    from embodied.rpc.session import NEW, PROTOCOL, REPEATED, Session

    hello = {
        "version": PROTOCOL,
        "name": "x",
        "slots": 0,
        "group": None,
        "info": None,
        "max_inflight": 4,
    }
    session = Session(b"x", hello)
    assert session.begin(0, [], True) == (NEW, None)
    assert session.begin(0, [], True) == (REPEATED, None)
    session.finish(0, b"reply")
    assert session.begin(0, [], True) == (REPEATED, b"reply")
    # 1 stays open for long, 2 is answered and confirmed by 3, then 2 turns up again.
    assert session.begin(1, [], False)[0] == NEW
    assert session.begin(2, [1], True)[0] == NEW
    session.finish(2, b"reply")
    assert session.begin(3, [1], True)[0] == NEW
    assert session.begin(2, [1], True) == (REPEATED, None)
    # A new server sees the open ones in order, and nothing below them.
    later = Session(b"x", hello)
    assert later.begin(7, [5], False)[0] == NEW
    assert later.begin(5, [], False)[0] == NEW
    assert later.begin(6, [5], False) == (REPEATED, None)


def test_what_was_worked_on_at_a_save_is_new_after_a_restart():
    from embodied.rpc.session import NEW, PROTOCOL, REPEATED, Session

    hello = {
        "version": PROTOCOL,
        "name": "x",
        "slots": 0,
        "group": None,
        "info": None,
        "max_inflight": 8,
    }
    session = Session(b"x", hello)
    session.begin(0, [], True)
    session.begin(1, [0], True)
    session.begin(2, [0, 1], False)
    session.finish(1, b"one")
    session.finish(2, b"two")
    restored = Session(b"x", hello)
    restored.restore(session.save())
    assert restored.begin(1, [0], True) == (REPEATED, b"one")
    assert restored.begin(0, [], True)[0] == NEW
    assert restored.begin(2, [0, 1], False)[0] == NEW
    assert restored.begin(3, [], False)[0] == NEW


def test_a_restored_client_must_introduce_itself_before_it_is_served():
    """A call that was queued for the server before may come ahead of the HELLO."""
    from embodied.rpc.session import Sessions

    sessions = Sessions(timeout=8)
    saved = {"name": "x", "highest": 3, "missing": [], "replies": {}}
    sessions.load({b"client".hex(): saved})
    assert sessions.get(b"client") is None
    assert sessions.find(b"client") is not None
