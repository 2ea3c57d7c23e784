"""Bad peers harm only their own calls: a good client is served throughout."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import struct
import threading
import time

import msgpack
import numpy as np
import psutil
import pytest
import zmq
from waiting_testing import wait_until

from embodied.rpc import (
    BatchServer,
    Client,
    Keys,
    RemoteError,
    WireError,
    auth,
    free_port,
    links,
    wire,
    zmq_links,
)
from embodied.rpc.sessions import PROTOCOL
from embodied.workers import Process

KEYS = Keys.generate()
SCHEMA = {"image": (np.uint8, (8, 8, 3)), "reward": (np.float32, ())}


@pytest.fixture
def server():
    server = BatchServer(free_port(), keys=KEYS, max_bytes=1 << 22)
    server.bind("echo", lambda x: x)
    server.bind("act", lambda x: x, batch=4, timeout=0.01, schema=SCHEMA)
    server.bind("loose", lambda x: x, batch=4, timeout=0.01)
    with server:
        yield server


def port_of(server):
    return int(server.addr.split(":")[1])


@pytest.fixture
def good(server):
    with Client(port_of(server), "good", keys=KEYS) as client:
        yield client
        # Whatever a test did, the good client is served as before.
        assert client.echo("still here").result(10) == "still here"
        row = client.act(observation(7)).result(10)
        assert row["reward"] == 7


def observation(reward=0):
    return {"image": np.zeros((8, 8, 3), np.uint8), "reward": np.float32(reward)}


class Peer:
    """An authenticated client that can send any bytes, over either link."""

    def __init__(self, server, link, hello=True):
        self.link = link
        self.codec = wire.Codec()
        self.hello = {**HELLO, "client": os.urandom(16)}
        if link == "remote":
            self.context = zmq.Context()
            self.socket = zmq_links._client_socket(
                self.context, server.addr, self.hello["client"], KEYS
            )
            self.socket.connect(f"tcp://{server.addr}")
            self.socket.sndtimeo = self.socket.rcvtimeo = 10_000
        else:
            self.local = links.connect_local(server.addr, KEYS, 1 << 30)
        if hello:
            self.send_tree(wire.HELLO, self.hello)
            assert self.receive().kind == wire.WELCOME

    def frame(self, kind, tree, seq=wire.NO_CALL, method="", **kwargs):
        spec, arrays = self.codec.flatten(method, tree if method else [tree])
        return wire.encode(kind, seq, spec, arrays, **kwargs)

    def send(self, frame):
        if self.link == "remote":
            self.socket.send(frame)
        else:
            self.local.send(frame)

    def send_tree(self, kind, tree, **kwargs):
        self.send(self.frame(kind, tree, **kwargs))

    def receive(self):
        if self.link == "remote":
            return self.codec.decode(self.socket.recv())
        poll = select.poll()
        poll.register(self.local.fileno, select.POLLIN)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            poll.poll(100)
            self.local.flush()
            for frame in self.local.receive():
                return self.codec.decode(frame)
        raise TimeoutError

    def drain(self):
        """Discards all frames that have arrived."""
        if self.link == "remote":
            while self.socket.poll(0):
                self.socket.recv()
        else:
            self.local.flush()
            while self.local.receive():
                pass

    def error(self):
        message = self.receive()
        assert message.kind == wire.ERROR
        return message.value()["message"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.link == "remote":
            self.context.destroy(linger=0)
        else:
            self.local.close()


@pytest.fixture(params=["local", "remote"])
def link(request):
    return request.param


HELLO = {
    "version": PROTOCOL,
    "name": "peer",
    "slots": 0,
    "group": None,
    "info": None,
    "max_inflight": 16,
    "client": b"x" * 16,
}


def test_garbage_is_counted_and_ignored(server, good, link):
    with Peer(server, link) as peer:
        for garbage in (b"x", b"EMB1", os.urandom(32), os.urandom(5000)):
            peer.send(garbage)
        wait_until(lambda: server.rejected.get("undecodable") == 4)


def test_multipart_messages_are_ignored(server, good):
    with Peer(server, "remote") as peer:
        peer.socket.send_multipart([b"a", b"b", b"c"])
        wait_until(lambda: server.rejected.get("parts") == 1)


def test_half_a_message_is_ignored(server, good, link):
    with Peer(server, link) as peer:
        frame = peer.frame(wire.CALL, (observation(),), seq=0, method="act")
        for cut in range(17, len(frame), 17):
            peer.send(frame[:cut])
        wait_until(
            lambda: server.rejected.get("undecodable", 0) >= len(frame) // 17 - 1
        )


def test_an_unknown_method_gets_an_error_that_names_the_known_ones(server, good):
    with pytest.raises(RemoteError, match=r"unknown method.*act, echo, loose"):
        good.nothing(1).result(10)


def test_a_call_without_hello_is_asked_to_introduce_itself(server, good, link):
    with Peer(server, link, hello=False) as peer:
        peer.send_tree(wire.CALL, (1,), seq=0, method="echo")
        assert peer.receive().kind == wire.STRANGER


@pytest.mark.parametrize(
    "hello",
    [
        None,
        3,
        {},
        {**HELLO, "version": 99},
        {**HELLO, "client": "x" * 16},
        {**HELLO, "client": b"short"},
        {**HELLO, "slots": -1},
        {**HELLO, "slots": "many"},
        {**HELLO, "max_inflight": None},
        {**HELLO, "group": {}},
    ],
)
def test_a_bad_hello_gets_an_error(server, good, hello, link):
    with Peer(server, link, hello=False) as peer:
        peer.send_tree(wire.HELLO, hello)
        assert peer.error()
    assert server.rejected["hello"] == 1


def test_an_observation_of_another_shape_says_what_was_expected(server, good):
    wrong = {**observation(), "image": np.zeros((8, 9, 3), np.uint8)}
    expected = r"'image': expected uint8 of shape \(8, 8, 3\), got .*\(8, 9, 3\)"
    with pytest.raises(RemoteError, match=expected):
        good.act(wrong).result(10)
    wrong = {**observation(), "reward": np.float64(0)}
    with pytest.raises(RemoteError, match="'reward': expected float32"):
        good.act(wrong).result(10)
    with pytest.raises(RemoteError, match=r"missing keys \['image'\]"):
        good.act({"reward": np.float32(0)}).result(10)


def test_without_a_schema_odd_rows_have_a_batch_of_their_own(server, good):
    odd = good.loose({"x": np.zeros(3)})
    even = [good.loose({"x": np.full(2, i)}) for i in range(4)]
    assert [x.result(10)["x"][0] for x in even] == [0, 1, 2, 3]
    assert odd.result(10)["x"].shape == (3,)


def test_a_row_that_came_while_all_were_busy_waits_no_longer_than_the_timeout(
    monkeypatch,
):
    # Otherwise, a heartbeat would wake the loop, too.
    monkeypatch.setattr("embodied.rpc.server.HEARTBEAT", 60.0)
    monkeypatch.setattr("embodied.rpc.server.CLIENT_TIMEOUT", 240.0)
    busy, release = threading.Event(), threading.Event()

    def work(x):
        busy.set()
        release.wait(10)
        return x

    server = BatchServer(free_port(), keys=KEYS)
    server.bind("work", work, batch=2, timeout=0.3)
    with server, Client(port_of(server), keys=KEYS) as client:
        full = [client.work({"x": np.zeros(1)}) for _ in range(2)]
        assert busy.wait(10)
        short = client.work({"x": np.ones(1)})
        wait_until(lambda: server.stats()["batch_waiting"] == 1)
        release.set()  # Before the timeout is over, so that the loop has to wake.
        assert [x.result(10)["x"] for x in full] == [0, 0]
        assert short.result(10)["x"] == 1


def test_oversized_arguments_are_refused_before_they_are_sent(server, good):
    good.connect(10)
    with pytest.raises(WireError, match="the server takes 4194304"):
        good.echo(np.zeros(5_000_000, np.uint8))


def test_an_oversized_message_ends_only_its_connection(server, good, link):
    with Peer(server, link) as peer:
        peer.send(b"x" * ((1 << 23) + 1))
        with contextlib.suppress(zmq.ZMQError):
            peer.send(b"y")
    with Peer(server, link) as peer:
        # Dimensions whose product is far beyond any memory.
        array = msgpack.ExtType(1, msgpack.packb(["<f8", [1 << 40, 1 << 40]]))
        spec = msgpack.packb(["echo", array])
        head = wire.PRELUDE.pack(wire.MAGIC, wire.CALL, 0, 0, len(spec), 0, 0)
        peer.send(head + spec)
        wait_until(lambda: server.rejected.get("undecodable") == 1)


def test_memory_that_was_not_passed_is_refused(server, good, link):
    expected = "shares no memory" if link == "remote" else "no such block"
    with Peer(server, link) as peer:
        for seq, number in enumerate([1, 99, 0]):
            frame = peer.frame(
                wire.CALL,
                (np.zeros(4096, np.uint8),),
                seq=seq,
                method="echo",
                request=number,
                in_memory=True,
            )
            peer.send(frame)
            assert expected in peer.error()


def test_a_client_cannot_have_more_calls_open_than_it_said(server, good, link):
    with Peer(server, link) as peer:
        for seq in range(HELLO["max_inflight"] + 1):
            others = list(range(seq))
            peer.send_tree(wire.CALL, (seq,), seq=seq, method="echo", open=others)
        kinds = [peer.receive().kind for _ in range(HELLO["max_inflight"] + 1)]
        assert kinds.count(wire.ERROR) == 1
    assert server.rejected["credits"] == 1


def test_a_client_that_never_reads_is_held_to_a_bound(server, good, link):
    process = psutil.Process()
    before = process.memory_info().rss
    payload = (np.zeros(1 << 16, np.uint8),)
    with Peer(server, link) as peer:
        if link == "remote":
            peer.socket.rcvhwm = 1
        for seq in range(4000):
            # It claims to have received every reply, so credits do not stop it.
            peer.send(peer.frame(wire.CALL, payload, seq=seq, method="echo"))
            if link == "local":
                peer.local.flush()
        wait_until(lambda: server.stats()["waiting"] == 0)
        assert good.echo(1).result(10) == 1
        # 4,000 replies would be 262 MB; a link may hold 512 of them.
        assert process.memory_info().rss - before < 150e6


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_service_is_normal_soon_after_a_flood_of_connections(server, good, count):
    good.connect(10)
    host, port = server.addr.split(":")
    connections = []
    for _ in range(count):
        try:
            connections.append(socket.create_connection((host, int(port)), 1))
        except OSError:
            pass  # The backlog is full, which harms only the flood.
    assert good.echo(1).result(10) == 1
    for connection in connections:
        connection.close()
    started = time.monotonic()
    with Client(port_of(server), keys=KEYS) as client:
        assert client.echo(2).result(10) == 2
    assert time.monotonic() - started < 10


def test_a_connection_that_is_opened_and_closed_costs_nothing_afterwards(server, good):
    good.connect(10)
    for _ in range(20):
        socket.create_connection(("127.0.0.1", port_of(server))).close()
    good.echo(1).result(10)
    process = psutil.Process()
    before = sum(process.cpu_times()[:2])
    time.sleep(1)
    assert sum(process.cpu_times()[:2]) - before < 0.2


def test_a_raw_connection_that_talks_nonsense_is_closed(server, good):
    with socket.create_connection(("127.0.0.1", port_of(server)), 10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + struct.pack("<Q", 1 << 60) * 4)
        raw.settimeout(15)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):  # Until the server closes it.
                pass


def slow_reader(port, keys, link):
    with Client(port, "stopped", keys=keys, slots=1, link=link) as client:
        while True:
            client.act(observation()).result()


def test_a_stopped_client_delays_nobody(server, good, link):
    with Process(slow_reader, port_of(server), KEYS, link, start=True) as process:
        wait_until(lambda: any(x.name == "stopped" for x in server.sessions))
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        for index in range(50):
            assert good.act(observation(index)).result(10)["reward"] == index
        assert time.monotonic() - started < 10
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("count", [2000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_malformed_messages_to_a_live_server(server, good, count, link):
    """Mutations of good messages: the server goes on, and its memory is bounded."""
    rng = random.Random(count)
    process = psutil.Process()
    good.connect(10)
    peer = Peer(server, link)
    frames = [
        peer.frame(wire.HELLO, peer.hello),
        peer.frame(wire.CALL, (observation(),), seq=3, method="act"),
        peer.frame(
            wire.CALL, ({"x": np.arange(5)}, "text", None), seq=4, method="echo"
        ),
        peer.frame(
            wire.CALL,
            (np.zeros(9),),
            seq=5,
            method="echo",
            request=1,
            open=[1, 2, 3],
        ),
        peer.frame(wire.BYE, None),
        peer.frame(wire.HEARTBEAT, None),
    ]
    before = process.memory_info().rss
    for index in range(count):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(frame))
            match rng.randrange(4):
                case 0:
                    frame[place] = rng.randrange(256)
                case 1:
                    del frame[place : place + rng.randrange(20)]
                case 2:
                    frame[place:place] = rng.randbytes(rng.randrange(20))
                case 3:
                    frame[place : place + 8] = struct.pack("<Q", rng.choice(EDGES))
            frame = frame or bytearray(b"\0")
        try:
            peer.send(bytes(frame))
            peer.drain()
        except links.LinkEnded:  # It was a BYE.
            peer.__exit__()
            peer = Peer(server, link)
        if index % 500 == 0:
            assert good.echo(index).result(10) == index
    assert good.echo("done").result(30) == "done"
    assert process.memory_info().rss - before < 100e6
    peer.__exit__()


EDGES = [0, 1, 0x7F, 0xFF, 0xFFFF, 0xFFFFFFFF, 1 << 31, 1 << 63, (1 << 64) - 1]


def test_unauthenticated_bytes_never_reach_the_decoder(server, good):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://{server.addr}")
    socket.send(b"hello")
    assert not socket.poll(300)
    assert "undecodable" not in server.rejected
    context.destroy(linger=0)
    assert auth.ZAP_ENDPOINT.startswith("inproc://")


def test_rows_that_a_function_keeps_are_not_written_over():
    """Buffers of batches are used again, but not while somebody refers to them."""
    kept = []

    def keep(x):
        kept.append(x["x"][:1] if len(kept) % 2 else x)
        return {"y": x["x"].sum(-1)}

    server = BatchServer(free_port(), keys=KEYS)
    server.bind("keep", keep, batch=1)
    server.bind("drop", lambda x: x, batch=1)
    with server, Client(port_of(server), keys=KEYS) as client:
        for number in range(50):
            assert client.keep({"x": np.full(3, number)}).result(10)["y"] == 3 * number
            assert client.drop({"x": np.full(3, -1)}).result(10)["x"][0] == -1
    values = [x["x"] if isinstance(x, dict) else x for x in kept]
    assert [int(x[0, 0]) for x in values] == list(range(50))


def test_a_mistake_of_the_server_itself_does_not_end_it(
    server, good, monkeypatch, link
):
    good.connect(10)
    with Peer(server, link) as peer:
        with monkeypatch.context() as patch:
            patch.setattr(server, "_call", lambda *args: 1 / 0)
            peer.send_tree(wire.CALL, (1,), seq=0, method="echo")
            wait_until(lambda: server.rejected.get("internal") == 1)
