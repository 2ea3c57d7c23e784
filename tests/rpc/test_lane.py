"""The short cut between processes of one host: who may use it, and what it keeps."""

from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest

from embodied.rpc import (
    BatchServer,
    Client,
    Keys,
    RemoteError,
    Server,
    batching,
    free_port,
    lane,
)
from embodied.rpc.lane import Lane

if not lane.AVAILABLE:
    pytest.skip("needs Linux", allow_module_level=True)

KEYS = Keys.generate()


@pytest.fixture
def server():
    seen = []

    def note(x):
        seen.append(x)
        return x

    server = Server(free_port(), keys=KEYS)
    server.bind("note", note)
    server.seen = seen
    with server:
        yield server


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def open_raw(server):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{server._lanes._listener.name}")
    connection.settimeout(10)
    return connection


def test_clients_on_the_same_host_use_it(server):
    with Client(server.addr, keys=KEYS) as client:
        assert client.note(1).result(10) == 1
        (session,) = server.sessions
        assert session.lane is not None


def test_clients_without_shared_memory_do_without(server):
    with Client(server.addr, keys=KEYS, bulk=False) as client:
        assert client.note(1).result(10) == 1
        (session,) = server.sessions
        assert session.lane is None


def test_whoever_does_not_know_the_secret_is_cut_off(server):
    with Client(server.addr, keys=KEYS) as client:
        client.note(1).result(10)
        (session,) = server.sessions
        for packet in (b"x", os.urandom(32), os.urandom(16) + session.client):
            with open_raw(server) as connection:
                connection.send(packet)
                assert connection.recv(100) == b""
        assert client.note(2).result(10) == 2
        assert server.seen == [1, 2]


def test_a_connection_that_says_nothing_is_closed_in_time(server, monkeypatch):
    monkeypatch.setattr("embodied.rpc.lanes.ATTACH_SECONDS", 0.1)
    with Client(server.addr, keys=KEYS) as client, open_raw(server) as connection:
        client.note(1).result(10)
        assert connection.recv(100) == b""
        assert client.note(2).result(10) == 2


def test_silent_connections_are_bounded(server, monkeypatch):
    monkeypatch.setattr("embodied.rpc.lanes.MAX_UNKNOWN", 5)
    raw = [open_raw(server) for _ in range(10)]
    wait_for(lambda: len(server._lanes._lanes) == 5)
    with Client(server.addr, keys=KEYS) as client:
        # The short cut is refused, so the call goes the long way.
        assert client.note(1).result(10) == 1
    for connection in raw:
        connection.close()


def test_calls_keep_their_order_when_large_ones_take_the_long_way(server):
    with Client(server.addr, keys=KEYS, maxinflight=64) as client:
        client.connect(10)
        futures, expected = [], []
        for number in range(300):
            # Plain bytes are not put into shared memory, so size decides the way.
            data = bytes([number % 251]) * (
                lane.MAX_BYTES * 2 if number % 7 == 3 else 9
            )
            expected.append(data)
            futures.append(client.note(data))
        assert [future.result(20) for future in futures] == expected
    assert server.seen == expected


def test_large_replies_come_the_long_way(server):
    with Client(server.addr, keys=KEYS) as client:
        for size in (10, lane.MAX_BYTES, 3_000_000, 10):
            data = np.arange(size, dtype=np.uint8)
            assert np.array_equal(client.note(data).result(10), data)


def test_a_client_goes_on_when_its_short_cut_is_lost(server):
    with Client(server.addr, keys=KEYS) as client:
        for number in range(20):
            assert client.note(number).result(10) == number
            wait_for(lambda: client._lane is not None)
            client._lane._connection.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: [x.lane is not None for x in server.sessions] == [True])
    assert server.seen == list(range(20))


def test_a_reader_that_stands_still_does_not_block_the_server(server):
    """Replies that do not fit the socket's buffer take the long way."""
    with Client(server.addr, keys=KEYS, maxinflight=200) as client:
        client.connect(10)
        with client._lock:  # Its own threads cannot handle answers now.
            blocked = threading.Thread(
                target=lambda: [client.note(b"x" * 50_000) for _ in range(100)]
            )
            blocked.start()
            with Client(server.addr, keys=KEYS) as other:
                assert other.note(1).result(10) == 1
        blocked.join(20)
        assert not blocked.is_alive()


def test_a_refused_connection_means_no_lane():
    assert Lane.connect("embodied-nobody", b"c" * 16, b"t" * 16) is None


@pytest.fixture
def batch_server():
    """Counts the rows of images that it got, and returns the mean of each."""
    rows = []

    def act(obs):
        rows.extend(obs["reward"].tolist())
        return {"mean": obs["image"].mean((1, 2)), "reward": obs["reward"]}

    schema = {"image": (np.uint8, (80, 80)), "reward": (np.float32, ())}
    server = BatchServer(free_port(), keys=KEYS)
    server.bind("act", act, batch=1, schema=schema)
    server.bind("loose", lambda x: x, batch=1)
    server.rows = rows
    with server:
        yield server


def observation(value, shape=(80, 80)):
    return {"image": np.full(shape, value, np.uint8), "reward": np.float32(value)}


def test_calls_that_look_alike_have_their_own_data(batch_server):
    with Client(batch_server.addr, keys=KEYS) as client:
        for value in range(50):
            reply = client.act(observation(value)).result(10)
            assert (reply["mean"], reply["reward"]) == (value, value)
        (session,) = batch_server.sessions
        assert len(session.memory.known) == 1
    assert batch_server.rows == list(range(50))


def test_a_call_that_looks_different_is_checked_as_ever(batch_server):
    with Client(batch_server.addr, keys=KEYS) as client:
        for value in range(5):
            assert client.act(observation(value)).result(10)["mean"] == value
            with pytest.raises(RemoteError, match="expected uint8 of shape"):
                client.act(observation(value, (90, 80))).result(10)
            with pytest.raises(RemoteError, match="'reward': expected float32"):
                wrong = {**observation(value), "reward": np.float64(value)}
                client.act(wrong).result(10)
            with pytest.raises(RemoteError, match="no such method"):
                client.nothing(observation(value)).result(10)


def test_a_call_that_looks_alike_and_comes_twice_is_applied_once(batch_server):
    with Client(batch_server.addr, keys=KEYS) as client:
        client.connect(10)
        for value in range(5):
            call = client.act(observation(value))
            assert call.result(10)["mean"] == value
            assert client._lane.send(call.frame)
        assert client.act(observation(9)).result(10)["mean"] == 9
    assert batch_server.rows == [0, 1, 2, 3, 4, 9]


def test_what_is_known_about_calls_is_bounded_and_forgotten(batch_server):
    with Client(batch_server.addr, keys=KEYS) as client:
        client.connect(10)
        for size in range(5000, 5000 + 2 * batching.MAX_KNOWN):
            data = {"x": np.full(size, size % 251, np.uint8)}
            assert np.array_equal(client.loose(data).result(10)["x"], data["x"])
            (session,) = batch_server.sessions
            assert 0 < len(session.memory.known) <= batching.MAX_KNOWN
        client._lane._connection.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: not session.memory.known)
        assert client.act(observation(3)).result(10)["mean"] == 3


def test_a_mistake_of_the_server_itself_does_not_end_the_lanes(
    batch_server, monkeypatch
):
    with Client(batch_server.addr, keys=KEYS) as client:
        client.act(observation(1)).result(10)
        with monkeypatch.context() as patch:
            patch.setattr(batch_server, "_take_in", lambda *args: 1 / 0)
            client.act(observation(2))
            wait_for(lambda: batch_server.rejected.get("internal") == 1)
    with Client(batch_server.addr, keys=KEYS) as client:
        assert client.act(observation(3)).result(10)["mean"] == 3
