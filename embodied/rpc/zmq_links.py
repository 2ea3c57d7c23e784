"""Links over ZeroMQ with CURVE, between hosts. Any process.

A libzmq socket may be used by one thread at a time. Here a lock guards each socket
that carries frames, so that any thread can send a frame at once instead of handing it
to another thread; only waiting is done without the lock, on the socket's file
descriptor.
"""

from __future__ import annotations

import errno
import socket as sockets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from embodied.rpc import auth, buffers
from embodied.rpc.links import DOWN, REFUSED, UP, Link, OnFrame, frame_limit
from embodied.rpc.threads import Poller, Wakeup, raise_descriptor_limit

HANDSHAKE_MS = 5_000  # A connection that does not identify itself by then is closed.
LAST_REPLIES, LAST_FRAMES = 0.5, 0.2  # Seconds to send what is left at the end.
SEND_QUEUE = 512  # Messages; above what well-behaved clients can have in flight.

# Handshakes fail without a reason given if the keys do not match, if the connection is
# cut again and again, or if something accepts it in place of a server that is not up
# yet. After so many in a row, over at least so many seconds, the client checks whether
# a ZeroMQ server is there. It waits for longer if the keys have matched before.
FAILED_HANDSHAKES = 8
GREETING_SECONDS = 1.0  # Time that a ZeroMQ server has for its first bytes.
FAILED_SECONDS, FAILED_SECONDS_IF_KNOWN = 4.0, 60.0

# As plain integers: pyzmq's enums cost a microsecond at each use.
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_COPY_BELOW = 1 << 16


class LockedSocket:
    """A socket that any thread may use: sends at once, receives without waiting.

    libzmq signals its descriptor at the first message only, and every operation on the
    socket takes that signal. So `wakeup` is set whenever messages are left whose signal
    was taken by `send`, or by a `receive` at its limit. `receive` clears it.
    """

    def __init__(self, socket: zmq.Socket):
        self._socket = socket
        self._lock = threading.Lock()
        self.wakeup = Wakeup()
        self._closed = False
        self._signalled = False
        self.fileno = cast(int, socket.get(zmq.FD))

    def send(self, frame: bytes, client: bytes | None = None) -> bool:
        """Sends a frame; False if the other side is gone or does not read.

        Args:
          frame: the message.
          client: identity of the receiver, for a server's socket.
        """
        with self._lock:
            if self._closed:
                return False
            try:
                if client is not None:
                    self._socket.send(client, _NOBLOCK | _SNDMORE)
                # libzmq keeps large frames as they are and frees them when sent.
                self._socket.send(frame, _NOBLOCK, copy=len(frame) < _COPY_BELOW)
            except zmq.ZMQError:
                return False
            finally:
                if cast(int, self._socket.get(_EVENTS)) & _POLLIN:
                    self._signal()
        return True

    def receive(self, limit: int = 256) -> list[list[zmq.Frame]]:
        """Returns up to `limit` messages that have arrived, as lists of frames."""
        messages: list[list[zmq.Frame]] = []
        with self._lock:
            if self._signalled:
                self._signalled = False
                self.wakeup.clear()
            # Asking first costs a fifth of the exception raised without a message.
            while not self._closed and cast(int, self._socket.get(_EVENTS)) & _POLLIN:
                if len(messages) == limit:
                    self._signal()  # The descriptor does not signal the rest.
                    break
                try:
                    parts = [self._socket.recv(_NOBLOCK, copy=False)]
                    while parts[-1].more:
                        parts.append(self._socket.recv(_NOBLOCK, copy=False))
                except zmq.Again:
                    break  # Its sender left before the message was whole.
                messages.append(parts)
        return messages

    def close(self, linger: float) -> None:
        """Closes the socket; libzmq goes on to send for up to `linger` seconds.

        It does so until its context is destroyed, which waits for it.
        """
        with self._lock:
            self._closed = True
            self._socket.close(linger=int(1000 * linger))
            self.wakeup.close()

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            self.wakeup.set()


class RouterLink(Link):
    """A server's end of one client's link."""

    def __init__(self, socket: LockedSocket, identity: bytes):
        super().__init__()
        self._socket = socket
        self._identity = identity

    def send(self, frame: bytes) -> bool:
        """Sends a frame; False if the client is gone or does not read."""
        return self._socket.send(frame, self._identity)


class RouterListener:
    """A server's end of all links over ZeroMQ. Belongs to the server's loop thread.

    Args:
      addr: numeric address to listen at.
      keys: keys of the run; None for a server that is open to everyone.
      max_bytes: maximum bytes of the arrays of a frame.
      poller: poller of the server's loop.
      on_frame: called with a link and each frame that came.
      reject: called with a reason and a text for each malformed message.

    Raises:
      OSError: it cannot listen at `addr`.
    """

    def __init__(
        self,
        addr: str,
        keys: auth.Keys | None,
        max_bytes: int,
        poller: Poller,
        on_frame: OnFrame,
        reject: Callable[[str, str], None],
    ):
        self._poller = poller
        self._on_frame = on_frame
        self._reject = reject
        # The sessions of admitted clients keep their links alive.
        self._links: weakref.WeakValueDictionary[bytes, RouterLink]
        self._links = weakref.WeakValueDictionary()
        self._context = zmq.Context()
        self._gate: auth.ZapHandler | None = None
        try:
            if keys:
                self._gate = auth.ZapHandler(self._context, keys)
            socket = _server_socket(self._context, addr, keys, max_bytes)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._socket = LockedSocket(socket)
        if self._gate:
            poller.add(self._gate.fileno, self._gate.handle)
        for descriptor in (self._socket.fileno, self._socket.wakeup.fileno()):
            poller.add(descriptor, self._receive)

    @property
    def refused(self) -> int:
        """Handshakes with keys that are not allowed."""
        return self._gate.refused if self._gate else 0

    def expire(self) -> None:
        """Does nothing: libzmq closes connections that do not identify themselves."""

    def discard(self, link: Link) -> None:
        """Does nothing: a link is forgotten when no session refers to it."""

    def close(self) -> None:
        """Sends the last replies, for up to LAST_REPLIES seconds, and closes all."""
        for descriptor in (self._socket.fileno, self._socket.wakeup.fileno()):
            self._poller.remove(descriptor)
        self._socket.close(linger=LAST_REPLIES)
        if self._gate:
            self._poller.remove(self._gate.fileno)
            self._gate.close()
        self._context.destroy()

    def _receive(self, _: int) -> None:
        for parts in self._socket.receive():
            if len(parts) != 2:
                self._reject("parts", f"a message of {len(parts)} parts")
                continue
            identity = parts[0].bytes
            link = self._links.get(identity)
            if link is None:
                link = self._links[identity] = RouterLink(self._socket, identity)
            self._on_frame(link, _contents(parts[1]))


class DealerLink(Link):
    """A client's end of a link, which connects and reconnects by itself.

    Only one thread may call `events`.

    Args:
      addr: address of the server.
      identity: identity of the client.
      keys: keys of the run; None for a server without keys.

    Raises:
      OSError: the address is not valid, or there are no descriptors left.
    """

    def __init__(self, addr: str, identity: bytes, keys: auth.Keys | None):
        super().__init__()
        self._addr = addr
        self._known = False  # Whether the keys have ever matched.
        self._failed = 0  # Failed handshakes in a row.
        self._failing_since = 0.0
        try:
            self._context = zmq.Context()
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from None
        try:
            socket = _client_socket(self._context, addr, identity, keys)
            self._monitor = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_DISCONNECTED
            )
            socket.connect(f"tcp://{addr}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, str(error)) from None
        self._socket = LockedSocket(socket)
        self.descriptors = (self._socket.fileno, self._socket.wakeup.fileno())
        self.events_descriptor = cast(int, self._monitor.get(zmq.FD))

    def send(self, frame: bytes) -> bool:
        """Sends a frame; False if the server is gone or does not read."""
        return self._socket.send(frame)

    def receive(self) -> list[Any]:
        """Returns the frames that have arrived."""
        # A `RouterLink` sends no message of several parts.
        messages = self._socket.receive()
        return [_contents(parts[0]) for parts in messages if len(parts) == 1]

    def events(self) -> list[tuple[int, str]]:
        """Returns what happened to the connection since the last call."""
        events: list[tuple[int, str]] = []
        while True:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return events
            message = parse_monitor_message(parts)
            event, value = message["event"], int(message["value"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._known, self._failed = True, 0
                events.append((UP, ""))
            elif event == zmq.EVENT_DISCONNECTED:
                events.append((DOWN, ""))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                events.append((REFUSED, "it does not allow this client's key"))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                reason = "one of the two uses keys and the other does not"
                events.append((REFUSED, reason))
            elif value != errno.EAGAIN and self._failed_for_good():
                # EAGAIN would be a server too busy to answer.
                events.append((REFUSED, "its key is not the one expected"))

    def close(self) -> None:
        """Sends the last frames, for up to LAST_FRAMES seconds, and closes all."""
        self._monitor.close()
        self._socket.close(linger=LAST_FRAMES)
        self._context.destroy()

    def _failed_for_good(self) -> bool:
        now = time.monotonic()
        if not self._failed:
            self._failing_since = now
        self._failed += 1
        seconds = FAILED_SECONDS_IF_KNOWN if self._known else FAILED_SECONDS
        if now - self._failing_since < seconds or self._failed < FAILED_HANDSHAKES:
            return False
        # A server that cannot read a handshake, since it was meant for another key,
        # closes the connection without an error, but only after its greeting. A proxy
        # whose server is not up yet does not greet.
        return _is_zmq_server(self._addr)


def _is_zmq_server(addr: str) -> bool:
    """Returns whether a ZeroMQ server greets at an address (ZMTP 3)."""
    host, port = auth.parse_address(addr)
    greeting = b""
    try:
        with sockets.create_connection(
            (host.strip("[]"), port), GREETING_SECONDS
        ) as connection:
            while len(greeting) < 10 and (data := connection.recv(64)):
                greeting += data
    except OSError:
        return False
    return greeting[:1] == b"\xff" and greeting[9:10] == b"\x7f"


def _contents(frame: zmq.Frame) -> Any:
    """Returns the bytes of a frame; copies small ones, which makes access cheaper."""
    buffer = frame.buffer
    return buffer if len(buffer) >= buffers.THRESHOLD else bytes(buffer)


def _server_socket(
    context: zmq.Context, addr: str, keys: auth.Keys | None, max_bytes: int
) -> zmq.Socket:
    """Binds a ROUTER socket; without keys it is open to everyone."""
    raise_descriptor_limit()
    socket = context.socket(zmq.ROUTER)
    socket.router_mandatory = True
    socket.router_handover = True
    socket.handshake_ivl = HANDSHAKE_MS
    socket.maxmsgsize = frame_limit(max_bytes)
    socket.sndhwm = SEND_QUEUE
    socket.linger = 0
    socket.ipv6 = "[" in addr
    # Notices clients whose machine is gone, whose connections would stay.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 60
    socket.tcp_keepalive_intvl = 10
    socket.tcp_keepalive_cnt = 6
    if keys:
        auth.secure_server(socket, keys)
    try:
        socket.bind(f"tcp://{addr}")
    except zmq.ZMQError as error:
        socket.close()
        raise OSError(error.errno, f"Cannot listen at {addr}: {error}") from None
    return socket


def _client_socket(
    context: zmq.Context, addr: str, identity: bytes, keys: auth.Keys | None
) -> zmq.Socket:
    """Makes a DEALER socket, not connected yet, that reconnects by itself."""
    socket = context.socket(zmq.DEALER)
    socket.routing_id = identity
    socket.linger = 0
    socket.ipv6 = auth.needs_ipv6(addr)
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1_000
    socket.handshake_ivl = HANDSHAKE_MS
    # Notices a server whose machine is gone, and outlasts one that is suspended.
    socket.heartbeat_ivl = 10_000
    socket.heartbeat_timeout = 60_000
    if keys:
        auth.secure_client(socket, keys)
    return socket
