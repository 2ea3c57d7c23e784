"""A client that speaks portal's protocol, with the interface of `Client`. Any process.

Of portal only the socket is used: its own futures raise an error once and then return
None, and can miss the moment at which they are done.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter, deque
from typing import Any

import numpy as np

from embodied.rpc import auth, portal_wire, sockets, wire
from embodied.rpc.calls import Disconnected
from embodied.rpc.future import Future
from embodied.rpc.session import MAX_INFLIGHT

log = logging.getLogger("embodied.rpc")


class PortalClient:
    """A `Client` that speaks portal's protocol; takes the same arguments.

    `keys`, `insecure`, `slots`, `group`, `info` and `bulk` have no meaning for portal.

    Portal's thread calls `_received`, `_connected` and `_disconnected`; any thread
    may call methods. An exception in portal's thread would end the process, so none
    leaves these three.
    """

    def __init__(
        self,
        addr: str | int,
        name: str = "Client",
        maxinflight: int = 16,
        autoconn: bool = True,
        *,
        keys: auth.Keys | None = None,
        insecure: bool = False,
        slots: int = 0,
        group: Any = None,
        info: Any = None,
        bulk: bool = True,
    ):
        if not 1 <= maxinflight <= MAX_INFLIGHT:
            raise ValueError(f"maxinflight must be 1..{MAX_INFLIGHT}: {maxinflight}")
        self._portal = portal_wire.import_portal()
        self.name = name
        self.addr = sockets.connect_address(addr)
        self.maxinflight = maxinflight
        self._autoconn = autoconn
        self._counts: Counter = Counter()
        self._latencies: deque[float] = deque(maxlen=1024)
        # Guards everything below. Sending is done under it too, so that calls leave
        # in the order of their numbers.
        self._changed = threading.Condition()
        self._calls: dict[int, tuple[bytes, Future, float]] = {}
        self._next = 0
        self._is_connected = False
        self._failure: Exception | None = None
        host, port = sockets.parse_address(self.addr)
        with portal_wire.PortalThreads():
            self._socket = self._portal.ClientSocket(
                f"{host.strip('[]')}:{port}",
                name,
                start=False,
                autoconn=autoconn,
                ipv6=":" in host,
                logging=False,
                max_send_queue=2 * MAX_INFLIGHT,
                max_recv_queue=2 * MAX_INFLIGHT,
            )
            self._socket.callbacks_recv.append(self._received)
            self._socket.callbacks_conn.append(self._connected)
            self._socket.callbacks_disc.append(self._disconnected)
            self._socket.start()
        self._socket.connect(timeout=0)  # Without `autoconn` it needs to be asked.

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self.call, method)

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the server."""
        return self._is_connected

    def connect(self, timeout: float | None = None) -> None:
        """Waits until the server is there.

        Raises:
          TimeoutError: it is not, in time.
          Disconnected: the client is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_connected or self._failure, timeout)
            if self._failure:
                raise self._failure
            if not self._is_connected:
                raise TimeoutError(
                    f"{self.name}: no server answers at {self.addr} after {timeout} s."
                )

    def call(self, method: str, *args: Any, rows: int = 0) -> Future:
        """Calls a method; `rows` says that each array is a stack of so many rows.

        Waits while `maxinflight` calls are open.

        Raises:
          WireError: the arguments cannot be sent.
          Disconnected: the client is closed.
        """
        name = f"{method}:{rows}" if rows else method
        data = portal_wire.encode_call(self._portal, name, args)
        future = Future(f"'{method}' from {self.addr}", self)
        with self._changed:
            while len(self._calls) >= self.maxinflight and not self._failure:
                self._changed.wait()
            if self._failure:
                raise self._failure
            number = self._next
            self._next += 1
            message = number.to_bytes(8, "little") + data
            self._calls[number] = message, future, time.perf_counter()
            if self._is_connected:
                self._send(message)
            self._counts["calls"] += 1
            self._counts["sent_bytes"] += len(message)
        return future

    def stats(self) -> dict[str, float]:
        """Counts since the last call, open calls, and latencies in seconds."""
        counts, self._counts = self._counts, Counter()
        latencies = np.array(self._latencies or [0.0])
        return {
            "calls": counts["calls"],
            "replies": counts["replies"],
            "errors": counts["errors"],
            "reconnects": counts["reconnects"],
            "sent_bytes": counts["sent_bytes"],
            "received_bytes": counts["received_bytes"],
            "inflight": len(self._calls),
            "latency_p50": float(np.percentile(latencies, 50)),
            "latency_p99": float(np.percentile(latencies, 99)),
        }

    def close(self) -> None:
        """Fails open calls with Disconnected."""
        error = Disconnected(f"{self.name}: the client is closed.")
        with self._changed:
            was_running, self._socket.running = self._socket.running, False
            self._failure = self._failure or error
        self._fail(error)
        own = self._socket.thread.thread
        if was_running and threading.current_thread() is not own:
            self._socket.close()

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Waits until a future is done or time is over. Of `Receiver`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not future.done():
            if deadline is not None and time.monotonic() >= deadline:
                return
            future.block(deadline)

    def attend(self) -> None:
        """Does nothing: its thread always listens. Of `Receiver`."""

    def __enter__(self) -> PortalClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, message: bytes) -> None:
        try:
            self._socket.send(message, timeout=0)
        except (self._portal.Disconnected, TimeoutError):
            pass  # The connection is just lost; `_connected` sends it again.

    def _fail(self, error: Exception) -> None:
        """Ends all open calls, and every later one, with an error."""
        with self._changed:
            self._failure = self._failure or error
            calls = list(self._calls.values())
            self._calls.clear()
            self._changed.notify_all()
        for _, future, _ in calls:
            future.set_error(error)

    # Portal's thread.

    def _connected(self) -> None:
        with self._changed:
            if not self._socket.running:
                return
            self._is_connected = True
            for message, _, _ in self._calls.values():
                self._send(message)
            self._changed.notify_all()

    def _disconnected(self) -> None:
        with self._changed:
            self._is_connected = False
            self._socket.sendq.clear()  # All open calls are sent again.
            self._counts["reconnects"] += 1
        if not self._autoconn:
            self._fail(Disconnected(f"{self.name}: {self.addr} is gone."))

    def _received(self, data: memoryview) -> None:
        self._socket.recvq.get_nowait()  # Portal queues what it calls back with.
        try:
            self._answer(data)
        except Exception:
            log.exception("%s: an answer could not be handled.", self.name)

    def _answer(self, data: memoryview) -> None:
        number, status = portal_wire.HEAD.unpack_from(data)
        with self._changed:
            _, future, started = self._calls.pop(number, (b"", None, 0.0))
            if future is None:
                return  # The answer to a call that was sent twice.
            self._counts["replies"] += 1
            self._counts["received_bytes"] += len(data)
            self._latencies.append(time.perf_counter() - started)
            self._changed.notify()
        payload = data[portal_wire.HEAD.size :]
        if status:
            self._counts["errors"] += 1
            future.set_error(portal_wire.decode_error(status, payload))
            return
        try:
            tree = portal_wire.from_portal(self._portal.unpack(payload))
        except Exception as error:
            # Portal's decoder raises whatever the bytes lead it to.
            future.set_error(wire.WireError(f"an undecodable answer: {error!r}"))
            return
        future.set_result(tree)
