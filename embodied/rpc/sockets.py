"""The ZeroMQ sockets under servers and clients, made safe to share between threads.

A libzmq socket may be used by one thread at a time. Here a lock guards each socket,
so that whoever has a message sends it at once instead of handing it to another
thread; only waiting is done without the lock, on the socket's file descriptor.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import select
import socket as sockets
import threading
from collections.abc import Callable
from typing import Any, cast

import zmq

from embodied.rpc import auth

HANDSHAKE_MS = 5_000  # A connection that does not identify itself by then is closed.
SEND_QUEUE = 512  # Messages; above what well-behaved clients can have in flight.
MESSAGE_SLACK = 1 << 21  # Bytes of a frame that are not arrays.

# As plain integers: pyzmq's enums cost a microsecond at each use.
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_COPY_BELOW = 1 << 16


class Wakeup:
    """Wakes a thread that polls. Any thread may call `set`."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._read

    def set(self) -> None:
        """Makes the descriptor readable."""
        try:
            os.write(self._write, b"\1\0\0\0\0\0\0\0")
        except (BlockingIOError, OSError):
            pass  # It is readable already, or closed.

    def clear(self) -> None:
        """Makes the descriptor unreadable until the next `set`."""
        try:
            os.read(self._read, 4096)
        except (BlockingIOError, OSError):
            pass

    def close(self) -> None:
        """Frees the descriptors. No other thread may use it any more."""
        os.close(self._read)
        if self._write != self._read:
            os.close(self._write)


class LockedSocket:
    """A socket for any thread: sends at once, receives without waiting.

    `wakeup` is set whenever a message may have arrived whose signal a sender has
    swallowed, and cleared by `receive`: libzmq signals its descriptor at the first
    message only, and every operation on the socket takes that signal.
    """

    def __init__(self, socket: zmq.Socket, wakeup: Wakeup):
        self._socket = socket
        self._lock = threading.Lock()
        self._wakeup = wakeup
        self._closed = False
        self._signalled = False
        self.fileno = descriptor(socket)

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
                self._wakeup.clear()
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

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            self._wakeup.set()


def server_socket(
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


def client_socket(
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


def parse_address(addr: str | int) -> tuple[str, int]:
    """Splits 'host:port', '[::1]:port' or a port into host and port."""
    text = str(addr).removeprefix("tcp://")
    host, _, port = text.rpartition(":")
    host = host or "localhost"
    if not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise ValueError(f"Expected an address HOST:PORT or a port, got {addr!r}.")
    return host, int(port)


def bind_address(addr: str | int, keys: auth.Keys | None, insecure: bool) -> str:
    """Returns the numeric address to listen at, refusing unsafe choices."""
    host, port = parse_address(addr)
    numeric = _resolve(host)
    loopback = ipaddress.ip_address(numeric.strip("[]")).is_loopback
    if not loopback and keys is None and not insecure:
        raise auth.AuthError(
            f"{addr} can be reached from other machines. Pass the keys of the run "
            "(--run.keyfile FILE), or listen at localhost."
        )
    return f"{numeric}:{port}"


def check_free(addr: str) -> None:
    """Raises ValueError if nobody can listen at a numeric address now."""
    host, port = parse_address(addr)
    family = sockets.AF_INET6 if host.startswith("[") else sockets.AF_INET
    with sockets.socket(family) as probe:
        probe.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ValueError(
                f"A server cannot listen at {addr}: {error.strerror}. Choose another "
                "address of this machine, or end the program that uses it."
            ) from None


def connect_address(addr: str | int) -> str:
    """Returns the address to connect to."""
    host, port = parse_address(addr)
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"


def free_port() -> int:
    """Returns a port of the loopback interface that nobody listens at."""
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def descriptor(socket: zmq.Socket) -> int:
    """The file descriptor that is readable when the socket has something to do."""
    return cast(int, socket.get(zmq.FD))


class Poller:
    """Waits until one of several descriptors is readable."""

    def __init__(self, *descriptors: int):
        self._epoll = hasattr(select, "epoll")
        self._poll: Any = select.epoll() if self._epoll else select.poll()
        # Returns descriptors and events, after at most so many seconds.
        self.wait: Callable[[float | None], list[tuple[int, int]]] = (
            self._poll.poll if self._epoll else self._wait_milliseconds
        )
        # Changes a descriptor's events, without waking whoever waits. For Linux.
        self.modify: Callable[[int, int], None] = self._poll.modify
        for descriptor in descriptors:
            self.add(descriptor)

    def add(self, descriptor: int) -> None:
        """Waits for this one too. On Linux, any thread."""
        self._poll.register(descriptor, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor that is readable when one of the others is. Linux only."""
        return self._poll.fileno()

    def remove(self, descriptor: int) -> None:
        """Waits for this one no longer."""
        self._poll.unregister(descriptor)

    def close(self) -> None:
        """Frees what it holds."""
        if self._epoll:
            self._poll.close()

    def _wait_milliseconds(self, seconds: float | None) -> list[tuple[int, int]]:
        # Rounded up, so that it never spins.
        milliseconds = None if seconds is None else int(seconds * 1000) + (seconds > 0)
        return self._poll.poll(milliseconds)


def _resolve(host: str) -> str:
    if host == "localhost":
        return "127.0.0.1"
    if host in ("*", "0.0.0.0"):
        return "0.0.0.0"
    try:
        family, _, _, _, where = sockets.getaddrinfo(host.strip("[]"), None)[0]
    except OSError as error:
        raise ValueError(f"Cannot resolve host {host!r}: {error}.") from None
    return f"[{where[0]}]" if family == sockets.AF_INET6 else str(where[0])


def _raise_descriptor_limit() -> None:
    """Lets a server hold more connections than the usual 1024 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            pass  # The system's own limit is lower; the flood test shows the effect.
