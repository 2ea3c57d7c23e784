"""The clients of a server: their sessions, env slots and replies. Any process.

A link need not report which clients are there, so clients do: they send HELLO when they
connect, heartbeats while they live, and BYE when they leave. Every call has a number; a
session keeps the replies that its client has not confirmed, so that a call sent again
after a reconnect, over any link, is answered and not applied a second time. Sessions
are owned by the server's loop thread, except where a method says otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from embodied.rpc import buffers, wire
from embodied.rpc.calls import Statistics
from embodied.rpc.links import MESSAGE_SLACK, Link

PROTOCOL = 4
MAX_INFLIGHT = 256  # Calls of one client that wait for a reply or its confirmation.
MAX_AWAY = 1000  # Sessions of clients that are gone, kept for their return.
AWAY_SECONDS = 600.0
CLIENT_BYTES = 16  # Length of the random identity of a client.

NEW, REPEATED, REFUSED = range(3)

log = logging.getLogger("embodied.rpc")


class ClientSession:
    """One client: its name, its limits, and its unconfirmed replies."""

    def __init__(self, client: bytes, hello: dict[str, Any]):
        self.client = client
        self.heard = time.monotonic()
        self.away = True  # True until it is admitted, and while it is gone.
        # By call: None while it runs, then its reply until the client confirms it.
        self._replies: dict[int, bytes | None] = {}
        self._highest = -1  # All calls up to here came, except the missing ones.
        self._missing: set[int] = set()
        self._lock = threading.Lock()  # Guards the three above.
        self.link: Link | None = None  # Of its last HELLO; None while it is gone.
        self.update(hello)

    def update(self, hello: dict[str, Any]) -> None:
        """Sets the fields from a HELLO, the first one or one after a reconnect."""
        try:
            self.name = str(hello["name"])[:100]
            self.slots = int(hello["slots"])
            self.group = hello["group"]
            self.info = hello["info"]
            self.max_inflight = min(int(hello["max_inflight"]), MAX_INFLIGHT)
            hash(self.group)
        except (KeyError, TypeError, ValueError) as error:
            raise wire.WireError(f"not a complete HELLO: {error!r}") from None
        if not 0 <= self.slots <= 1 << 20:
            raise wire.WireError(f"expected 0 to {1 << 20} env slots, got {self.slots}")

    def begin(self, seq: int, open_calls: Sequence[int]) -> tuple[int, bytes | None]:
        """Registers a call; returns NEW, REPEATED or REFUSED, and any reply it has.

        A repeated call has none while it still runs, or after its client confirmed it.

        Args:
          seq: the call's number.
          open_calls: the client's earlier calls that have no reply yet. The client has
            the replies of all other earlier calls, and will not send those again.
        """
        with self._lock:
            replies, missing = self._replies, self._missing
            alone = not open_calls and not missing and seq > self._highest
            if alone and all(replies.values()):  # The common case: one at a time.
                replies.clear()
                replies[seq] = None
                self._highest = seq
                return NEW, None
            if seq in replies or (seq <= self._highest and seq not in missing):
                return REPEATED, replies.get(seq)
            for old, reply in list(replies.items()):
                if reply and old < seq and old not in open_calls:
                    del replies[old]
            if max(len(replies), len(open_calls)) >= self.max_inflight:
                return REFUSED, None
            if seq < self._highest:
                missing.discard(seq)
            elif missing or open_calls:
                highest = self._highest
                self._missing = {x for x in open_calls if x in missing or x > highest}
            self._highest = max(seq, self._highest)
            replies[seq] = None
            return NEW, None

    def finish(self, seq: int, frame: bytes) -> None:
        """Keeps a call's reply until the client has it. Any thread."""
        with self._lock:
            self._replies[seq] = frame

    def forget(self, seq: int) -> None:
        """Undoes `begin`, so that the call is new when it is sent again. Any thread."""
        with self._lock:
            self._replies.pop(seq, None)
            self._missing.add(seq)


class Sessions:
    """All sessions of a server.

    All callbacks run in the loop thread. What `on_join` and `on_leave` raise is logged
    and otherwise ignored. `admit` is called for every client that says HELLO: True
    admits it, False makes it ask again later, and a WireError refuses it.

    Args:
      timeout: seconds without a sign of life after which a client counts as gone.
      discard: called with links that are not needed any more.
    """

    def __init__(self, timeout: float, discard: Callable[[Link], None]):
        self._timeout = timeout
        self._discard = discard
        self._sessions: dict[bytes, ClientSession] = {}
        self._slots: dict[Any, int] = {}
        self._present = 0
        self.admit: Callable[[ClientSession], bool] = lambda session: True
        self.on_join: list[Callable[[ClientSession], None]] = []
        self.on_leave: list[Callable[[ClientSession], None]] = []

    def __iter__(self) -> Any:
        return iter([x for x in list(self._sessions.values()) if not x.away])

    def __len__(self) -> int:
        return self._present

    def slots(self, group: Any) -> int:
        """Returns the env slots that connected clients of a group have. Any thread."""
        return self._slots.get(group, 0)

    def hello(self, link: Link, hello: Any) -> ClientSession | None:
        """Registers a client that connects or reconnects; None if not admitted yet."""
        client = _read_client(hello)
        session = self._sessions.get(client)
        if session is None:
            session = ClientSession(client, hello)
        else:
            self.lost(session, keep=link)
            session.update(hello)
        if not self.admit(session):
            return None
        self._sessions[client] = session
        session.link, link.session = link, session
        session.heard = time.monotonic()
        self._mark(session, away=False)
        return session

    def get(self, link: Link) -> ClientSession | None:
        """Returns the session of a link's client, and marks it as alive.

        None for a client that was away or has another link by now: it has to say HELLO.
        """
        session = link.session
        if session is None or session.away or session.link is not link:
            return None
        session.heard = time.monotonic()
        return session

    def bye(self, session: ClientSession) -> None:
        """Forgets a client that has left, or was gone for too long."""
        if self._sessions.get(session.client) is session:
            del self._sessions[session.client]
            self.lost(session)

    def lost(self, session: ClientSession, keep: Link | None = None) -> None:
        """Marks a client as gone but keeps its replies for its return.

        Its link is discarded, unless it is `keep`.
        """
        link, session.link = session.link, None
        if link is not None and link is not keep:
            self._discard(link)
        if not session.away:
            self._mark(session, away=True)

    def expire(self) -> None:
        """Marks silent clients as gone, and forgets those gone for long."""
        now = time.monotonic()
        away = []
        for session in list(self._sessions.values()):
            silent = now - session.heard
            if not session.away and silent > self._timeout:
                self.lost(session)
            if session.away:
                away.append((silent, session))
        away.sort(key=lambda pair: pair[0])
        for index, (silent, session) in enumerate(away):
            if index >= MAX_AWAY or silent > AWAY_SECONDS:
                self.bye(session)

    def _mark(self, session: ClientSession, away: bool) -> None:
        """Records that a client has come or gone, and calls the callbacks."""
        session.away = away
        sign = -1 if away else 1
        self._present += sign
        if session.slots:
            slots = self.slots(session.group) + sign * session.slots
            self._slots[session.group] = slots
        for callback in self.on_leave if away else self.on_join:
            try:
                callback(session)
            except Exception:
                log.exception("A callback failed for client %s.", session.name)


def make_hello(
    client: bytes,
    name: str,
    max_inflight: int,
    slots: int = 0,
    group: Any = None,
    info: Any = None,
) -> dict[str, Any]:
    """Returns the introduction of a client; the arguments are those of `Client`."""
    return {
        "version": PROTOCOL,
        "client": client,
        "name": name,
        "slots": slots,
        "group": group,
        "info": info,
        "max_inflight": max_inflight,
    }


def _read_client(hello: Any) -> bytes:
    """Returns the identity of the client that says HELLO.

    Raises:
      wire.WireError: it speaks another version, or its HELLO is not valid.
    """
    if not isinstance(hello, dict):
        raise wire.WireError("a HELLO is not a dict")
    version, client = hello.get("version"), hello.get("client")
    if version != PROTOCOL:
        raise wire.WireError(
            f"the server speaks version {PROTOCOL} of the protocol, the client "
            f"{version}; install the same release on both"
        )
    if not isinstance(client, bytes) or len(client) != CLIENT_BYTES:
        raise wire.WireError("a HELLO does not name its client")
    return client


class Outbox:
    """Encodes answers, keeps them for repeated calls, and sends them."""

    def __init__(self, server: str, codec: wire.Codec, statistics: Statistics):
        self._server = server
        self._codec = codec
        self._counts = statistics.counts

    def reply(
        self, seq: int, spec: wire.Spec, arrays: list, memory: Any = None
    ) -> bytes:
        """Encodes a result; copies large ones into the client's memory if they fit.

        Args:
          seq: the call's number.
          spec: header of the result.
          arrays: arrays of the result.
          memory: memory that the client offered, or None.
        """
        limit = self._codec.max_bytes
        in_memory = buffers.THRESHOLD <= spec.nbytes <= len(memory or b"")
        nbytes = 0 if in_memory else spec.nbytes
        if nbytes > limit or nbytes + len(spec.encoded) > limit + MESSAGE_SLACK:
            raise wire.WireError(
                f"a reply of {nbytes + len(spec.encoded)} bytes is more than the limit "
                f"of {limit}"
            )
        if in_memory:
            buffers.copy_into(spec.views(memory), arrays)
        return wire.encode(wire.REPLY, seq, spec, arrays, in_memory=in_memory)

    def exception(self, seq: int, method: str, error: BaseException) -> bytes:
        """Encodes what a function raised."""
        self._counts["errors"] += 1
        text = "".join(traceback.format_exception(error))
        try:
            shown = str(error)
        except Exception:
            shown = "it cannot be shown as text."
        message = f"'{method}' of server {self._server} failed: {shown}"
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
        return wire.encode(wire.ERROR, seq, *self._codec.flatten("", [error]))

    def finish(self, session: ClientSession, seq: int, frame: bytes) -> None:
        """Keeps and sends the final answer to a call."""
        session.finish(seq, frame)
        self.send(session, frame)
        self._counts["replies"] += 1

    def send(self, session: ClientSession, frame: bytes) -> None:
        """Sends an answer.

        A client that is gone gets it when it reconnects and sends the call again.
        """
        link = session.link
        if link is not None and link.send(frame):
            self._counts["sent_bytes"] += len(frame)

    def control(self, link: Link, kind: int, data: Any = None) -> None:
        """Sends a message that answers no call."""
        link.send(self._codec.control(kind, data))


def _sendable(text: str) -> str:
    """Replaces what UTF-8 cannot express, such as half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()
