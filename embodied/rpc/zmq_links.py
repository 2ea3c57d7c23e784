"""Links over ZeroMQ with CURVE, between hosts. Any process.

A libzmq socket may be used by one thread at a time. Here a lock guards each socket,
so that whoever has a message sends it at once instead of handing it to another
thread; only waiting is done without the lock, on the socket's file descriptor.
"""

from __future__ import annotations

import errno
import resource
import socket as sockets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from embodied.rpc import auth, buffers
from embodied.rpc.links import DOWN, MESSAGE_SLACK, REFUSED, UP, Link, OnFrame
from embodied.rpc.threads import Poller, Wakeup

HANDSHAKE_MS = 5_000  # A connection that does not identify itself by then is closed.
SEND_QUEUE = 512  # Messages; above what well-behaved clients can have in flight.

# Handshakes that fail without a reason: the keys do not match, the connection is cut
# again and again, or something accepts it in place of a server that is not up yet. So
# many in a row, over so many seconds, make it worth asking who is there; from a server
# whose keys did match before, they have to go on for longer.
FAILED_HANDSHAKES = 8
GREETING_SECONDS = 1.0  # In which a ZeroMQ server sends its first bytes.
FAILED_SECONDS, FAILED_SECONDS_IF_KNOWN = 4.0, 60.0

# As plain integers: pyzmq's enums cost a microsecond at each use.
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_COPY_BELOW = 1 << 16


class LockedSocket:
    """A socket for any thread: sends at once, receives without waiting.

    `wakeup` is set whenever a message may have arrived whose signal a sender has
    swallowed, and cleared by `receive`: libzmq signals its descriptor at the first
    message only, and every operation on the socket takes that signal.
    """

    def __init__(self, socket: zmq.Socket):
        self._socket = socket
        self._lock = threading.Lock()
        self.wakeup = Wakeup()
        self._closed = False
        self._signalled = False
        self.fileno = cast(int, socket.get(zmq.FD))

    def send(self, frame: bytes, client: bytes | None = None) -> bool:
        """Sends a frame; False where the other side is gone or does not read.

        Args:
          frame: the message.
          client: to whom, for a server's socket.
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
        """Returns the messages that are there, as lists of frames."""
        messages: list[list[zmq.Frame]] = []
        with self._lock:
            if self._signalled:
                self._signalled = False
                self.wakeup.clear()
            # Asking first costs a fifth of the exception that says there is nothing.
            while not self._closed and cast(int, self._socket.get(_EVENTS)) & _POLLIN:
                if len(messages) == limit:
                    self._signal()  # The descriptor will not say that there is more.
                    break
                try:
                    parts = [self._socket.recv(_NOBLOCK, copy=False)]
                    while parts[-1].more:
                        parts.append(self._socket.recv(_NOBLOCK, copy=False))
                except zmq.Again:
                    break  # Its sender left before the message was whole.
                messages.append(parts)
        return messages

    def close(self) -> None:
        """Closes the socket."""
        with self._lock:
            self._closed = True
            self._socket.close()
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
        """Sends a frame; False where the client is gone or does not read."""
        return self._socket.send(frame, self._identity)


class RouterListener:
    """A server's end of all links over ZeroMQ. The server's loop thread.

    Args:
      addr: numeric, to listen at.
      keys: of the run; None for a server that is open to everyone.
      max_bytes: of a frame.
      poller: what the server's loop waits with.
      on_frame: called with a link and each frame that came.
      reject: called with the reason and a text for messages that are none of ours.

    Raises:
      OSError: it cannot listen there.
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
        # Kept by the sessions of clients that have said HELLO.
        self._links: weakref.WeakValueDictionary[bytes, RouterLink]
        self._links = weakref.WeakValueDictionary()
        self._context = zmq.Context()
        self._gate: auth.Gate | None = None
        try:
            if keys:
                self._gate = auth.Gate(self._context, keys)
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
        """Forgets a link, if it is one of these."""

    def close(self) -> None:
        """Sends the last replies, and ends."""
        for descriptor in (self._socket.fileno, self._socket.wakeup.fileno()):
            self._poller.remove(descriptor)
        self._socket.close()
        if self._gate:
            self._poller.remove(self._gate.fileno)
            self._gate.close()
        self._context.destroy(linger=500)

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
    """A client's end, which connects, and connects again, by itself.

    `events` belongs to one thread.

    Args:
      addr: of the server.
      identity: of the client.
      keys: of the run; None for a server without keys.
    """

    def __init__(self, addr: str, identity: bytes, keys: auth.Keys | None):
        super().__init__()
        self._addr = addr
        self._known = False  # Whether the keys have ever matched.
        self._failed = 0  # Handshakes in a row.
        self._failing_since = 0.0
        self._context = zmq.Context()
        socket = _client_socket(self._context, addr, identity, keys)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )
        self._socket = LockedSocket(socket)
        self.descriptors = (self._socket.fileno, self._socket.wakeup.fileno())
        self.events_descriptor = cast(int, self._monitor.get(zmq.FD))
        socket.connect(f"tcp://{addr}")

    def send(self, frame: bytes) -> bool:
        """Sends a frame; False where the server is gone or does not read."""
        return self._socket.send(frame)

    def receive(self) -> list[Any]:
        """Returns the frames that are there."""
        # No server of ours sends anything in several parts.
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
        """Sends what is under way, and ends."""
        self._monitor.close()
        self._socket.close()
        self._context.destroy(linger=200)

    def _failed_for_good(self) -> bool:
        now = time.monotonic()
        if not self._failed:
            self._failing_since = now
        self._failed += 1
        seconds = FAILED_SECONDS_IF_KNOWN if self._known else FAILED_SECONDS
        if now - self._failing_since < seconds or self._failed < FAILED_HANDSHAKES:
            return False
        # A server that cannot read a handshake, since it was meant for another key,
        # closes the connection without a word, but it has greeted before. A proxy
        # whose server is not up yet does not greet.
        return _is_zmq_server(self._addr)


def _is_zmq_server(addr: str) -> bool:
    """Returns whether ZeroMQ greets whoever connects to an address (ZMTP 3)."""
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
    """The bytes of a frame; a copy of small ones, which are cheaper to look at."""
    buffer = frame.buffer
    return buffer if len(buffer) >= buffers.THRESHOLD else bytes(buffer)


def _server_socket(
    context: zmq.Context, addr: str, keys: auth.Keys | None, max_bytes: int
) -> zmq.Socket:
    """Binds a ROUTER socket; without keys it is open to everyone."""
    _raise_descriptor_limit()
    socket = context.socket(zmq.ROUTER)
    socket.router_mandatory = True
    socket.router_handover = True
    socket.handshake_ivl = HANDSHAKE_MS
    socket.maxmsgsize = max_bytes + MESSAGE_SLACK
    socket.sndhwm = SEND_QUEUE
    socket.linger = 0
    socket.ipv6 = "[" in addr
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
    """Makes a DEALER socket that connects, and connects again, to a server."""
    socket = context.socket(zmq.DEALER)
    socket.routing_id = identity
    socket.linger = 0
    socket.ipv6 = "[" in addr
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1_000
    socket.handshake_ivl = HANDSHAKE_MS
    # Notices a server whose machine is gone, and outlasts one that is stopped.
    socket.heartbeat_ivl = 10_000
    socket.heartbeat_timeout = 60_000
    if keys:
        auth.secure_client(socket, keys)
    return socket


def _raise_descriptor_limit() -> None:
    """Lets a server hold more connections than the usual 1024 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            pass  # The system's own limit is lower; the flood test shows the effect.
