"""Servers that speak portal's protocol, with the interface of `Server`. Any process.

It is the protocol of the reference implementation, so its workers can talk to these
servers. Of portal only the socket is used: its own servers end the process when a
method fails before its `postfn`, and stand still when a batch is not exactly full.

A portal server here is a door with an ordinary server behind it: the door's thread
takes portal's messages and makes each a call of one of our clients, one client for
each connection; the answers go back from the threads that receive them. So methods
are bound, batched, checked, ordered and counted as with the other transport.

What portal cannot do: it has no authentication, which is why these servers listen at
the loopback interface only; it repeats open calls after a reconnect, so that a call
can be applied twice; it says nothing of env slots, so that an incomplete batch waits
for its timeout; and plain numbers arrive as arrays, tuples as lists.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import zmq

from embodied.rpc import auth, portal_wire, sockets, wire
from embodied.rpc.batching import BatchServer
from embodied.rpc.calls import RemoteError
from embodied.rpc.client import Client
from embodied.rpc.future import Future
from embodied.rpc.portal_client import PortalClient
from embodied.rpc.portal_wire import import_portal
from embodied.rpc.server import Server
from embodied.rpc.session import MAX_INFLIGHT

__all__ = ["PortalBatchServer", "PortalClient", "PortalServer", "import_portal"]

log = logging.getLogger("embodied.rpc")

LOOK_AROUND = 1.0  # Seconds: portal tells neither of lost clients nor of its failure.
LAST_REPLIES = 1.0  # Seconds that a closing server gives replies on their way.
SEND_TRIES = 100
UNLIMITED = 1 << 30  # Portal ends its thread when a queue is longer.


class PortalServer:
    """A `Server` for clients that speak portal's protocol; takes the same arguments.

    `keys` has no meaning for portal; `insecure` allows other addresses than loopback.
    """

    _kind: type[Server] = Server

    def __init__(
        self,
        addr: str | int,
        name: str = "Server",
        workers: int = 1,
        *,
        keys: auth.Keys | None = None,
        insecure: bool = False,
        max_bytes: int = 1 << 30,
        backlog: int = 16,
    ):
        self._portal = import_portal()
        self.name = name
        self.addr = _bind_address(addr, insecure)
        self._insecure = insecure
        self._max_bytes = max_bytes
        # Nobody but the door has these keys.
        self._keys = auth.Keys.generate()
        self._server = self._kind(
            sockets.free_port(),
            name,
            workers,
            keys=self._keys,
            max_bytes=max_bytes,
            backlog=backlog,
        )
        self.sessions = self._server.sessions
        self.bind: Callable[..., None] = self._server.bind
        self._socket: Any = None
        self._thread = threading.Thread(
            target=self._run, name=f"{name}-door", daemon=True
        )
        self._closing = threading.Event()
        self._clients: dict[Any, Client] = {}  # By connection; owned by the door.
        self._rejected: Counter = Counter()  # Owned by the door.
        self._changed = threading.Condition()  # Guards what is below.
        self._open: Counter = Counter()  # Calls without an answer, by connection.

    @staticmethod
    def check(addr: str | int, *, insecure: bool = False) -> None:
        """Raises AuthError or ValueError if a server could not listen there."""
        sockets.check_free(_bind_address(addr, insecure))

    def start(self, block: bool = True) -> None:
        """Starts to answer; with `block`, returns when the server is closed."""
        self._socket = self._listen()
        try:
            self._server.start(block=False)
        except Exception:
            self._socket.close(1.0)
            raise
        log.warning(
            "%s: portal has no authentication: everyone who reaches %s may call%s.",
            self.name,
            self.addr,
            "" if self._insecure else ", so it is a loopback address",
        )
        self._thread.start()
        if block:
            self._closing.wait()
            self._thread.join()

    def close(self, timeout: float = 10.0) -> None:
        """Ends: running calls are answered, waiting ones are left to be sent again.

        Raises:
          TimeoutError: a function did not return in time; its thread is left behind.
        """
        if self._closing.is_set() or self._socket is None:
            self._closing.set()
            return
        deadline = time.monotonic() + timeout
        self._closing.set()
        self._socket.recvq.put((None, b""))  # Wakes the door.
        self._thread.join(timeout)
        self._socket.shutdown()
        try:
            self._server.close(max(0, deadline - time.monotonic()))
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._open.total(), LAST_REPLIES)
            for client in self._clients.values():
                client.close()
            self._socket.close(max(0.5, deadline - time.monotonic()))

    def __enter__(self) -> PortalServer:
        if self._socket is None:
            self.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def paused(self, timeout: float = 60.0) -> AbstractContextManager[None]:
        """No call of a `once` method runs inside."""
        return self._server.paused(timeout)

    def save(self) -> dict:
        """Nothing: portal's clients do not say which call they repeat."""
        return {}

    def load(self, data: dict) -> None:
        """Does nothing, since `save` has nothing."""

    def stats(self) -> dict[str, float]:
        """Like the other transport's."""
        stats = self._server.stats()
        return {**stats, "rejected": stats["rejected"] + self._rejected.total()}

    @property
    def rejected(self) -> dict[str, int]:
        """Messages that were not served, by reason, since the start."""
        return dict(self._rejected + Counter(self._server.rejected))

    def _listen(self) -> Any:
        host, port = sockets.parse_address(self.addr)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        host = host.strip("[]")
        # Portal leaves its socket behind when it cannot listen, so it is tried first.
        socket.create_server((host, port), family=family).close()
        with portal_wire.PortalThreads():
            return self._portal.ServerSocket(
                port,
                self.name,
                host=host,
                ipv6=family == socket.AF_INET6,
                logging=False,
                max_send_queue=UNLIMITED,
                max_recv_queue=UNLIMITED,
            )

    # The door's thread.

    def _run(self) -> None:
        look_around = 0.0
        while not self._closing.is_set():
            try:
                connection, data = self._socket.recv(timeout=LOOK_AROUND)
            except TimeoutError:
                pass
            except Exception:
                # Portal's thread ends at what it does not understand, and hands its
                # error, of any type, to whoever receives.
                self._reopen()
            else:
                if connection is not None:
                    self._receive(connection, data)
            if time.monotonic() >= look_around:
                look_around = time.monotonic() + LOOK_AROUND
                self._forget_gone()

    def _receive(self, connection: Any, data: memoryview) -> None:
        number = bytes(data[:8]).ljust(8, b"\0")
        try:
            method, rows, arguments = portal_wire.decode_call(
                self._portal, data, self._max_bytes
            )
            with self._changed:
                if self._open[connection] >= MAX_INFLIGHT:
                    raise wire.WireError(f"more than {MAX_INFLIGHT} calls in flight")
            future = self._client(connection).call(method, *arguments, rows=rows)
        except (wire.WireError, zmq.ZMQError) as error:
            self._rejected["request"] += 1
            text = f"Server {self.name} refused a message: {error}"
            log.warning("%s, from %s:%s", text, *connection[:2])
            self._send(connection, number, portal_wire.REFUSED, text.encode())
            return
        with self._changed:
            self._open[connection] += 1
        future.add_callback(functools.partial(self._answer, connection, number))

    def _client(self, connection: Any) -> Client:
        client = self._clients.get(connection)
        if client is None:
            name = f"{connection[0]}:{connection[1]}"
            client = Client(
                self._server.addr, name, maxinflight=MAX_INFLIGHT, keys=self._keys
            )
            self._clients[connection] = client
        return client

    def _forget_gone(self) -> None:
        for connection in set(self._clients) - set(self._socket.connections):
            self._clients.pop(connection).close()

    def _reopen(self) -> None:
        log.exception("%s: portal's socket failed; it is opened again.", self.name)
        self._rejected["socket"] += 1
        self._socket.close(1.0)
        while not self._closing.is_set():
            try:
                self._socket = self._listen()
                return
            except OSError as error:
                log.error("%s: cannot listen at %s: %s", self.name, self.addr, error)
                self._closing.wait(LOOK_AROUND)

    # The threads that receive answers.

    def _answer(self, connection: Any, number: bytes, future: Future) -> None:
        error = future.exception()
        try:
            if error is None:
                data = self._portal.pack(portal_wire.to_portal(future.result()))
                self._send(connection, number, 0, *data)
            elif isinstance(error, RemoteError):
                status, text = portal_wire.encode_error(error)
                self._send(connection, number, status, text)
            # Otherwise the server closes, and the client asks the next one.
        finally:
            with self._changed:
                self._open[connection] -= 1
                if not self._open[connection]:
                    del self._open[connection]
                self._changed.notify_all()

    def _send(
        self, connection: Any, number: bytes, status: int, *data: bytes | memoryview
    ) -> None:
        message = (number, status.to_bytes(8, "little"), *data)
        for _ in range(SEND_TRIES):
            try:
                self._socket.send(connection, *message)
                return
            except RuntimeError:
                pass  # Portal counts its connections while another thread adds one.
            except Exception as error:
                # Portal's thread has ended, with an error of any type. The client
                # will connect and ask again.
                log.warning("%s: a reply was not sent: %r", self.name, error)
                return
        log.error("%s: a reply was not sent in %d tries.", self.name, SEND_TRIES)


class PortalBatchServer(PortalServer):
    """A `BatchServer` for clients that speak portal's protocol."""

    _kind = BatchServer


def _bind_address(addr: str | int, insecure: bool) -> str:
    numeric = sockets.bind_address(addr, None, insecure=True)
    host, _ = sockets.parse_address(numeric)
    if not insecure and not ipaddress.ip_address(host.strip("[]")).is_loopback:
        raise auth.AuthError(
            f"{addr} can be reached from other machines, and portal has no "
            "authentication. Listen at localhost, use --run.transport zmq, or allow "
            "everyone to call with --run.insecure True."
        )
    return numeric
