"""Who is connected to a server, with which env slots, and which calls were answered.

A ROUTER socket tells neither who is there nor who has gone, so clients say it: HELLO
when they connect, a heartbeat while they live, BYE when they leave. Every call has a
number; a session keeps the replies that its client has not confirmed, so that a call
sent again after a reconnect is answered and not applied a second time. Sessions are
owned by the server's loop thread, except where a method says otherwise.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from embodied.rpc import wire
from embodied.rpc.lane import TOKEN_BYTES, Lane
from embodied.rpc.memory import PeerMemory

PROTOCOL = 2
MAX_INFLIGHT = 256  # Calls of one client that wait for a reply or its confirmation.
MAX_AWAY = 1000  # Sessions of clients that are gone, kept for their return.
AWAY_SECONDS = 600.0

NEW, REPEATED, REFUSED = range(3)

log = logging.getLogger("embodied.rpc")


class Session:
    """One client: who it is, what it may send, and its unconfirmed replies."""

    def __init__(self, client: bytes, hello: dict[str, Any]):
        self.client = client
        self.heard = time.monotonic()
        self.away = True  # Until it is admitted, and whenever it is gone.
        self.queues: dict[Any, deque] = {}  # Per worker pool, while one is at work.
        # Calls that are worked on (None), or whose reply the client may not have.
        self._replies: dict[int, bytes | None] = {}
        self._once: set[int] = set()  # Those of them that `save` must remember.
        self._highest = -1  # All calls up to here came, except the missing ones.
        self._missing: set[int] = set()
        self._lock = threading.Lock()  # Guards the four above.
        self.lane: Lane | None = None  # The short cut, while it is open.
        self.token = secrets.token_bytes(TOKEN_BYTES)  # The secret for opening it.
        self.update(hello)

    def update(self, hello: dict[str, Any]) -> None:
        """Takes over what a HELLO says, the first or one after a reconnect."""
        if not isinstance(hello, dict):
            raise wire.WireError("a HELLO is not a dict")
        try:
            self.name = str(hello["name"])[:100]
            self.slots = int(hello["slots"])
            self.group = hello["group"]
            self.info = hello["info"]
            self.max_inflight = min(int(hello["max_inflight"]), MAX_INFLIGHT)
            version = int(hello["version"])
            hash(self.group)
        except (KeyError, TypeError, ValueError) as error:
            raise wire.WireError(f"not a complete HELLO: {error!r}") from None
        if version != PROTOCOL:
            raise wire.WireError(
                f"the server speaks version {PROTOCOL} of the protocol, the client "
                f"{version}; install the same release on both"
            )
        if not 0 <= self.slots <= 1 << 20:
            raise wire.WireError(f"{self.slots} env slots are not possible")
        self.memory = PeerMemory(hello.get("host"))

    def begin(
        self, seq: int, open_calls: Sequence[int], once: bool
    ) -> tuple[int, bytes | None]:
        """Registers a call: NEW, REPEATED (with its reply if there is one), REFUSED.

        Args:
          seq: the call's number.
          open_calls: the client's calls before it that have no reply yet. It has
            the replies of all others, and will not send those again.
          once: whether `save` must remember it.
        """
        with self._lock:
            replies = self._replies
            next_one = seq == self._highest + 1 and not (open_calls or self._missing)
            if next_one and all(replies.values()):
                # The commonest case: the client has all its answers, and asks again.
                replies.clear()
                self._once.clear()
                self._highest = seq
                replies[seq] = None
                if once:
                    self._once.add(seq)
                return NEW, None
            if seq in self._replies:
                return REPEATED, self._replies[seq]
            if seq <= self._highest and seq not in self._missing:
                return REPEATED, None
            for old in list(self._replies):
                if old < seq and old not in open_calls and self._replies[old]:
                    self._drop(old)
            if max(len(self._replies), len(open_calls)) >= self.max_inflight:
                return REFUSED, None
            if seq > self._highest:
                if self._missing or open_calls:
                    late = range(self._highest + 1, seq)
                    self._missing = {x for x in self._missing if x in open_calls}
                    self._missing.update(x for x in open_calls if x in late)
                self._highest = seq
            else:
                self._missing.discard(seq)
            self._replies[seq] = None
            if once:
                self._once.add(seq)
            return NEW, None

    def finish(self, seq: int, frame: bytes) -> None:
        """Keeps a call's reply until the client has it. Any thread."""
        with self._lock:
            self._replies[seq] = frame

    def forget(self, seq: int) -> None:
        """Undoes `begin`, so that the call is new when it is sent again. Any thread."""
        with self._lock:
            self._drop(seq)
            self._missing.add(seq)

    def save(self) -> dict[str, Any]:
        """Which calls came and the replies of `once` methods. Any thread.

        All others are new when they are sent again after a restart.
        """
        with self._lock:
            kept = {
                seq: reply
                for seq, reply in self._replies.items()
                if reply is not None and seq in self._once
            }
            return {
                "name": self.name,
                "highest": self._highest,
                "missing": sorted(self._missing | (self._replies.keys() - kept)),
                "replies": {str(seq): reply for seq, reply in kept.items()},
            }

    def restore(self, data: dict[str, Any]) -> None:
        """Takes over what `save` returned."""
        with self._lock:
            self._highest = int(data["highest"])
            self._missing = {int(seq) for seq in data["missing"]}
            self._replies = {int(k): bytes(v) for k, v in data["replies"].items()}
            self._once = set(self._replies)

    def _drop(self, seq: int) -> None:
        self._replies.pop(seq, None)
        self._once.discard(seq)


class Sessions:
    """All sessions of a server.

    Callbacks are called in the loop thread; what they raise is logged and ends nothing.
    `admit` is asked about everyone who says HELLO: True lets the client in, False lets
    it ask again later, and a WireError refuses it.

    Args:
      timeout: seconds without a sign of life after which a client counts as gone.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._sessions: dict[bytes, Session] = {}
        self._slots: dict[Any, int] = {}
        self._present = 0
        self.admit: Callable[[Session], bool] = lambda session: True
        self.on_join: list[Callable[[Session], None]] = []
        self.on_leave: list[Callable[[Session], None]] = []

    def __iter__(self) -> Any:
        return iter([x for x in list(self._sessions.values()) if not x.away])

    def __len__(self) -> int:
        return self._present

    def slots(self, group: Any) -> int:
        """Env slots that connected clients of a group have registered."""
        return self._slots.get(group, 0)

    def hello(self, client: bytes, hello: dict[str, Any]) -> Session | None:
        """Registers a client that connects, or connects again; None for not yet."""
        session = self._sessions.get(client)
        if session is None:
            session = Session(client, hello)
        else:
            self.lost(session)
            session.update(hello)
        if not self.admit(session):
            return None
        self._sessions[client] = session
        self._arrive(session)
        return session

    def find(self, client: bytes) -> Session | None:
        """Returns the session of a client, without taking it for a sign of life."""
        return self._sessions.get(client)

    def get(self, client: bytes) -> Session | None:
        """Returns the session of a message's sender and notes that it lives.

        Who was away has to say HELLO again: what it shares with us, and whether it may
        come back, is not known before.
        """
        session = self._sessions.get(client)
        if session is None or session.away:
            return None
        session.heard = time.monotonic()
        return session

    def bye(self, session: Session) -> None:
        """Forgets a client that says it leaves."""
        if self._sessions.get(session.client) is session:
            del self._sessions[session.client]
            if not session.away:
                self._depart(session)

    def lost(self, session: Session) -> None:
        """Marks a client as gone but keeps its replies for its return."""
        if not session.away:
            session.away = True
            self._depart(session)

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

    def save(self) -> dict[str, Any]:
        """The answered calls of all clients, as a tree for a checkpoint."""
        return {x.client.hex(): x.save() for x in list(self._sessions.values())}

    def load(self, data: dict[str, Any]) -> None:
        """Takes over what `save` returned, before the server starts."""
        for client, saved in data.items():
            hello = {
                "name": saved["name"],
                "slots": 0,
                "group": None,
                "info": None,
                "max_inflight": MAX_INFLIGHT,
                "version": PROTOCOL,
            }
            session = Session(bytes.fromhex(client), hello)
            session.restore(saved)
            self._sessions[session.client] = session

    def _arrive(self, session: Session) -> None:
        session.away = False
        session.heard = time.monotonic()
        self._present += 1
        if session.slots:
            self._slots[session.group] = self.slots(session.group) + session.slots
        _tell(self.on_join, session)

    def _depart(self, session: Session) -> None:
        self._present -= 1
        if session.slots:
            self._slots[session.group] = self.slots(session.group) - session.slots
        _tell(self.on_leave, session)


def _tell(callbacks: list[Callable[[Session], None]], session: Session) -> None:
    for callback in callbacks:
        try:
            callback(session)
        except Exception:
            log.exception("A callback failed for client %s.", session.name)
