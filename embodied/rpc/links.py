"""Links: how frames travel between a client and a server. Any process.

A client has one link to its server, which it chooses when it connects. On the same host
that is a Unix socket, in this module; between hosts, or wherever the Unix socket cannot
be reached, it is ZeroMQ (`embodied/rpc/zmq_links.py`). The code above treats all links
alike, except that only local ones pass shared memory and need `flush`.

The Unix socket has an abstract name that follows from the run's key, the address and
the user. Both ends check each other's user and prove that they have the key. A packet
holds one frame. A frame that is too large for a packet travels in anonymous memory,
whose descriptor is passed instead. Blocks of shared memory are passed in the same way.
"""

from __future__ import annotations

import functools
import hmac
import logging
import os
import secrets
import select
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from embodied.rpc import auth, buffers, wire
from embodied.rpc.threads import Poller, Wakeup

KINDS = ("auto", "local", "remote")
LOCAL_AVAILABLE = buffers.AVAILABLE and hasattr(sockets, "SO_PEERCRED")
MAX_PACKET = 60_000  # Bytes; larger frames travel in memory of their own.
MAX_BACKLOG = 512  # Packets; above what well-behaved clients can have in flight.
MAX_UNKNOWN = 256  # Connections that have not proved yet that they have the key.
MESSAGE_SLACK = 1 << 21  # Bytes by which a header may exceed the limit of arrays.
PROVE_SECONDS = 5.0  # Time that a new connection has for this proof.
ACCEPT_PAUSE = 0.01  # Seconds after an accept that failed, so that it does not spin.
UP, DOWN, REFUSED = range(3)  # Events of a client's link.

_NONCE_BYTES = 32
_QUEUE = 512
_PEER = struct.Struct("3i")
_HEAD = struct.Struct("<cQ")  # Of a packet with a descriptor: kind, number of a block.
_FRAME, _BLOCK = b"F", b"B"
_DESCRIPTOR = struct.Struct("i")
_ANCILLARY = sockets.CMSG_LEN(_DESCRIPTOR.size)  # Room for one descriptor, no more.
# As plain integers: enums cost a microsecond at each use.
_RECEIVE_FLAGS = int(getattr(sockets, "MSG_CMSG_CLOEXEC", 0))
_CUT_OFF = int(sockets.MSG_TRUNC) | int(sockets.MSG_CTRUNC)

log = logging.getLogger("embodied.rpc")

OnFrame = Callable[["Link", Any], None]


def frame_limit(max_bytes: int) -> int:
    """Returns the maximum bytes of a frame whose arrays have at most `max_bytes`.

    A header has its slack, and so have the parts of a frame around the two.
    """
    return max_bytes + 2 * MESSAGE_SLACK


class LinkEnded(ConnectionError):
    """The other side has closed a link, or is gone."""


class Link:
    """One end of a connection between a client and a server.

    Any thread may send. The loop thread of a server receives. At a client, the thread
    with the turn receives, and the background thread may do so at the same moment; see
    `connection.ReceiveTurn`.

    Attributes:
      descriptors: readable when a frame may have come. Used by clients, like the next.
      events_descriptor: readable when an event may have come; -1 for a link that is
        up from the beginning, and ends with LinkEnded.
      session: session of the client, at the server's end, once it was admitted.
      memory: blocks passed by the client, at the server's end; None if it cannot pass
        any.
      cached: routing of calls whose arrays lie in `memory`, by `wire.split_at_seq` of
        their frames, at the server's end.
    """

    descriptors: tuple[int, ...] = ()
    events_descriptor = -1
    memory: buffers.PeerMemory | None = None

    def __init__(self) -> None:
        self.session: Any = None
        self.cached: dict[tuple[bytes, bytes], Any] = {}

    def send(self, frame: bytes) -> bool:
        """Sends a frame; False if the other side is gone or does not read."""
        raise NotImplementedError

    def receive(self) -> Sequence[Any]:
        """Returns frames that have arrived, if any; does not wait.

        Raises:
          LinkEnded: there will be no more.
        """
        raise NotImplementedError

    def events(self) -> list[tuple[int, str]]:
        """Returns new events of a client's link: UP, DOWN or REFUSED, with a reason."""
        return []

    def close(self) -> None:
        """Frees the resources of the link."""


class LocalLink(Link):
    """A Unix socket between two processes of one host; the same class at both ends.

    Packets that the socket does not take at once wait in a backlog, up to MAX_BACKLOG;
    one more ends the link. `on_blocked` is called when packets begin or cease to wait;
    `flush` sends them.

    Args:
      connection: connected socket of type SOCK_SEQPACKET.
      max_bytes: maximum bytes of a received frame.
      on_blocked: called with the link and whether packets wait, from any thread, which
        holds the lock of the link.
    """

    def __init__(
        self,
        connection: sockets.socket,
        max_bytes: int,
        on_blocked: Callable[[LocalLink, bool], None] = lambda link, blocked: None,
    ):
        super().__init__()
        connection.setblocking(False)
        self._connection = connection
        self._send = connection.send
        self._receive = connection.recvmsg
        self._max_bytes = max_bytes
        self.on_blocked = on_blocked
        self.fileno = connection.fileno()
        self.descriptors = (self.fileno,)
        self.memory = buffers.PeerMemory()
        self._lock = threading.Lock()  # Guards changes of the backlog.
        self._backlog: deque[tuple[bytes, buffers.Memory | None]] = deque()

    def send(self, frame: bytes) -> bool:
        """Sends a frame now or when the socket has room; False if the link is over."""
        if self._backlog or len(frame) > MAX_PACKET:
            return self._send_later(frame)
        try:
            self._send(frame)  # A packet goes out whole or not at all.
        except BlockingIOError:
            return self._send_later(frame)
        except OSError:
            self.abort()  # Whatever the reason, a new link may work.
            return False
        return True

    def share(self, block: buffers.Block) -> bool:
        """Passes a block of shared memory to the other side."""
        block.shared = self
        return self._put(_HEAD.pack(_BLOCK, block.number), block.memory)

    def receive(self) -> Sequence[bytes]:
        """Returns the next frame, if there is one."""
        try:
            data, ancillary, flags, _ = self._receive(
                MAX_PACKET, _ANCILLARY, _RECEIVE_FLAGS
            )
        except BlockingIOError:
            return ()
        except ConnectionResetError:
            # The other side has closed without reading everything. What it sent before
            # is still there, and the next call finds it, or the end.
            return ()
        except OSError:
            raise LinkEnded from None
        if ancillary or flags & _CUT_OFF:
            return self._receive_memory(data, ancillary, flags)
        if not data:
            raise LinkEnded
        return (data,)

    def flush(self) -> None:
        """Sends waiting packets, as far as the socket takes them."""
        with self._lock:
            while self._backlog:
                try:
                    self._send_packet(*self._backlog[0])
                except BlockingIOError:
                    return
                except OSError:
                    break  # The other side is gone, which `receive` reports.
                self._backlog.popleft()
            self._backlog.clear()
            self.on_blocked(self, False)

    def abort(self) -> None:
        """Ends the link for both sides. Any thread."""
        try:
            self._connection.shutdown(sockets.SHUT_RDWR)
        except OSError:
            pass  # It has ended already.

    def close(self) -> None:
        """Frees the descriptors."""
        with self._lock:
            self._backlog.clear()
        self._connection.close()

    def _send_later(self, frame: bytes) -> bool:
        if len(frame) <= MAX_PACKET:
            return self._put(frame)
        try:
            memory = buffers.Memory(len(frame))
        except OSError as error:
            log.error("No memory for a message of %d bytes: %s", len(frame), error)
            self.abort()
            return False
        view, done = memoryview(frame), 0
        while done < len(view):
            done += os.pwrite(memory.fileno, view[done:], done)
        return self._put(_HEAD.pack(_FRAME, 0), memory)

    def _put(self, packet: bytes, memory: buffers.Memory | None = None) -> bool:
        """Sends a packet, with memory if given, after those that wait."""
        with self._lock:
            try:
                if len(self._backlog) >= MAX_BACKLOG:
                    raise OSError("The peer does not read.")
                if not self._backlog:
                    self._send_packet(packet, memory)
                    return True
            except BlockingIOError:
                self.on_blocked(self, True)
            except OSError:
                self.abort()  # Whatever the reason, a new link may work.
                return False
            self._backlog.append((packet, memory))
            return True

    def _send_packet(self, packet: bytes, memory: buffers.Memory | None) -> None:
        if memory is None:
            self._send(packet)
        else:
            sockets.send_fds(self._connection, [packet], [memory.fileno])

    def _receive_memory(
        self, data: bytes, ancillary: list[tuple[int, int, bytes]], flags: int
    ) -> Sequence[bytes]:
        """Handles a packet that came with a descriptor: a large frame, or a block."""
        descriptors = [
            number
            for level, kind, passed in ancillary
            if (level, kind) == (sockets.SOL_SOCKET, sockets.SCM_RIGHTS)
            for (number,) in _DESCRIPTOR.iter_unpack(passed)
        ]
        try:
            if flags & _CUT_OFF or len(descriptors) != 1 or len(data) != _HEAD.size:
                raise wire.WireError(
                    "a packet is too large, or has not exactly one descriptor"
                )
            assert self.memory is not None
            kind, number = _HEAD.unpack(data)
            if kind != _FRAME:
                self.memory.add(number, descriptors[0])
                return ()
            size = buffers.memory_size(descriptors[0], self._max_bytes)
            data = os.pread(descriptors[0], size, 0)
            if len(data) != size:  # Above 2 GB, which no limit allows.
                raise wire.WireError("a frame could not be read whole")
            return (data,)
        except wire.WireError as error:
            log.warning("A local link is closed: %s.", error)
            self.abort()
            raise LinkEnded from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class LocalListener:
    """Accepts the local links of a server. Belongs to the server's loop thread.

    Args:
      addr: numeric address of the server.
      keys: keys of the run; None for a server without keys.
      max_bytes: maximum bytes of the arrays of a frame.
      poller: poller of the server's loop.
      on_frame: called with a link and each frame that came.
      on_end: called with a link that has ended.

    Raises:
      OSError: the name of the socket is taken.
    """

    def __init__(
        self,
        addr: str,
        keys: auth.Keys | None,
        max_bytes: int,
        poller: Poller,
        on_frame: OnFrame,
        on_end: Callable[[Link], None],
    ):
        self._key = auth.local_key(keys)
        self._max_bytes = frame_limit(max_bytes)
        self._poller = poller
        self._on_frame = on_frame
        self._on_end = on_end
        self._unknown: dict[int, tuple[sockets.socket, float]] = {}
        self._links: set[LocalLink] = set()
        self.name = _local_name(addr, self._key)
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        try:
            self._socket.bind(self.name)
            self._socket.listen(_QUEUE)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        poller.add(self._socket.fileno(), self._accept)

    def expire(self) -> None:
        """Closes connections that have not proved in time that they have the key."""
        now = time.monotonic()
        for connection, deadline in list(self._unknown.values()):
            if now > deadline:
                self._forget(connection).close()

    def close(self) -> None:
        """Closes all connections and links, after flushing the links."""
        self._poller.remove(self._socket.fileno())
        self._socket.close()
        for connection, _ in list(self._unknown.values()):
            self._forget(connection).close()
        for link in list(self._links):
            link.flush()
            self.discard(link)

    def discard(self, link: Link) -> None:
        """Closes a link, if it is one of these."""
        if isinstance(link, LocalLink) and link in self._links:
            self._links.discard(link)
            self._poller.remove(link.fileno)
            link.close()

    def _accept(self, _: int) -> None:
        while True:
            try:
                connection, _address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("A local connection was not accepted: %s", error)
                time.sleep(ACCEPT_PAUSE)
                return
            if len(self._unknown) >= MAX_UNKNOWN or not _is_same_user(connection):
                connection.close()
                continue
            connection.setblocking(False)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            try:
                connection.send(nonce)
            except OSError:
                connection.close()
                continue
            deadline = time.monotonic() + PROVE_SECONDS
            self._unknown[connection.fileno()] = (connection, deadline)
            check = functools.partial(self._check, connection, nonce)
            self._poller.add(connection.fileno(), check)

    def _check(self, connection: sockets.socket, nonce: bytes, _: int) -> None:
        """Makes a connection a link if it proves that it has the key."""
        try:
            packet = connection.recv(1024)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        self._forget(connection)
        theirs, proof = packet[:_NONCE_BYTES], packet[_NONCE_BYTES:]
        expected = auth.prove(self._key, b"client", nonce, theirs)
        try:
            if not hmac.compare_digest(proof, expected):
                raise OSError("A local connection did not prove that it has the key.")
            connection.send(auth.prove(self._key, b"server", nonce, theirs))
        except OSError:
            connection.close()
            return
        link = LocalLink(connection, self._max_bytes, self._blocked)
        self._links.add(link)
        self._poller.add(link.fileno, functools.partial(self._ready, link))

    def _ready(self, link: LocalLink, events: int) -> None:
        if events & select.POLLOUT:
            link.flush()
        try:
            for frame in link.receive():
                self._on_frame(link, frame)
        except LinkEnded:
            self.discard(link)
            self._on_end(link)

    def _blocked(self, link: LocalLink, blocked: bool) -> None:
        events = select.POLLIN | (select.POLLOUT if blocked else 0)
        try:
            self._poller.modify(link.fileno, events)
        except OSError:
            pass  # It was closed meanwhile.

    def _forget(self, connection: sockets.socket) -> sockets.socket:
        del self._unknown[connection.fileno()]
        self._poller.remove(connection.fileno())
        return connection


def connect_local(
    addr: str,
    keys: auth.Keys | None,
    max_bytes: int,
    cancel: Wakeup | None = None,
    look_up: bool = False,
) -> LocalLink | None:
    """Opens a client's end of a local link; None if the server has none here.

    Args:
      addr: address of the server.
      keys: keys of the run; None for a server without keys.
      max_bytes: maximum bytes of the arrays of a frame.
      cancel: ends the attempt when it is set.
      look_up: whether a host name may be resolved, which can take long.
    """
    if not LOCAL_AVAILABLE:
        return None
    key = auth.local_key(keys)
    for own in auth.own_addresses(addr, look_up):
        # Outside of the block below: if there is no descriptor left, ZeroMQ, which
        # needs several, must not be tried.
        connection = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        try:
            connection.settimeout(PROVE_SECONDS)
            connection.connect(_local_name(own, key))
            if _is_same_user(connection) and _prove(connection, key, cancel):
                return LocalLink(connection, frame_limit(max_bytes))
        except OSError:
            pass  # No server has that name in this network namespace, or it is busy.
        connection.close()
    return None


def _prove(connection: sockets.socket, key: bytes, cancel: Wakeup | None) -> bool:
    """Exchanges proofs of the key, as the client; True if the server has it, too."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if cancel is not None:
        poll.register(cancel.fileno(), select.POLLIN)

    def receive() -> bytes:
        ready = [descriptor for descriptor, _ in poll.poll(PROVE_SECONDS * 1000)]
        return connection.recv(1024) if connection.fileno() in ready else b""

    theirs, ours = receive(), secrets.token_bytes(_NONCE_BYTES)
    if len(theirs) != _NONCE_BYTES:
        return False
    connection.send(ours + auth.prove(key, b"client", theirs, ours))
    expected = auth.prove(key, b"server", theirs, ours)
    return hmac.compare_digest(receive(), expected)


def _local_name(addr: str, key: bytes) -> str:
    """Returns the abstract socket name of an address, which depends on key and user."""
    host, port = auth.parse_address(addr)
    host = "*" if host in auth.WILDCARDS else host
    text = f"{os.getuid()} {host} {port}"
    return f"\0embodied-{auth.prove(key, text.encode()).hex()[:32]}"


def _is_same_user(connection: sockets.socket) -> bool:
    peer = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(peer)[1] == os.getuid()
