"""A client's connection: how it is made, kept alive and made again. Any process.

ZeroMQ connects, with keys. The client then says HELLO; the server's WELCOME tells it
whether they share memory, and how to open the lane beside ZeroMQ. A background thread
receives while nobody waits, sends signs of life, and says HELLO again after a
reconnect.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from embodied.rpc import auth, memory, sockets, wire
from embodied.rpc.calls import RemoteError
from embodied.rpc.lane import Lane
from embodied.rpc.listener import Listener
from embodied.rpc.server import contents
from embodied.rpc.statistics import Statistics

log = logging.getLogger("embodied.rpc")

# Handshakes that fail without a reason: the keys do not match, or the connection is
# cut again and again. So many in a row, over so many seconds, count as the former; from
# a server whose keys did match before, they have to go on for longer.
FAILED_HANDSHAKES = 8
FAILED_SECONDS, FAILED_SECONDS_IF_KNOWN = 4.0, 60.0


class Connection:
    """One client's end of a connection; what is done with answers is the client's.

    Args:
      addr: HOST:PORT or a port of this machine.
      name: of the thread, and for messages.
      hello: what the server is told about the client.
      keys: of the server and of this client; None for a server without keys.
      bulk: use shared memory where the server is on the same machine.
    """

    def __init__(
        self,
        addr: str | int,
        name: str,
        hello: dict[str, Any],
        keys: auth.Keys | None,
        bulk: bool,
    ):
        self.name = name
        self.addr = sockets.connect_address(addr)
        self._hello = {**hello, "host": memory.host_facts() if bulk else {}}
        self._codec = wire.Codec()
        self._arena = memory.Arena() if bulk and memory.AVAILABLE else None
        self._memory: memory.Arena | None = None  # If the server can map it.
        self._max_bytes = self._codec.max_bytes
        self._statistics = Statistics(name)
        # Guards the state of the connection, and what the client adds. Sending is
        # done under it too, so that calls leave in the order of their numbers.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._welcome = False  # Whether the server knows us.
        self._linked = False  # Whether it did since the connection was made.
        self._failure: Exception | None = None
        self._known = False  # Whether the keys have ever matched.
        self._handshakes_failed = 0  # In a row.
        self._failing_since = 0.0
        self._heartbeat = 2.0
        self._identity = secrets.token_bytes(16)
        self._lane: Lane | None = None  # The short cut, while it is open.
        self._context = zmq.Context()
        socket = sockets.client_socket(self._context, self.addr, self._identity, keys)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )
        swallowed = sockets.Wakeup()
        self._socket = sockets.LockedSocket(socket, swallowed)
        self._socket_descriptors = (self._socket.fileno, swallowed.fileno())
        self._listener = Listener(
            self._socket.fileno, swallowed, sockets.descriptor(self._monitor)
        )
        socket.connect(f"tcp://{self.addr}")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _answer(self, seq: int, kind: int, flags: int, reply: wire.Payload) -> None:
        """Takes in the answer to a call: its number, kind, flags and contents."""
        raise NotImplementedError

    def _send_open_calls(self) -> None:
        """Sends the calls that have no answer. Holds the lock."""
        raise NotImplementedError

    def _lost(self) -> None:
        """Called when a connection that was there is gone."""
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        """Ends all open calls, and every later one, with an error."""
        raise NotImplementedError

    # Any thread that receives.

    def _receive(self, ready: list[tuple[int, int]]) -> None:
        """Handles what arrived at the descriptors that are ready."""
        lane = self._lane
        for descriptor, _ in ready:
            if lane is not None and descriptor == lane.fileno:
                frame = lane.receive()
                if frame:
                    known = self._codec.decode_known(frame)
                    if known is not None:
                        self._answer(*known)
                    else:
                        self._decode(frame)
                elif frame is not None:
                    self._lane_ended(lane)
            elif descriptor in self._socket_descriptors:
                for parts in self._socket.receive():
                    if len(parts) == 1:  # No server of ours sends anything else.
                        self._decode(contents(parts[0]))
            else:
                self._listener.interrupted(descriptor)

    def _decode(self, frame: Any) -> None:
        try:
            message = self._codec.decode(frame)
            if message.seq == wire.NO_CALL:
                self._control(message)
                return
            reply = message.spec, message.values, frame, message.start
            self._answer(message.seq, message.kind, message.flags, reply)
        except wire.WireError as error:
            log.error("%s: undecodable answer: %s", self.name, error)

    def _control(self, message: wire.Message) -> None:
        if message.kind == wire.WELCOME:
            self._welcomed(wire.message_tree(message))
        elif message.kind == wire.STRANGER:
            self._say_hello()  # The server forgot us, or restarted unnoticed.
        elif message.kind == wire.ERROR:
            error = wire.message_tree(message)
            self._fail(RemoteError(error["kind"], f"{self.name}: {error['message']}"))

    def _welcomed(self, welcome: dict) -> None:
        with self._changed:
            self._memory = self._arena if welcome["bulk"] else None
            self._max_bytes = welcome["max_bytes"]
            self._heartbeat = welcome["heartbeat"]
            self._welcome = self._linked = True
            self._open_lane(welcome["lane"])
            self._send_open_calls()
            self._changed.notify_all()

    def _open_lane(self, offer: list | None) -> None:
        self._close_lane()
        if offer and self._arena:
            self._lane = Lane.connect(offer[0], self._identity, offer[1])
            if self._lane:
                self._listener.add(self._lane.fileno)

    def _close_lane(self) -> None:
        with self._lock:
            lane, self._lane = self._lane, None
        if lane:
            self._listener.remove(lane.fileno)
            while frame := lane.receive():  # Answers that came before its end.
                self._decode(frame)
            lane.close()

    def _lane_ended(self, lane: Lane) -> None:
        with self._lock:
            if lane is self._lane:
                self._close_lane()
                if self._welcome:
                    self._say_hello()  # If the server lives, it offers another.

    def _say_hello(self) -> None:
        with self._lock:
            self._close_lane()
            self._welcome = False
            self._send_control(wire.HELLO, self._hello)
            self._listener.attend()

    def _send_control(self, kind: int, data: Any = None) -> None:
        structure, arrays, values = wire.flatten(data)
        spec = self._codec.spec("", structure)
        frame = self._codec.encode(kind, wire.NO_CALL, spec, values, arrays)
        self._socket.send(frame)

    # The background thread.

    def _run(self) -> None:
        next_beat = time.monotonic() + self._heartbeat
        # A ZeroMQ descriptor signals nothing before the first look at its socket.
        self._connection_events()
        while not self._closing.is_set():
            wait = max(0, next_beat - time.monotonic())
            self._receive(self._listener.background(wait))
            self._connection_events()
            if self._listener.taken:
                # It took the turn meanwhile, and may wait for what came here.
                self._listener.interrupt()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._heartbeat
                if self._welcome:
                    self._send_control(wire.HEARTBEAT)
        if self._welcome:
            self._send_control(wire.BYE)
        self._close_lane()
        self._monitor.close()
        self._socket.close()
        self._context.destroy(linger=200)  # For the BYE.
        self._listener.close()

    def _connection_events(self) -> None:
        while True:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = parse_monitor_message(parts)
            event, value = message["event"], int(message["value"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._known, self._handshakes_failed = True, 0
                self._say_hello()
            elif event == zmq.EVENT_DISCONNECTED:
                self._disconnected()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused("it does not allow this client's key")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refused("one of the two uses keys and the other does not")
            elif value != errno.EAGAIN:  # That is a server too busy to answer.
                self._handshake_failed()

    def _handshake_failed(self) -> None:
        now = time.monotonic()
        if not self._handshakes_failed:
            self._failing_since = now
        self._handshakes_failed += 1
        seconds = FAILED_SECONDS_IF_KNOWN if self._known else FAILED_SECONDS
        enough = now - self._failing_since >= seconds
        if enough and self._handshakes_failed >= FAILED_HANDSHAKES:
            self._refused("its key is not the one expected")

    def _disconnected(self) -> None:
        with self._changed:
            self._close_lane()
            self._welcome = False
            was_linked, self._linked = self._linked, False
            if not was_linked:
                return
            self._statistics.counts.reconnects += 1
        self._lost()

    def _refused(self, reason: str) -> None:
        self._fail(
            auth.AuthError(
                f"{self.name}: no connection to {self.addr}: {reason}. Use the key "
                "file of the run (--run.keyfile FILE) on both sides."
            )
        )
