"""Calls on their way from a client to a server, and how they fail. Any process."""

from __future__ import annotations

import time

from embodied.rpc import memory
from embodied.rpc.future import Future, Receiver


class Disconnected(ConnectionError):
    """The server is gone, or the client is closed."""


class RemoteError(RuntimeError):
    """The server answered with an error.

    Attributes:
      kind: 'exception' if the method raised, 'bad' if the request was refused.
      type: name of the exception's type on the server.
      message: the text alone, without the traceback.
      traceback: its text there.
    """

    def __init__(self, kind: str, message: str, type: str = "", traceback: str = ""):
        super().__init__(message)
        self.kind = kind
        self.type = type
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        if self.traceback:
            return f"{self.message}\n\nOn the server:\n{self.traceback}"
        return self.message


class Call(Future):
    """A call that has no reply yet, and what is needed to send it again.

    Args:
      method: of the server.
      addr: of the server.
      receiver: the client.
    """

    frame: bytes = b""
    request: memory.Block | None = None  # Where the arguments lie.
    reply: memory.Block | None = None  # Where the reply may be put.

    def __init__(self, method: str, addr: str, receiver: Receiver):
        self.method = method
        self._addr = addr
        self._receiver = receiver
        self.started = time.perf_counter()

    @property
    def call(self) -> str:  # type: ignore[override]
        """What is asked of whom, for messages."""
        return f"'{self.method}' from {self._addr}"

    def release(self) -> None:
        """Gives its memory back, when the server is done with it."""
        if self.request is not None:
            self.request.free()
            self.request = None
        if self.reply is not None:
            self.reply.free()
            self.reply = None
