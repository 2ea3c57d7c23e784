"""Repeated calls are routed from a cache in the server, with the same result."""

from __future__ import annotations

import numpy as np
import pytest
from test_local_link import KEYS
from waiting_testing import WAIT, wait_until

from embodied.rpc import BatchServer, Client, RemoteError, batching, free_port, links

if not links.LOCAL_AVAILABLE:
    pytest.skip("needs Linux", allow_module_level=True)


@pytest.fixture
def batch_server():
    """A server that records the reward and returns the image mean of each row."""
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


class TestCachedCalls:
    def test_calls_that_look_alike_have_their_own_data(self, batch_server):
        with Client(batch_server.addr, keys=KEYS) as client:
            for value in range(50):
                reply = client.act(observation(value)).result(WAIT)
                assert (reply["mean"], reply["reward"]) == (value, value)
            (session,) = batch_server.sessions
            assert len(session.link.cached) == 1
        assert batch_server.rows == list(range(50))

    def test_a_call_that_looks_different_is_checked_as_ever(self, batch_server):
        with Client(batch_server.addr, keys=KEYS) as client:
            for value in range(5):
                assert client.act(observation(value)).result(WAIT)["mean"] == value
                with pytest.raises(RemoteError, match="expected uint8 of shape"):
                    client.act(observation(value, (90, 80))).result(WAIT)
                with pytest.raises(RemoteError, match="'reward': expected float32"):
                    wrong = {**observation(value), "reward": np.float64(value)}
                    client.act(wrong).result(WAIT)
                with pytest.raises(RemoteError, match="unknown method"):
                    client.nothing(observation(value)).result(WAIT)

    def test_a_call_that_looks_alike_and_comes_twice_is_applied_once(
        self, batch_server
    ):
        with Client(batch_server.addr, keys=KEYS) as client:
            client.connect(WAIT)
            for value in range(5):
                call = client.act(observation(value))
                assert call.result(WAIT)["mean"] == value
                assert client._caller._link.send(call.frame)
            assert client.act(observation(9)).result(WAIT)["mean"] == 9
        assert batch_server.rows == [0, 1, 2, 3, 4, 9]

    def test_they_are_bounded_and_forgotten(self, batch_server):
        with Client(batch_server.addr, keys=KEYS) as client:
            client.connect(WAIT)
            for size in range(5000, 5000 + 2 * batching.MAX_CACHED):
                data = {"x": np.full(size, size % 251, np.uint8)}
                assert np.array_equal(client.loose(data).result(WAIT)["x"], data["x"])
                (session,) = batch_server.sessions
                assert 0 < len(session.link.cached) <= batching.MAX_CACHED
            client._caller._link.abort()
            assert client.act(observation(3)).result(WAIT)["mean"] == 3
            wait_until(lambda: len(session.link.cached) == 1)

    def test_an_error_of_the_server_itself_ends_no_link(
        self, batch_server, monkeypatch
    ):
        with Client(batch_server.addr, keys=KEYS) as client:
            client.act(observation(1)).result(WAIT)
            with monkeypatch.context() as patch:
                patch.setattr(batch_server, "_take_in", lambda *args: 1 / 0)
                client.act(observation(2))
                wait_until(lambda: batch_server.rejected.get("internal") == 1)
        with Client(batch_server.addr, keys=KEYS) as client:
            assert client.act(observation(3)).result(WAIT)["mean"] == 3
