"""The link within one host: which clients get it, what it carries and survives."""

from __future__ import annotations

import array
import gc
import os
import select
import socket
import threading
import time

import numpy as np
import psutil
import pytest
from waiting_testing import WAIT, wait_until

from embodied.rpc import (
    Client,
    Keys,
    Server,
    auth,
    buffers,
    free_port,
    links,
    wire,
)
from embodied.rpc.links import LinkEnded, LocalLink, connect_local
from embodied.rpc.zmq_links import DealerLink

if not links.LOCAL_AVAILABLE:
    pytest.skip("needs Linux", allow_module_level=True)

KEYS = Keys.generate()


def make_server(addr=0, **kwargs):
    seen = []

    def note(x):
        seen.append(x)
        return x

    server = Server(addr or free_port(), **{"keys": KEYS, **kwargs})
    server.bind("note", note)
    server.seen = seen
    return server


@pytest.fixture
def server():
    with make_server() as server:
        yield server


def kind(client):
    client.connect(WAIT)
    return type(client._caller._link)


class TestChoice:
    def test_clients_of_this_host_have_it(self, server):
        for addr in (server.addr, server.addr.replace("127.0.0.1", "localhost")):
            with Client(addr, keys=KEYS) as client:
                assert kind(client) is LocalLink
                assert client.note(1).result(WAIT) == 1

    def test_either_link_can_be_forced(self, server):
        with Client(server.addr, keys=KEYS, link="remote") as client:
            assert kind(client) is DealerLink
        with Client(server.addr, keys=KEYS, link="local") as client:
            assert kind(client) is LocalLink
        with pytest.raises(ValueError, match="auto, local, remote, got 'tcp'"):
            Client(server.addr, keys=KEYS, link="tcp")

    @pytest.mark.parametrize("link", ["auto", "local"])
    def test_a_client_that_came_before_its_server_has_it_too(self, link):
        port = free_port()
        with Client(port, keys=KEYS, link=link) as client:
            with pytest.raises(TimeoutError):
                client.connect(0.3)
            with make_server(port):
                assert kind(client) is LocalLink

    def test_it_is_chosen_anew_after_each_end(self, server, monkeypatch):
        with Client(server.addr, keys=KEYS) as client:
            assert kind(client) is LocalLink
            with monkeypatch.context() as patch:
                patch.setattr(links, "LOCAL_AVAILABLE", False)
                client._caller._link.abort()
                assert client.note(1).result(WAIT) == 1
                assert kind(client) is DealerLink
            session = next(iter(server.sessions))
            client._caller._link._socket._socket.disconnect(f"tcp://{server.addr}")
            client._caller._link._socket._socket.connect(f"tcp://{server.addr}")
            wait_until(
                lambda: isinstance(client._caller._link, LocalLink) and client.connected
            )
            assert client.note(2).result(WAIT) == 2
            assert next(iter(server.sessions)) is session
        assert server.seen == [1, 2]

    def test_a_server_at_all_addresses_is_found(self):
        addr = f"0.0.0.0:{free_port()}"
        with make_server(addr), Client(addr[8:], keys=KEYS) as client:
            assert kind(client) is LocalLink

    def test_a_server_of_another_address_is_not_taken_for_it(self, server):
        """Another host may have a server at the same port, with the same keys."""
        port = server.addr.rsplit(":", 1)[1]
        assert connect_local(f"127.0.0.2:{port}", KEYS, 1000) is None
        assert connect_local(f"192.0.2.1:{port}", KEYS, 1000) is None
        assert auth.own_addresses("192.0.2.1:80", True) == []
        assert auth.own_addresses("some.host:80", False) == []

    def test_without_keys_there_is_one_for_servers_without_keys(self, server):
        with make_server(insecure=True, keys=None) as open_server:
            with Client(open_server.addr, insecure=True) as client:
                assert kind(client) is LocalLink
        assert connect_local(server.addr, None, 1000) is None
        assert connect_local(open_server.addr, KEYS, 1000) is None

    def test_a_server_whose_name_is_taken_does_without(self, server):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            port = free_port()
            name = links._local_name(f"127.0.0.1:{port}", auth.local_key(KEYS))
            other.bind(name)
            with make_server(port), Client(port, keys=KEYS) as client:
                assert client.note(1).result(WAIT) == 1
                assert kind(client) is DealerLink

    def test_a_stranger_who_took_the_name_gets_nothing(self):
        """It cannot prove that it has the key, so the client turns to ZeroMQ."""
        port = free_port()
        name = links._local_name(f"127.0.0.1:{port}", auth.local_key(KEYS))
        got = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.bind(name)
            stranger.listen()

            def serve():
                connection, _ = stranger.accept()
                with connection:
                    connection.send(os.urandom(32))
                    got.append(connection.recv(1000))
                    connection.send(os.urandom(32))
                    got.append(connection.recv(1000))

            thread = threading.Thread(target=serve)
            thread.start()
            assert connect_local(f"127.0.0.1:{port}", KEYS, 1000) is None
            thread.join(WAIT)
        assert len(got[0]) == 64 and got[1] == b""


def open_raw(server):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server._listeners[0].name)
    connection.settimeout(WAIT)
    return connection


class TestProof:
    @pytest.mark.parametrize("size", [1, 64, 2000])
    def test_whoever_does_not_have_the_key_is_cut_off(self, server, size):
        with Client(server.addr, keys=KEYS) as client, open_raw(server) as connection:
            client.note(1).result(WAIT)
            assert len(connection.recv(100)) == 32
            connection.send(os.urandom(size))
            assert connection.recv(100) == b""
            assert client.note(2).result(WAIT) == 2
        assert server.seen == [1, 2]

    def test_a_proof_does_not_hold_for_another_connection(self, server):
        with open_raw(server) as first, open_raw(server) as second:
            key, ours = auth.local_key(KEYS), os.urandom(32)
            proof = ours + auth.prove(key, b"client", first.recv(100), ours)
            second.recv(100)
            second.send(proof)
            assert second.recv(100) == b""
            first.send(proof)
            assert len(first.recv(100)) == 32

    def test_a_connection_that_says_nothing_is_closed_in_time(
        self, server, monkeypatch
    ):
        monkeypatch.setattr(links, "PROVE_SECONDS", 0.1)
        with open_raw(server) as connection:
            with Client(server.addr, keys=KEYS, link="remote") as client:
                client.note(1).result(WAIT)
                assert len(connection.recv(100)) == 32
                assert connection.recv(100) == b""
                assert client.note(2).result(WAIT) == 2

    def test_silent_connections_are_bounded(self, server, monkeypatch):
        monkeypatch.setattr(links, "MAX_UNKNOWN", 5)
        raw = [open_raw(server) for _ in range(10)]
        wait_until(lambda: len(server._listeners[0]._unknown) == 5)
        with Client(server.addr, keys=KEYS) as client:
            # The local link is refused, so the client uses ZeroMQ.
            assert client.note(1).result(WAIT) == 1
        for connection in raw:
            connection.close()

    def test_other_users_are_refused(self, server, monkeypatch):
        monkeypatch.setattr(links, "_is_same_user", lambda connection: False)
        assert connect_local(server.addr, KEYS, 1000) is None
        with open_raw(server) as connection:
            assert connection.recv(100) == b""
        with Client(server.addr, keys=KEYS) as client:
            assert client.note(1).result(WAIT) == 1


def pair(**kwargs):
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [LocalLink(end, 1 << 24, **kwargs) for end in ends]


def close(*pair):
    for link in pair:
        link.close()


def descriptors():
    return psutil.Process().num_fds()


class TestFrames:
    @pytest.mark.parametrize("size", [1, 59_999, 60_000, 60_001, 3_000_000])
    def test_frames_of_all_sizes_arrive_whole_and_in_order(self, size):
        one, other = pair()
        before = descriptors()
        frames = [bytes([number]) * size for number in range(5)]
        for frame in frames:
            assert one.send(frame)
        got = []
        while len(got) < len(frames):
            got += other.receive()
            one.flush()
        assert got == frames
        assert not other.receive()
        assert descriptors() == before
        close(one, other)

    def test_what_does_not_fit_the_socket_waits(self):
        blocked = []
        one, other = pair(on_blocked=lambda link, value: blocked.append(value))
        before = descriptors()
        sizes = [50_000, 10, 200_000, 10]
        frames = [bytes([i]) * sizes[i % 4] for i in range(100)]
        for frame in frames:
            assert one.send(frame)
        assert blocked == [True]
        got = []
        while len(got) < len(frames):
            got += other.receive()
            one.flush()
        assert got == frames
        assert blocked[-1] is False
        assert descriptors() == before
        close(one, other)

    def test_who_never_reads_is_cut_off(self, monkeypatch):
        monkeypatch.setattr(links, "MAX_BACKLOG", 20)
        one, other = pair()
        assert not all(one.send(b"x" * 50_000) for _ in range(100))
        with pytest.raises(LinkEnded):
            for _ in range(100):
                other.receive()
        before = descriptors()
        one.close()
        assert descriptors() == before - 1
        other.close()

    def test_what_was_sent_before_the_end_arrives(self):
        one, other = pair()
        one.send(b"unread")  # Unread data resets the connection.
        other.send(b"last")
        other.close()
        frames = []
        with pytest.raises(LinkEnded):
            for _ in range(10):
                frames += one.receive()
        assert frames == [b"last"]
        one.close()

    def test_a_full_socket_of_a_client_is_sent_later(self, server):
        with Client(server.addr, keys=KEYS, maxinflight=200) as client:
            client.connect(WAIT)
            deaf = threading.Event()

            def wait(seconds):
                deaf.set()
                time.sleep(0.01)

            server._poller.wait = wait
            server._wakeup.set()
            assert deaf.wait(WAIT)  # The loop receives nothing now.
            futures = [client.note(bytes([i]) * 50_000) for i in range(100)]
            assert client._caller._link._backlog
            assert not futures[-1].wait(0.1)
            del server._poller.wait
            for i, future in enumerate(futures):
                assert future.result(WAIT) == bytes([i]) * 50_000
        assert server.seen == [bytes([i]) * 50_000 for i in range(100)]


def send_with(link, data, *files):
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    link._connection.sendmsg([data], [rights])


class TestDescriptors:
    def test_odd_descriptors_end_the_link_and_are_closed(self):
        zero = os.open("/dev/zero", os.O_RDWR)
        unsealed = os.memfd_create("embodied-bulk")
        os.truncate(unsealed, 4096)
        memories = buffers.Memory(4096), buffers.Memory(1 << 25)
        sealed, large = (memory.fileno for memory in memories)
        frame, block = b"F" + bytes(8), b"B" + bytes([1]) + bytes(7)
        cases = [
            (frame, zero),
            (frame, unsealed),
            (block, unsealed),
            (frame, large),  # Larger than a frame may be.
            (b"B" + bytes(8), sealed),  # A block without a number.
            (b"EMB1", sealed),
            (frame, sealed, sealed),
            (frame, sealed, zero, unsealed, large),
        ]
        before = descriptors()
        for data, *files in cases:
            one, other = pair()
            send_with(one, data, *files)
            with pytest.raises(LinkEnded):
                other.receive()
            close(one, other)
            assert descriptors() == before, (data, files)
        for descriptor in (zero, unsealed):
            os.close(descriptor)

    def test_blocks_are_bounded(self):
        memory = buffers.PeerMemory(limit=10_000, max_blocks=3)
        memories = buffers.Memory(4096), buffers.Memory(8192)
        small, large = (memory.fileno for memory in memories)
        memory.add(1, small)
        with pytest.raises(
            wire.WireError, match="the number 1 of a block is 0 or in use"
        ):
            memory.add(1, small)
        with pytest.raises(wire.WireError, match="over the limit"):
            memory.add(2, large)
        memory = buffers.PeerMemory(max_blocks=1)
        memory.add(1, small)
        with pytest.raises(wire.WireError, match="too many"):
            memory.add(2, small)

    def test_a_hostile_client_harms_only_itself(self, server):
        before = descriptors()
        with Client(server.addr, keys=KEYS) as good:
            good.connect(WAIT)
            for _ in range(20):
                peer = connect_local(server.addr, KEYS, 1000)
                zero = os.open("/dev/zero", os.O_RDWR)
                send_with(peer, b"F" + bytes(8), zero)
                os.close(zero)
                poll = select.poll()
                poll.register(peer.fileno, select.POLLIN)
                assert poll.poll(WAIT * 1000)
                with pytest.raises(LinkEnded):
                    peer.receive()
                peer.close()
                assert good.note(1).result(WAIT) == 1
            wait_until(lambda: descriptors() <= before + 10)


class TestConnections:
    def test_calls_keep_their_order_whatever_their_size(self, server):
        with Client(server.addr, keys=KEYS, maxinflight=64) as client:
            client.connect(WAIT)
            futures, expected = [], []
            for number in range(300):
                # Plain bytes are not put into shared memory.
                large = links.MAX_PACKET * 2 if number % 7 == 3 else 9
                expected.append(bytes([number % 251]) * large)
                futures.append(client.note(expected[-1]))
            assert [future.result(20) for future in futures] == expected
        assert server.seen == expected

    def test_large_replies(self, server):
        with Client(server.addr, keys=KEYS) as client:
            for size in (10, links.MAX_PACKET, 3_000_000, 10):
                data = np.arange(size, dtype=np.uint8)
                assert np.array_equal(client.note(data).result(WAIT), data)

    def test_a_client_goes_on_when_its_link_is_lost(self, server):
        with Client(server.addr, keys=KEYS) as client:
            for number in range(5):
                assert client.note(number).result(WAIT) == number
                client._caller._link.abort()
                wait_until(lambda: client.stats()["reconnects"])
            assert kind(client) is LocalLink
        assert server.seen == list(range(5))

    def test_a_reader_that_stands_still_does_not_block_the_server(self, server):
        with Client(server.addr, keys=KEYS, maxinflight=200) as client:
            client.connect(WAIT)
            with client._caller._lock:  # Its own threads cannot handle answers now.
                blocked = threading.Thread(
                    target=lambda: [client.note(b"x" * 50_000) for _ in range(100)]
                )
                blocked.start()
                with Client(server.addr, keys=KEYS) as other:
                    assert other.note(1).result(WAIT) == 1
            blocked.join(20)
            assert not blocked.is_alive()

    def test_a_closed_client_leaves_no_thread_and_no_descriptor(self, server, request):
        gc.disable()  # A closed client must free its resources without it.
        request.addfinalizer(gc.enable)
        for link in ("local", "remote"):
            for number in range(4):
                with Client(server.addr, "closed", keys=KEYS, link=link) as client:
                    client.connect(WAIT)  # So that the call takes shared memory.
                    client.note(np.zeros(5000)).result(WAIT)
                assert "closed" not in [x.name for x in threading.enumerate()]
                del client
                if number == 1:
                    before = descriptors()
            wait_until(lambda before=before: descriptors() <= before)
