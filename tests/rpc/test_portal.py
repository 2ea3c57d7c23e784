"""The portal transport with portal's own classes, and the choice of a transport."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import sys
import threading

import ml_dtypes
import numpy as np
import portal
import pytest
from rpc_testing import Backend, same
from waiting_testing import WAIT

from embodied.rpc import AuthError, Disconnected, RemoteError, free_port, transport
from embodied.rpc.links import LinkEnded
from embodied.rpc.portal_transport import (
    ConnectLink,
    PortalBatchServer,
    PortalClient,
    PortalServer,
)

HANDSHAKE = b"portal_handshake"


@pytest.fixture
def backend(keys):
    backend = Backend("portal", keys)
    yield backend
    backend.close()


@pytest.fixture
def plain():
    """Makes plain portal clients."""
    made = []

    def make(server):
        client = portal.Client(server.addr, logging=False, max_send_queue=1000)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close(WAIT)


def answer(future):
    """Waits for a plain portal future; its own `wait` can miss the answer."""
    done = threading.Event()
    future.add_callback(lambda _: done.set())
    assert done.wait(WAIT)
    return future.result()


class TestPlainClients:
    def test_they_can_call_a_batched_method(self, backend, plain):
        server = backend.batch_server()
        sizes = []

        def act(obs):
            sizes.append(len(obs["reward"]))
            return {"action": obs["reward"] * 2, "reset": obs["is_last"]}

        server.bind("act", act, batch=4, timeout=WAIT)
        server.start(block=False)
        workers = [plain(server) for _ in range(4)]
        image = np.zeros((8, 8, 3), np.uint8)
        for step in range(3):
            futures = [
                client.act(
                    {
                        "reward": np.float32(10 * step + index),
                        "is_last": index == 3,  # Plain values of the worker's env.
                        "image": image,
                    }
                )
                for index, client in enumerate(workers)
            ]
            for index, future in enumerate(futures):
                result = answer(future)
                assert result["action"] == 2 * (10 * step + index)
                assert result["action"].dtype == np.float32
                assert bool(result["reset"]) == (index == 3)
        assert sizes == [4, 4, 4]

    def test_they_share_batches_with_our_stacks(self, backend, plain):
        server = backend.batch_server()
        server.bind("act", lambda obs: {"x": obs["x"] + 1}, batch=3, timeout=WAIT)
        server.start(block=False)
        single = plain(server).act({"x": np.array(7)})
        stack = backend.client(server).call("act", {"x": np.array([1, 2])}, rows=2)
        assert answer(single)["x"] == 8
        assert stack.result(WAIT)["x"].tolist() == [2, 3]

    def test_they_get_errors_as_text_and_the_server_goes_on(self, backend, plain):
        server = backend.server()
        server.bind("divide", lambda x: 1 // int(x), lambda _: None)
        server.start(block=False)
        client = plain(server)
        with pytest.raises(RuntimeError, match=r"ZeroDivisionError: .*divide"):
            answer(client.divide(0))
        with pytest.raises(RuntimeError, match="unknown method"):
            answer(client.nope())

    def test_they_may_have_many_calls_open(self, backend, plain):
        gate = threading.Event()
        server = backend.server()
        server.bind("wait", lambda: gate.wait(WAIT))
        server.start(block=False)
        client = plain(server)
        client.maxinflight = 1000
        futures = [client.call("wait") for _ in range(300)]
        for future in futures[256:]:
            with pytest.raises(RuntimeError, match="256 calls"):
                answer(future)
        gate.set()
        # Wait for all of them: portal's client ends its process if an answer comes
        # while it closes, since its thread completes a call that `close` has failed.
        for future in futures[:256]:
            assert answer(future)


class TestPlainServer:
    def test_our_client_can_call_it(self, backend):
        server = portal.Server(free_port(), logging=False, errors=False)
        server.bind("double", lambda x: {"y": x["x"] * 2})

        def fail():
            raise ValueError("broken")

        server.bind("fail", fail)
        with server:
            client = backend.client(server.socket.addr[1])
            result = client.double({"x": np.arange(3)}).result(WAIT)
            assert same(result, {"y": np.arange(3) * 2})
            error = client.fail().exception(WAIT)
            assert isinstance(error, RemoteError) and error.kind == "exception"
            assert "broken" in str(error)
            client.close()


class TestEnd:
    def test_answers_that_came_with_the_end_are_not_lost(self):
        link = ConnectLink(f"localhost:{free_port()}", "client")
        try:
            for frame in (b"one", b"two", None, b"of another connection"):
                link._put(frame)
            assert link.receive() == [b"one", b"two"]
            readable, _, _ = select.select(link.descriptors, [], [], 0)
            assert readable  # The end is still to be received.
            with pytest.raises(LinkEnded):
                link.receive()
        finally:
            link.close()


class TestDoor:
    def test_it_listens_at_the_loopback_interface_and_says_so(self, keys, caplog):
        with caplog.at_level(logging.WARNING, "embodied.rpc"):
            with PortalServer(free_port()) as server:
                assert server.addr.startswith("127.0.0.1:")
                assert server._listeners[0]._socket.sock.getsockname()[0] == "127.0.0.1"
        warnings = [x for x in caplog.messages if "no authentication" in x]
        assert len(warnings) == 1
        assert server.addr in warnings[0]

    @pytest.mark.parametrize("kind", [PortalServer, PortalBatchServer])
    def test_another_interface_must_be_asked_for(self, kind):
        addr = f"0.0.0.0:{free_port()}"
        with pytest.raises(AuthError, match="portal has no authentication"):
            kind(addr)
        assert kind(addr, insecure=True).addr == addr

    def test_it_takes_an_ipv6_address(self):
        if not socket.has_ipv6:
            pytest.skip("no IPv6")
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 loopback")
        server = PortalServer(f"[::1]:{free_port()}")
        server.bind("echo", lambda x: x)
        with server, PortalClient(server.addr) as client:
            assert client.echo("x").result(WAIT) == "x"

    @pytest.mark.parametrize(
        "data",
        [
            b"\4\0\0\0\0\0\0\0abcd",  # Shorter than a number.
            b"\x20\0\0\0\0\0\0\0" + b"\xff" * 32,  # A name of 2^64 bytes.
            b"\x18\0\0\0\0\0\0\0" + b"\0" * 16 + b"\xff" * 8,  # 2^64 buffers.
            b"\xff" * 8,  # A message of 2^64 bytes, at which portal's thread ends.
        ],
        ids=["short", "name", "buffers", "length"],
    )
    def test_bytes_that_are_no_call_do_not_end_it(self, backend, data):
        server = backend.server()
        server.bind("echo", lambda x: x)
        server.start(block=False)
        client = backend.client(server)
        assert client.echo("x").result(WAIT) == "x"
        host, port = server.addr.split(":")
        with socket.create_connection((host, int(port)), WAIT) as bad:
            bad.sendall(HANDSHAKE + data)
            bad.recv(4096)  # An error reply, or the end of the connection.
            with contextlib.suppress(Disconnected):  # If portal's thread ended.
                client.echo("x").result(WAIT)
            for _ in range(3):
                assert client.echo("x").result(WAIT) == "x"
        assert sum(server.rejected.values()) >= 1
        assert server.stats()["rejected"] >= 1

    def test_it_can_be_used_from_a_plain_thread(self, backend):
        results = []

        def work():
            server = backend.server()
            server.bind("echo", lambda x: x)
            server.start(block=False)
            results.append(backend.client(server).echo("x").result(WAIT))

        thread = threading.Thread(target=work)  # Portal warns about plain threads.
        thread.start()
        thread.join(WAIT)
        assert results == ["x"]

    def test_clients_that_are_gone_are_forgotten(self, backend):
        left = threading.Event()
        server = backend.server()
        server.bind("echo", lambda x: x)
        server.sessions.on_leave.append(lambda _: left.set())
        server.start(block=False)
        with backend.client(server) as client:
            client.echo("x").result(WAIT)
            assert server.stats()["clients"] == 1
        assert left.wait(WAIT)
        assert server.stats()["clients"] == 0


class TestChoice:
    @pytest.mark.parametrize("name", ["zmq", "portal"])
    def test_transports_by_name(self, name, keys):
        chosen = transport(name)
        assert chosen.name == name
        port = free_port()
        server = chosen.BatchServer(port, "actor", keys=keys)
        server.bind("echo", lambda x: x)
        client = chosen.Client(
            port, "env", 4, True, keys=keys, slots=1, group=0, info={"a": 1}
        )
        data = {"latent": np.ones((2, 3), ml_dtypes.bfloat16)}
        with server, client:
            assert same(client.echo(data).result(WAIT), data)

    def test_an_unknown_name(self):
        with pytest.raises(ValueError, match="zmq, portal, got 'tcp'"):
            transport("tcp")

    def test_portal_is_an_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "portal", None)
        install = r"pip install 'dreamerv3-parallel\[portal\]'"
        with pytest.raises(ImportError, match=install):
            transport("portal")
        with pytest.raises(ImportError, match=install):
            PortalClient(free_port())
