"""The short cuts of a server's clients. Owned by the server's loop thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from embodied.rpc.lane import ATTACH_SECONDS, Lane, LaneServer, identify, matches
from embodied.rpc.session import Session, Sessions
from embodied.rpc.sockets import Poller

MAX_UNKNOWN = 256  # Connections that have not said yet whose they are.


class Lanes:
    """All short cuts of one server.

    Args:
      poller: what the server's loop waits with.
      sessions: the server's clients.
      handle_frame: called with the client and every frame that it sent.
    """

    def __init__(
        self,
        poller: Poller,
        sessions: Sessions,
        handle_frame: Callable[[Session, bytes], None],
    ):
        self._poller = poller
        self._sessions = sessions
        self._handle_frame = handle_frame
        self._listener = LaneServer()
        self._lanes: dict[int, Lane] = {}
        poller.add(self._listener.fileno)
        sessions.on_leave.append(self._close_of)

    def offer(self, session: Session) -> list | None:
        """What a client needs to open its short cut; None if it cannot have one."""
        if session.memory.pid is None:
            return None
        return [self._listener.name, session.token]

    def handle(self, ready: list[tuple[int, int]]) -> list[int]:
        """Handles a frame of every connection that is ready; returns what is none."""
        others = []
        for descriptor, _ in ready:
            lane = self._lanes.get(descriptor)
            if lane is not None:
                self._next(lane)
            elif descriptor == self._listener.fileno:
                self._accept()
            else:
                others.append(descriptor)
        return others

    def drain(self, client: bytes) -> None:
        """Handles all frames that a client has sent so far."""
        session = self._sessions.find(client)
        if session is not None and session.lane is None:
            # It may have opened one, and used it, before the loop has seen it.
            self._accept()
            for lane in [x for x in self._lanes.values() if x.owner is None]:
                self._next(lane)
        while session is not None and session.lane is not None:
            if not self._next(session.lane):
                return

    def expire(self) -> None:
        """Closes connections that have not said in time whose they are."""
        now = time.monotonic()
        for lane in list(self._lanes.values()):
            if lane.owner is None and now - lane.opened > ATTACH_SECONDS:
                self._close(lane)

    def close(self) -> None:
        """Closes everything."""
        self._poller.remove(self._listener.fileno)
        self._listener.close()
        for lane in list(self._lanes.values()):
            self._close(lane)

    def _accept(self) -> None:
        unknown = sum(lane.owner is None for lane in self._lanes.values())
        while (lane := self._listener.accept()) is not None:
            if unknown >= MAX_UNKNOWN:
                lane.close()
                continue
            unknown += 1
            self._lanes[lane.fileno] = lane
            self._poller.add(lane.fileno)

    def _next(self, lane: Lane) -> bool:
        """Handles the next frame of a connection; False if there was none."""
        frame = lane.receive()
        if frame is None:
            return False
        if not frame:
            self._ended(lane)
            return False
        if lane.owner is None:
            self._attach(lane, frame)
        else:
            self._handle_frame(lane.owner, frame)
        return True

    def _attach(self, lane: Lane, packet: bytes) -> None:
        token, client = identify(packet)
        session = self._sessions.find(client)
        if session is None or not matches(token, session.token):
            self._close(lane)
            return
        if session.lane is not None:
            self._close(session.lane)
        lane.owner = session
        session.lane = lane

    def _ended(self, lane: Lane) -> None:
        session = lane.owner
        self._close(lane)
        if session is not None:
            # Its process has ended, or it will introduce itself again.
            session.memory.clear()
            self._sessions.lost(session)

    def _close(self, lane: Lane) -> None:
        if self._lanes.pop(lane.fileno, None) is None:
            return
        self._poller.remove(lane.fileno)
        if lane.owner is not None:
            lane.owner.lane = None
        lane.close()

    def _close_of(self, session: Session) -> None:
        if session.lane is not None:
            self._close(session.lane)
