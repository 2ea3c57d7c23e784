"""Links that speak portal's protocol, for the same servers and clients. Any process.

The reference implementation uses this protocol, so its workers can call these servers.
Only portal's sockets and packing are used: its own servers end the process when a
method fails before its `postfn`, and stall when a batch is not exactly full.

    request: number 8 B | length of the name 8 B | name | packed arguments
    reply:   number 8 B | status 8 B, 0 for success | packed result, or a text

A call with stacks of n rows has the name METHOD:n. Data that portal's packing cannot
carry (dtypes such as bfloat16, empty strings) travels as a frame of `wire`. Both ends
here translate between portal's messages and frames; all else is as with any link.

What portal lacks: it has no authentication, so these servers listen only at the
loopback interface unless they are `insecure`. It cannot tell a repeated call from a new
one, so a client's open calls fail when its connection is lost. It does not send the
number of env slots, so an incomplete batch waits for its timeout. Plain numbers arrive
as arrays, tuples as lists.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from embodied.rpc import auth, wire
from embodied.rpc.batching import BatchServer
from embodied.rpc.client import Caller, Client
from embodied.rpc.links import MESSAGE_SLACK, Link, LinkEnded, OnFrame
from embodied.rpc.server import Server, make_welcome
from embodied.rpc.sessions import CLIENT_BYTES, MAX_INFLIGHT, make_hello
from embodied.rpc.threads import Poller, Wakeup

CONNECT_SECONDS = 1.0  # Time limit of a client's attempt to connect.
POLL_SECONDS = 1.0  # Seconds between checks: a failure of portal's thread wakes nobody.
LAST_REPLIES = 2.0  # Seconds that a closing server waits for replies to be sent.
SEND_TRIES = 100
UNLIMITED = 1 << 30  # Length limit of queues. Portal fails when one is longer.
REFUSED, FAILED = 3, 4  # Status of error replies, as portal has them.

_HEAD = struct.Struct("<QQ")
_ESCAPE = "__wire__"  # Key of data that portal itself cannot carry.
_TRACEBACK = "\n\nOn the server:\n"

log = logging.getLogger("embodied.rpc")


def import_portal() -> Any:
    """Returns the portal package, or raises an ImportError that says what to do."""
    # Portal keeps a list `children` in each thread that starts others. It warns if a
    # thread has none, as is the case for threads that portal has not made.
    vars(threading.current_thread()).setdefault("children", [])
    try:
        return importlib.import_module("portal")
    except ImportError as error:
        raise ImportError(
            "The portal transport needs the portal package. Install it with "
            "`pip install 'dreamerv3-parallel[portal]'`, or use --run.transport zmq."
        ) from error


class PortalCaller(Caller):
    """The calls of a `PortalClient`."""

    def _open_link(self) -> Link | None:
        link = ConnectLink(self.addr, self.name)
        if link.connect():
            return link
        link.close()
        return None


class PortalClient(Client):
    """A `Client` that speaks portal's protocol; takes the same arguments.

    `keys`, `insecure`, `slots`, `group`, `info` and `link` have no meaning for portal.
    """

    CALLER = PortalCaller

    def __init__(self, addr: str | int, *args: Any, **kwargs: Any):
        import_portal()
        kwargs |= {"keys": None, "insecure": True, "link": "remote"}
        super().__init__(addr, *args, **kwargs)


class ConnectLink(Link):
    """A client's end of one connection.

    Portal's thread calls `_received`, and `_put` at the end of the connection. An
    exception in that thread would end the process, so these two must not raise any.
    """

    def __init__(self, addr: str, name: str):
        super().__init__()
        self._portal = import_portal()
        self._codec = wire.Codec()
        self._lock = threading.Lock()  # Held to take frames out.
        self._frames: deque[bytes | None] = deque()  # None is the end.
        self._arrived = Wakeup()
        self.descriptors = (self._arrived.fileno(),)
        host, port = auth.parse_address(addr)
        self._socket = self._portal.ClientSocket(
            f"{host.strip('[]')}:{port}",
            name,
            start=False,
            ipv6=":" in host,
            logging=False,
            max_send_queue=2 * MAX_INFLIGHT,
            max_recv_queue=2 * MAX_INFLIGHT,
        )
        self._socket.callbacks_recv.append(self._received)
        self._socket.callbacks_disc.append(lambda: self._put(None))
        self._socket.start()

    def connect(self) -> bool:
        """Waits up to CONNECT_SECONDS for the server; True if it is connected."""
        return self._socket.connect(CONNECT_SECONDS)

    def send(self, frame: bytes) -> bool:
        """Sends a call; answers a HELLO itself, in place of the server."""
        message = self._codec.decode(frame)
        if message.kind == wire.HELLO:
            # A new identity each time: the server may have restarted, so open calls
            # that were sent must fail.
            welcome = make_welcome(secrets.token_hex(8), self._codec.max_bytes)
            self._put(self._codec.control(wire.WELCOME, welcome))
        if message.kind != wire.CALL:
            return True
        name = message.spec.method + (f":{message.rows}" if message.rows else "")
        data = self._portal.pack(to_portal(message.data()))
        try:
            head = _HEAD.pack(message.seq, len(name.encode()))
            self._socket.send(b"".join((head, name.encode(), *data)), timeout=0)
        except (self._portal.Disconnected, TimeoutError):
            return False  # The connection was lost.
        return True

    def receive(self) -> list[bytes]:
        """Returns the answers that came; reports the end only after all of them."""
        self._arrived.clear()
        frames: list[bytes] = []
        with self._lock:
            while self._frames and (frame := self._frames[0]) is not None:
                frames.append(frame)
                self._frames.popleft()
            if self._frames:
                if not frames:
                    raise LinkEnded
                self._arrived.set()  # The next call reports the end.
        return frames

    def close(self) -> None:
        """Ends portal's thread, and frees the descriptors."""
        self._socket.close()
        self._arrived.close()

    def _put(self, frame: bytes | None) -> None:
        self._frames.append(frame)
        self._arrived.set()

    def _received(self, data: memoryview) -> None:
        self._socket.recvq.get_nowait()  # Portal also queues what it passes here.
        try:
            number, status = _HEAD.unpack_from(data)
            payload = data[_HEAD.size :]
            if status:
                kind, tree = wire.ERROR, decode_error(status, payload)
            else:
                kind, tree = wire.REPLY, from_portal(self._portal.unpack(payload))
            self._put(wire.encode(kind, number, *self._codec.flatten("", [tree])))
        except Exception:
            log.exception("An answer of a portal server could not be handled.")


class PortalServer(Server):
    """A `Server` for clients that speak portal's protocol; takes the same arguments.

    `keys` has no meaning for portal; `insecure` allows other addresses than loopback.
    """

    ADVICE = (
        "portal has no authentication. Listen at localhost, use --run.transport zmq, "
        "or allow everyone to call with --run.insecure True."
    )

    def __init__(
        self, addr: str | int, *args: Any, insecure: bool = False, **kwargs: Any
    ):
        import_portal()
        self._open_to_all = insecure
        kwargs |= {"keys": None, "insecure": True}
        addr = auth.bind_address(addr, None, insecure, self.ADVICE)
        super().__init__(addr, *args, **kwargs)

    def _listen(self) -> list[Any]:
        listener = PortalListener(
            self, self._codec, self._poller, self._receive, self._statistics.reject
        )
        allowed = "" if self._open_to_all else ", so it is a loopback address"
        note = "%s: portal has no authentication: everyone who reaches %s may call%s."
        log.warning(note, self.name, self.addr, allowed)
        return [listener]


class PortalBatchServer(PortalServer, BatchServer):
    """A `BatchServer` for clients that speak portal's protocol."""


class PortalListener:
    """A server's end of all links to portal's clients.

    Its own thread takes portal's messages; the server's loop thread handles them. Any
    thread may send.
    """

    def __init__(
        self,
        server: Server,
        codec: wire.Codec,
        poller: Poller,
        on_frame: OnFrame,
        reject: Callable[[str, str], None],
    ):
        self.portal = import_portal()
        self._addr, self._name = server.addr, server.name
        self.sessions = server.sessions
        self.codec = codec
        self._poller = poller
        self.on_frame = on_frame
        self._reject = reject
        self._links: dict[Any, AcceptedLink] = {}  # By connection.
        self._messages: deque[tuple[Any, memoryview]] = deque()
        self._arrived = Wakeup()
        self._closing = threading.Event()
        self._socket = self._open()
        poller.add(self._arrived.fileno(), self._receive)
        self._thread = threading.Thread(
            target=self._run, name=f"{server.name}-portal", daemon=True
        )
        self._thread.start()

    def expire(self) -> None:
        """Marks connected clients as alive, without heartbeats, and drops others."""
        there = set(self._socket.connections)
        for connection, link in list(self._links.items()):
            if connection in there:
                link.stay()
                continue
            del self._links[connection]
            if link.session is not None:
                self.sessions.bye(link.session)

    def discard(self, link: Link) -> None:
        """Does nothing: clients close their connections."""

    def close(self) -> None:
        """Sends the last replies, and ends."""
        self._closing.set()
        self._socket.recvq.put((None, b""))  # Wakes the thread.
        self._thread.join()
        self._socket.shutdown()
        self._socket.close(LAST_REPLIES)
        self._poller.remove(self._arrived.fileno())
        self._arrived.close()

    def send(self, connection: Any, *message: bytes | memoryview) -> bool:
        """Sends a message. Any thread."""
        failure: Exception | None = None
        for _ in range(SEND_TRIES):
            try:
                self._socket.send(connection, *message)
                return True
            except RuntimeError as error:
                failure = error  # Portal counts connections while a thread adds one.
            except Exception as error:
                failure = error  # Its thread has ended, with an error of any type.
                break
        log.warning("%s: a reply was not sent: %r", self._name, failure)
        return False

    def _open(self) -> Any:
        host, port = auth.parse_address(self._addr)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        host = host.strip("[]")
        # Portal leaks its socket when it cannot listen, so listening is tried first.
        socket.create_server((host, port), family=family).close()
        return import_portal().ServerSocket(
            port,
            self._name,
            host=host,
            ipv6=family == socket.AF_INET6,
            logging=False,
            max_send_queue=UNLIMITED,
            max_recv_queue=UNLIMITED,
        )

    def _receive(self, _: int) -> None:
        self._arrived.clear()
        while self._messages:
            connection, data = self._messages.popleft()
            if connection not in self._links:
                self._links[connection] = AcceptedLink(self, connection)
            self.take_in(self._links[connection], data)

    def take_in(self, link: AcceptedLink, data: memoryview) -> None:
        """Turns a message into a call, or answers it with an error."""
        try:
            link.take_in(data)
        except wire.WireError as error:
            text = f"Server {self._name} refused a message: {error}"
            self._reject("request", text)
            link.refuse(bytes(data[:8]).ljust(8, b"\0"), text)

    # The thread that takes messages.

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, data = self._socket.recv(timeout=POLL_SECONDS)
            except TimeoutError:
                continue
            except Exception as error:
                # Portal's thread ends at what it does not understand; its error, of any
                # type, is raised by the next `recv`.
                self._reject("socket", f"portal's socket failed: {error!r}")
                self._reopen()
                continue
            if connection is not None:
                self._messages.append((connection, data))
                self._arrived.set()

    def _reopen(self) -> None:
        self._socket.close(1.0)
        while not self._closing.is_set():
            try:
                self._socket = self._open()
                return
            except OSError as error:
                log.error("%s: cannot listen at %s: %s", self._name, self._addr, error)
                self._closing.wait(POLL_SECONDS)


class AcceptedLink(Link):
    """A server's end of one of portal's connections.

    It introduces its client to the server. Messages that come before the client is
    admitted wait. The server's loop thread takes messages in; any thread may send.
    """

    def __init__(self, listener: PortalListener, connection: Any):
        super().__init__()
        self._listener = listener
        self._connection = connection
        self._codec = listener.codec
        self._numbers: dict[int, bytes] = {}  # Portal's, of unanswered calls, by seq.
        self._next = 0
        self._early: list[memoryview] = []  # What came before it was admitted.
        name = f"{connection[0]}:{connection[1]}"
        self._hello = make_hello(secrets.token_bytes(CLIENT_BYTES), name, MAX_INFLIGHT)

    def stay(self) -> None:
        """Marks the client as alive, and retries messages that wait for admission."""
        if self.session is not None:
            self.session.heard = time.monotonic()
        early, self._early = self._early, []
        for data in early:
            self._listener.take_in(self, data)

    def take_in(self, data: memoryview) -> None:
        """Turns a message into a call, or keeps it until the client is admitted.

        Raises:
          WireError: the client is refused, or the message cannot be decoded.
        """
        sessions = self._listener.sessions
        if sessions.get(self) is None and sessions.hello(self, self._hello) is None:
            self._early.append(data)
            return
        limit = self._codec.max_bytes
        method, rows, arguments = decode_call(self._listener.portal, data, limit)
        spec, arrays = self._codec.flatten(method, arguments)
        if spec.nbytes > limit:
            raise wire.WireError(f"{spec.nbytes} bytes are more than {limit}")
        seq, others = self._next, list(self._numbers)
        self._next += 1
        self._numbers[seq] = bytes(data[:8])
        frame = wire.encode(wire.CALL, seq, spec, arrays, rows, open=others)
        self._listener.on_frame(self, frame)

    def send(self, frame: bytes) -> bool:
        """Sends the answer to a call."""
        message = self._codec.decode(frame)
        tree = message.value()
        if (number := self._numbers.pop(message.seq, None)) is None:
            return True
        if message.kind == wire.ERROR:
            text, status = tree["message"], REFUSED
            if tree["kind"] == "exception":
                text = f"{tree['type']}: {text}{_TRACEBACK}{tree['traceback']}"
                status = FAILED
            return self.refuse(number, text, status)
        data = self._listener.portal.pack(to_portal(tree))
        return self._listener.send(self._connection, number, bytes(8), *data)

    def refuse(self, number: bytes, text: str, status: int = REFUSED) -> bool:
        """Answers a message with an error."""
        head = status.to_bytes(8, "little")
        return self._listener.send(self._connection, number, head, text.encode())


def decode_call(portal: Any, data: memoryview, limit: int) -> tuple[str, int, list]:
    """Returns method, rows and arguments of a request.

    Raises:
      WireError: it is over the limit, or cannot be decoded.
    """
    if not _HEAD.size <= len(data) <= limit + MESSAGE_SLACK:
        raise wire.WireError(
            f"expected at least {_HEAD.size} bytes and arrays of at most {limit} "
            f"bytes, got {len(data)} bytes"
        )
    _, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    try:
        method, _, rows = bytes(data[_HEAD.size : end]).decode().partition(":")
        return method, int(rows or 0), from_portal(portal.unpack(data[end:]))
    except Exception as error:
        # Portal's decoder may raise any error for bad bytes.
        raise wire.WireError(f"it cannot be decoded: {error!r}") from None


def decode_error(status: int, payload: memoryview) -> dict[str, str]:
    """Returns the error of a reply, from a `PortalServer` or one of portal's own."""
    text = bytes(payload).decode(errors="replace")
    head, _, traceback = text.partition(_TRACEBACK)
    name, _, message = head.partition(": ") if traceback else ("", "", head)
    kind = "exception" if status >= FAILED else "bad"
    return {"kind": kind, "message": message, "type": name, "traceback": traceback}


def to_portal(tree: Any) -> Any:
    """Wraps what portal cannot carry in frames of `wire`; leaves the rest to portal.

    The tree must be one that `wire` can send.
    """
    if isinstance(tree, dict):
        return {key: to_portal(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_portal(value) for value in tree]
    if isinstance(tree, np.ndarray | np.generic):
        array = np.asarray(tree, order="C")
        dtype = array.dtype
        if dtype.isbuiltin == 1 and dtype.kind in "biuf" and dtype.itemsize <= 8:
            return array
    elif tree not in ("", b""):
        return tree
    return {_ESCAPE: wire.Codec().control(wire.REPLY, tree)}


def from_portal(tree: Any) -> Any:
    """Undoes `to_portal`; tuples and plain numbers stay lists and arrays."""
    if isinstance(tree, dict):
        if tree.keys() == {_ESCAPE}:
            return wire.Codec().decode(bytes(tree[_ESCAPE])).value()
        return {key: from_portal(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [from_portal(value) for value in tree]
    return bytes(tree) if isinstance(tree, memoryview) else tree
