"""What clients, servers and the connections between them promise, on every backend."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zmq
from rpc_testing import in_threads, shared_blocks
from waiting_testing import WAIT, wait_until

from embodied.rpc import Disconnected, RemoteError, free_port, wire


def echo(x):
    return x


def any_link(rpc):
    """Returns client options for a connection by proxy, which cannot be local."""
    return {"link": "remote"} if rpc.name == "local" else {}


def serve(rpc, port=0, **methods):
    """Starts a server with these methods."""
    server = rpc.server(port)
    for name, function in methods.items():
        server.bind(name, function)
    server.start(block=False)
    return server


class TestConnecting:
    def test_clients_and_servers_are_context_managers(self, rpc):
        port = free_port()
        server = rpc.server(port)
        server.bind("echo", echo)
        with server as entered, rpc.client(port) as client:
            assert entered is server
            client.connect(WAIT)
            assert client.connected
            assert client.echo("x").result(WAIT) == "x"
        with pytest.raises(Disconnected):
            client.echo("x")
        server.close()  # Closing again does nothing.
        client.close()
        with serve(rpc, port, echo=echo), rpc.client(port) as client:
            assert client.echo("y").result(WAIT) == "y"

    def test_start_may_block_until_the_server_is_closed(self, rpc):
        server = rpc.server()
        server.bind("echo", echo)
        thread = threading.Thread(target=server.start)
        thread.start()
        assert rpc.client(server).echo("x").result(WAIT) == "x"
        server.close()
        thread.join(WAIT)
        assert not thread.is_alive()

    def test_a_port_that_is_taken_is_an_error(self, rpc):
        server = serve(rpc, echo=echo)
        other = rpc.server(server.addr)
        with pytest.raises(OSError):
            other.start(block=False)
        assert rpc.client(server).echo("x").result(WAIT) == "x"

    def test_a_client_may_come_before_its_server(self, rpc):
        port = free_port()
        client = rpc.client(port)
        with pytest.raises(TimeoutError, match=str(port)):
            client.connect(0.05)
        assert not client.connected
        futures = [client.echo(f"{x}") for x in range(3)]
        assert not futures[0].wait(0.05)
        serve(rpc, port, echo=echo)
        assert [future.result(WAIT) for future in futures] == ["0", "1", "2"]

    def test_the_first_call_is_quick(self, rpc):
        server = serve(rpc, echo=echo)
        for _ in range(20):
            with rpc.client(server) as client:
                assert client.echo("x").result(1.0) == "x"

    def test_clients_do_not_harm_each_other(self, rpc):
        gate = threading.Event()
        server = rpc.server(workers=2)
        server.bind("echo", echo)
        server.bind("wait", lambda: gate.wait(WAIT) and "done")
        server.start(block=False)
        stuck, good = rpc.client(server, maxinflight=64), rpc.client(server)
        waiting = [stuck.call("wait") for _ in range(64)]
        for x in range(20):
            assert stuck.stats()["inflight"] == 64
            with pytest.raises(RemoteError):
                good.nope(x).result(WAIT)
            assert good.echo(f"{x}").result(WAIT) == f"{x}"
        gate.set()
        assert {future.result(WAIT) for future in waiting} == {"done"}

    def test_answers_reach_the_client_that_asked(self, rpc):
        server = serve(rpc, echo=echo)

        def work(start):
            with rpc.client(server) as client:
                futures = [client.echo(np.array(start + x)) for x in range(50)]
                return [int(future.result(WAIT)) for future in futures]

        starts = range(0, 500, 100)
        results = in_threads(work, starts)
        assert results == [list(range(start, start + 50)) for start in starts]


class TestClosing:
    def test_closing_a_client_fails_its_open_calls(self, rpc):
        gate = threading.Event()
        server = serve(rpc, wait=lambda: gate.wait(WAIT))
        client = rpc.client(server, maxinflight=2)
        client.connect(WAIT)
        futures = [client.call("wait") for _ in range(2)]
        held, failed = threading.Event(), threading.Event()

        def third():
            held.set()
            with pytest.raises(Disconnected):
                client.call("wait")  # Waits for a place among the calls in flight.
            failed.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert held.wait(WAIT)
        client.close()
        for future in futures:
            for _ in range(2):
                with pytest.raises(Disconnected):
                    future.result(WAIT)
        assert failed.wait(WAIT)
        thread.join(WAIT)
        gate.set()

    def test_a_thread_that_waits_for_a_result_learns_of_the_close(self, rpc):
        gate, waiting = threading.Event(), threading.Event()
        server = serve(rpc, wait=lambda: gate.wait(WAIT))
        client = rpc.client(server)
        client.connect(WAIT)
        future = client.call("wait")

        def wait(_):
            waiting.set()
            return future.exception(WAIT)

        errors: list = []
        threads = [
            threading.Thread(target=lambda: errors.append(wait(0))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert waiting.wait(WAIT)
        client.close()
        for thread in threads:
            thread.join(WAIT)
        gate.set()
        assert [type(error) for error in errors] == [Disconnected] * 3

    def test_a_client_without_a_server_can_be_closed(self, rpc):
        client = rpc.client(free_port())
        future = client.echo("x")
        client.close()
        with pytest.raises(Disconnected):
            future.result(WAIT)
        with pytest.raises(Disconnected):
            client.connect(WAIT)

    @pytest.mark.parametrize("rounds", [2, pytest.param(300, marks=pytest.mark.slow)])
    def test_a_closing_server_answers_what_is_running(self, rpc, rounds):
        for _ in range(rounds):
            running, gate = threading.Event(), threading.Event()

            def work(running=running, gate=gate):
                running.set()
                return gate.wait(WAIT) and "done"

            server = serve(rpc, work=work)
            with rpc.client(server) as client:
                future = client.work()
                assert running.wait(WAIT)
                closing = threading.Thread(target=server.close)
                closing.start()
                assert not future.wait(0.01)
                gate.set()
                closing.join(WAIT)
                assert future.result(2.0) == "done"

    def test_a_server_does_not_wait_forever_for_a_function(self, rpc):
        running, gate = threading.Event(), threading.Event()

        def work():
            running.set()
            gate.wait(WAIT)

        server = serve(rpc, work=work)
        rpc.client(server).work()
        assert running.wait(WAIT)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="did not return within"):
            server.close(timeout=0.2)
        assert time.monotonic() - started < WAIT / 2
        gate.set()


class TestReconnecting:
    def test_calls_to_a_server_that_is_restarted_fail(self, rpc):
        """They may have been applied already, so the client does not resend them."""
        running, gate = threading.Event(), threading.Event()
        applied: list = []

        def work(x):
            running.set()
            gate.wait(WAIT)
            applied.append(int(x))
            return x

        first = serve(rpc, work=work)
        port = int(first.addr.rsplit(":", 1)[1])
        client = rpc.client(first)
        futures = [client.work(np.array(x)) for x in range(5)]
        assert running.wait(WAIT)
        closing = threading.Thread(target=first.close)
        closing.start()
        wait_until(lambda: first._closing.is_set())
        gate.set()
        closing.join(WAIT)
        assert int(futures[0].result(WAIT)) == 0  # It was already running.
        wait_until(lambda: not client.connected)
        unsent = client.work(np.array(5))
        serve(rpc, port, work=work)
        for future in futures[1:]:
            with pytest.raises(Disconnected, match=r"restarted.*not known"):
                future.result(WAIT)
        assert int(unsent.result(WAIT)) == 5
        futures = [client.work(np.array(x)) for x in range(6, 9)]
        assert [int(future.result(WAIT)) for future in futures] == [6, 7, 8]
        assert applied == [0, 5, 6, 7, 8]
        assert client.stats()["reconnects"] >= 1

    def test_a_broken_connection_is_made_again(self, rpc, proxy):
        server = serve(rpc, echo=echo)
        proxy.target = server.addr
        client = rpc.client(proxy.addr, **any_link(rpc))
        for x in range(3):
            assert client.echo(f"{x}").result(WAIT) == f"{x}"
            proxy.cut()
            wait_until(lambda: client.stats()["reconnects"])

    def test_a_broken_connection_is_made_again_and_open_calls_are_answered(
        self, rpc, proxy
    ):
        running, gate = threading.Event(), threading.Event()

        def work(x):
            running.set()
            gate.wait(WAIT)
            return x

        server = serve(rpc, work=work)
        proxy.target = server.addr
        client = rpc.client(proxy.addr, **any_link(rpc))
        futures = [client.work(f"{x}") for x in range(3)]
        assert running.wait(WAIT)
        proxy.cut()
        gate.set()
        assert [future.result(WAIT) for future in futures] == ["0", "1", "2"]

    def test_without_autoconn_calls_fail_with_the_connection(self, rpc, proxy):
        running, gate = threading.Event(), threading.Event()

        def work():
            running.set()
            gate.wait(WAIT)

        proxy.target = serve(rpc, work=work).addr
        client = rpc.client(proxy.addr, autoconn=False, **any_link(rpc))
        client.connect(WAIT)
        futures = [client.work() for _ in range(3)]
        assert running.wait(WAIT)
        proxy.cut()
        for future in futures:
            for _ in range(2):
                with pytest.raises(Disconnected):
                    future.result(WAIT)
        gate.set()
        with pytest.raises(Disconnected):
            client.work()
        with pytest.raises(Disconnected):
            client.connect(WAIT)


class TestOnce:
    def test_a_call_whose_reply_was_lost_is_not_applied_again(self, rpc, proxy):
        applied: list = []
        done = threading.Event()

        def add(x):
            applied.append(int(x))
            done.set()
            return len(applied)

        server = serve(rpc, add=add)
        proxy.target = server.addr
        client = rpc.client(proxy.addr, **any_link(rpc))
        client.connect(WAIT)
        proxy.losing.set()
        future = client.add(np.array(7))
        assert done.wait(WAIT)
        assert not future.wait(0.05)
        proxy.losing.clear()
        proxy.cut()
        assert future.result(WAIT) == 1
        assert applied == [7]
        assert server.stats()["repeated"] >= 1


class TestSessions:
    def test_slots_are_told_when_a_client_joins_and_leaves(self, rpc):
        events: list = []
        joined, left = threading.Event(), threading.Event()
        server = rpc.server()
        server.bind("echo", echo)

        def join(session):
            events.append(("join", session.name, session.slots, session.info))
            joined.set()

        def leave(session):
            events.append(("leave", session.name, session.slots, session.info))
            left.set()

        server.sessions.on_join.append(join)
        server.sessions.on_leave.append(leave)
        server.start(block=False)
        info = {"envs": [3, 4]}
        client = rpc.client(server, name="worker", slots=2, group="train", info=info)
        client.connect(WAIT)
        assert joined.wait(WAIT)
        assert server.sessions.slots("train") == 2
        assert server.sessions.slots("eval") == 0
        client.close()
        assert left.wait(WAIT)
        assert server.sessions.slots("train") == 0
        assert events == [("join", "worker", 2, info), ("leave", "worker", 2, info)]

    def test_callbacks_that_fail_end_nothing(self, rpc, caplog):
        left = threading.Event()

        def fail(session):
            raise ValueError("a callback of ours")

        caplog.set_level(logging.ERROR, "embodied.rpc")
        server = rpc.server()
        server.bind("echo", echo)
        server.sessions.on_join.append(fail)
        server.sessions.on_leave += [fail, lambda _: left.set()]
        server.start(block=False)
        client, other = rpc.client(server), rpc.client(server)
        assert other.echo(1).result(WAIT) == 1
        assert client.echo(1).result(WAIT) == 1
        client.close()
        assert left.wait(WAIT)
        assert other.echo(2).result(WAIT) == 2
        assert "a callback of ours" in caplog.text

    def test_a_client_that_is_not_let_in_yet_asks_again(self, rpc):
        # Links of one library share the code that retries, so one of them tries twice.
        often = 2 if rpc.name in ("local", "portal") else 1
        answers = iter([False] * often)
        server = rpc.server()
        server.bind("echo", echo)
        server.sessions.admit = lambda session: next(answers, True)
        server.start(block=False)
        future = rpc.client(server).echo("x")
        assert not future.wait(0.5)
        assert future.result(WAIT) == "x"
        assert next(answers, None) is None

    def test_a_client_whose_process_is_killed_has_left(
        self, rpc, keys, tmp_path, monkeypatch
    ):
        # It has left at once, not when its heartbeats are missed.
        monkeypatch.setattr("embodied.rpc.server.CLIENT_TIMEOUT", 1000.0)
        joined, left = threading.Event(), threading.Event()
        server = rpc.server()
        server.bind("echo", echo)
        server.sessions.on_join.append(lambda _: joined.set())
        server.sessions.on_leave.append(lambda _: left.set())
        server.start(block=False)
        keys.save(tmp_path / "keys.json")
        script = (
            "import sys, time\n"
            "from embodied.rpc import Keys, transport\n"
            "name, insecure, path, addr = sys.argv[1:]\n"
            "kwargs = {'insecure': True} if insecure else {'keys': Keys.load(path)}\n"
            "client = transport(name).Client(addr, **kwargs)\n"
            "print(client.echo('x').result(20), flush=True)\n"
            "sys.stdin.read()\n"
        )
        name = "portal" if rpc.name == "portal" else "zmq"
        insecure = "insecure" if rpc.name == "insecure" else ""
        arguments = [name, insecure, str(tmp_path / "keys.json"), server.addr]
        child = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout.readline() == b"x\n"
            assert joined.wait(WAIT)
            assert not left.is_set()
            assert server.stats()["clients"] == 1
            os.kill(child.pid, signal.SIGKILL)
            assert left.wait(WAIT)
            assert server.stats()["clients"] == 0
        finally:
            child.kill()
            child.communicate(timeout=WAIT)


class TestBadPeers:
    @pytest.mark.parametrize("kind", range(8))
    def test_arrays_in_memory_where_none_can_be(self, rpc, kind):
        if rpc.name != "insecure":
            pytest.skip("needs a peer that speaks plain ZeroMQ")
        server = serve(rpc, echo=echo)
        client = rpc.client(server)
        codec = wire.Codec()
        spec, arrays = codec.flatten("echo", [{"x": np.zeros(1000)}])
        frame = wire.encode(kind, 0, spec, arrays, in_memory=True)
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 1000
            peer.connect(f"tcp://{server.addr}")
            peer.send(frame)
            if kind != wire.BYE:  # A BYE gets no answer.
                assert peer.poll(5000)
        for _ in range(3):
            assert client.echo("x").result(5.0) == "x"


class TestSharedMemory:
    def test_replies_stay_as_they_are_while_they_are_held(self, rpc):
        server = serve(rpc, make=lambda x: {"a": np.full(50_000, x), "b": x})
        client = rpc.client(server)
        held, slices = [], []
        for x in range(60):
            result = client.make(np.array(x)).result(WAIT)
            if x % 2:
                held.append((x, result["a"]))
            else:
                slices.append((x, result["a"][100:200].reshape(10, 10)[::3]))
            del result
        for _ in range(60):
            client.make(np.array(-1)).result(WAIT)
        for x, array in held + slices:
            assert (array == x).all(), x

    def test_memory_is_used_again_when_replies_are_dropped(self, rpc):
        if rpc.name == "remote":
            pytest.skip("shares no memory")
        server = serve(rpc, echo=echo)
        client = rpc.client(server, maxinflight=4)
        array = np.zeros(50_000)
        for _ in range(10):
            client.echo(array).result(WAIT)
        before = shared_blocks()
        assert before > 0, "Memory is not shared at all."
        for _ in range(50):
            futures = [client.echo(array) for _ in range(4)]
            for future in futures:
                future.result(WAIT)
        # One block for each request, each reply under way and each reply still held.
        assert shared_blocks() <= before + 3 * 4
