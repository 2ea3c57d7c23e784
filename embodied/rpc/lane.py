"""A short cut between two processes of one host: a Unix socket beside ZeroMQ.

ZeroMQ moves every message through a background thread on both sides. Between two
processes of one machine the calling thread can do it itself, in one system call, and
large arrays are in shared memory anyway. A client that was let in over ZeroMQ, with
its keys, is told the name of such a socket and a secret for it; what travels on it are
the same frames. docs/decisions/local-lane.md has the measurements.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from typing import Any

AVAILABLE = hasattr(socket, "SO_PEERCRED")  # Linux: also abstract names, SEQPACKET.
MAX_BYTES = 60_000  # Of one frame; larger ones go over ZeroMQ.
TOKEN_BYTES = 16
ATTACH_SECONDS = 5.0  # In which a connection has to say whose it is.
_BACKLOG = 512
_PEER = struct.Struct("3i")


class Lane:
    """One connection. Any thread may send; one thread at a time receives."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        connection.setblocking(False)
        self.fileno = connection.fileno()
        self.opened = time.monotonic()
        self.owner: Any = None  # The server's session, once it is known.

    @classmethod
    def connect(cls, name: str, client: bytes, token: bytes) -> Lane | None:
        """Opens a client's end; None where that does not work."""
        if not AVAILABLE:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"\0{name}")
            connection.send(token + client)
        except OSError:
            connection.close()  # Another network namespace, for example.
            return None
        return cls(connection)

    def send(self, frame: bytes) -> bool:
        """Sends a frame; False where it is too large or the other side is not ready."""
        if len(frame) > MAX_BYTES:
            return False
        try:
            self._connection.send(frame)  # A packet goes out whole or not at all.
        except OSError:
            return False
        return True

    def receive(self) -> bytes | None:
        """Returns the next frame; an empty one at the end; None if there is none."""
        try:
            return self._connection.recv(MAX_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


class LaneServer:
    """A server's end: takes connections in, and knows which belong to whom."""

    def __init__(self) -> None:
        self.name = f"embodied-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self.fileno = self._listener.fileno()

    def accept(self) -> Lane | None:
        """Takes in one connection of this user, if one waits."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != os.getuid():
            connection.close()
            return None
        return Lane(connection)

    def close(self) -> None:
        """Takes in nobody any more."""
        self._listener.close()


def identify(packet: bytes) -> tuple[bytes, bytes]:
    """Splits the first packet of a connection into token and client."""
    return packet[:TOKEN_BYTES], packet[TOKEN_BYTES:]


def matches(token: bytes, expected: bytes) -> bool:
    """Compares secrets without telling how much of them was right."""
    return hmac.compare_digest(token, expected)
