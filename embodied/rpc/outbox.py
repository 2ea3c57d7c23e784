"""Answers on their way from a server to its clients. Any of the server's threads."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from embodied.rpc import layout, memory, wire
from embodied.rpc.session import Session
from embodied.rpc.sockets import MESSAGE_SLACK, LockedSocket
from embodied.rpc.statistics import Statistics


class Outbox:
    """Encodes answers, keeps them for calls that come twice, and sends them."""

    socket: LockedSocket  # Set when the server starts.

    def __init__(self, server: str, codec: wire.Codec, statistics: Statistics):
        self._server = server
        self._codec = codec
        self._counts = statistics.counts

    def reply(
        self,
        seq: int,
        spec: layout.Spec,
        values: Sequence[Any],
        arrays: list[np.ndarray],
        reply_memory: Any,
        made: bool = False,
    ) -> bytes:
        """Encodes a result, its arrays in the client's memory where they fit.

        Args:
          seq: the call's number.
          spec: of the result.
          values: its plain values.
          arrays: its arrays.
          reply_memory: what the client offered, or None.
          made: whether some arrays may lie in that memory already.
        """
        in_memory = reply_memory is not None and memory.THRESHOLD <= spec.nbytes <= len(
            reply_memory
        )
        if in_memory:
            write = memory.write_made if made else memory.write
            write(memoryview(reply_memory), spec, arrays)
        elif spec.nbytes > self._codec.max_bytes:
            raise self._too_large(spec.nbytes)
        frame = self._codec.encode(
            wire.REPLY, seq, spec, values, arrays, in_memory=in_memory
        )
        if len(frame) > self._codec.max_bytes + MESSAGE_SLACK:
            raise self._too_large(len(frame))
        return frame

    def _too_large(self, nbytes: int) -> wire.WireError:
        return wire.WireError(
            f"a reply of {nbytes} bytes is more than the limit of "
            f"{self._codec.max_bytes}"
        )

    def exception(self, seq: int, method: str, error: Exception) -> bytes:
        """Encodes what a function raised."""
        self._counts.errors += 1
        text = "".join(traceback.format_exception(error))
        message = f"'{method}' of server {self._server} failed: {error}"
        return self.error(seq, "exception", message, type(error).__name__, text)

    def error(
        self, seq: int, kind: str, message: str, type_name: str = "", text: str = ""
    ) -> bytes:
        """Encodes an error."""
        error = {
            "kind": kind,
            "message": _sendable(message[:10_000]),
            "type": _sendable(type_name),
            "traceback": _sendable(text[-20_000:]),
        }
        structure, arrays, values = wire.flatten(error)
        spec = self._codec.spec("", structure)
        return self._codec.encode(wire.ERROR, seq, spec, values, arrays)

    def finish(self, session: Session, seq: int, frame: bytes) -> None:
        """Answers a call, for good."""
        session.finish(seq, frame)
        self.send(session, frame)
        self._counts.replies += 1

    def send(self, session: Session, frame: bytes) -> None:
        """Sends an answer.

        A client that is not there gets it when it comes back and asks again.
        """
        lane = session.lane
        sent = lane is not None and lane.send(frame)
        if sent or self.socket.send(frame, session.client):
            self._counts.sent_bytes += len(frame)

    def control(self, client: bytes, kind: int, data: Any = None) -> None:
        """Sends a message that answers no call."""
        structure, arrays, values = wire.flatten(data)
        spec = self._codec.spec("", structure)
        frame = self._codec.encode(kind, wire.NO_CALL, spec, values, arrays)
        self.socket.send(frame, client)


def _sendable(text: str) -> str:
    """Replaces what UTF-8 cannot express, such as half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()
