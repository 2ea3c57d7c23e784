"""A client: calls a server's methods, now or ahead of time. Any process.

Whoever calls sends at once, and whoever waits for a result receives it in that same
thread, so that a round trip costs no change of threads on this side. A background
thread does the rest: it receives while nobody waits, sends signs of life, and says
HELLO and sends open calls again after a reconnect.
"""

from __future__ import annotations

import errno
import functools
import logging
import secrets
import threading
import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from embodied.rpc import auth, memory, sockets, wire
from embodied.rpc.future import Future
from embodied.rpc.lane import Lane
from embodied.rpc.listener import Listener
from embodied.rpc.server import contents
from embodied.rpc.session import MAX_INFLIGHT, PROTOCOL
from embodied.rpc.statistics import Statistics

log = logging.getLogger("embodied.rpc")

FAILED_HANDSHAKES = 5  # In a row, without a reason given: the keys do not match.


class Disconnected(ConnectionError):
    """The server is gone, or the client is closed."""


class RemoteError(RuntimeError):
    """The server answered with an error.

    Attributes:
      kind: 'exception' if the method raised, 'bad' if the request was refused.
      type: name of the exception's type on the server.
      traceback: its text there.
    """

    def __init__(self, kind: str, message: str, type: str = "", traceback: str = ""):
        super().__init__(message)
        self.kind = kind
        self.type = type
        self.traceback = traceback

    def __str__(self) -> str:
        message = super().__str__()
        if self.traceback:
            return f"{message}\n\nOn the server:\n{self.traceback}"
        return message


class Call:
    """A call that has no reply yet."""

    __slots__ = ("frame", "future", "method", "reply", "request", "started")

    def __init__(self, method: str, future: Future):
        self.method = method
        self.future = future
        self.frame: bytes = b""
        self.request: memory.Block | None = None
        self.reply: memory.Block | None = None
        self.started = time.perf_counter()


class Client:
    """Calls a server's methods.

        client = Client('localhost:1234')
        future = client.add(1, 2)
        print(future.result())

    Args:
      addr: HOST:PORT or a port of this machine.
      name: shown by the server.
      maxinflight: open calls; one more waits until a reply has come.
      autoconn: reconnect and send open calls again. Otherwise they fail.
      keys: default: the keys of this user on this machine.
      insecure: no keys, for a server without keys.
      slots: env slots whose rows the server's batches can wait for.
      group: which batches those rows belong to.
      info: plain values for the server's owner.
      bulk: use shared memory where the server is on the same machine.
    """

    def __init__(
        self,
        addr: str | int,
        name: str = "Client",
        maxinflight: int = 16,
        autoconn: bool = True,
        *,
        keys: auth.Keys | None = None,
        insecure: bool = False,
        slots: int = 0,
        group: Any = None,
        info: Any = None,
        bulk: bool = True,
    ):
        if not 1 <= maxinflight <= MAX_INFLIGHT:
            raise ValueError(f"maxinflight must be 1..{MAX_INFLIGHT}: {maxinflight}")
        self.name = name
        self.addr = sockets.connect_address(addr)
        self.maxinflight = maxinflight
        self._autoconn = autoconn
        self._hello = {
            "version": PROTOCOL,
            "name": name,
            "slots": slots,
            "group": group,
            "info": info,
            "max_inflight": maxinflight,
            "host": memory.host_facts() if bulk else {},
        }
        self._codec = wire.Codec()
        self._arena = memory.Arena() if bulk and memory.AVAILABLE else None
        self._use_memory = False  # The server's answer to HELLO decides.
        self._reply_bytes: dict[str, int] = {}  # Size of large replies, by method.
        self._max_bytes = self._codec.max_bytes
        self._statistics = Statistics(name)
        # Guards the calls, their numbers and the state of the connection. Sending is
        # done under it too, so that calls leave in the order of their numbers.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls: dict[int, Call] = {}
        self._next = 0
        self._welcome = False  # Whether the server knows us.
        self._linked = False  # Whether it did since the connection was made.
        self._failure: Exception | None = None
        self._handshakes_failed = 0
        self._heartbeat = 2.0

        keys = None if insecure else keys or auth.Keys.default()
        self._identity = secrets.token_bytes(16)
        self._lane: Lane | None = None  # The short cut, while it is open.
        self._detours: set[int] = set()  # Calls that went over ZeroMQ beside it.
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
        self._swallowed = swallowed.fileno()
        self._listener = Listener(
            self._socket.fileno, swallowed, sockets.descriptor(self._monitor)
        )
        socket.connect(f"tcp://{self.addr}")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self.call, method)

    @property
    def connected(self) -> bool:
        """Whether the server has welcomed this client."""
        return self._welcome

    def connect(self, timeout: float | None = None) -> None:
        """Waits until the server is there.

        Raises:
          TimeoutError: it is not, in time.
          AuthError: it refused this client's key.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._welcome or self._failure, timeout)
            if self._failure:
                raise self._failure
            if not self._welcome:
                raise TimeoutError(
                    f"{self.name}: no server answers at {self.addr} after {timeout} s."
                )

    def call(self, method: str, *args: Any, rows: int = 0) -> Future:
        """Calls a method; `rows` says that each array is a stack of so many rows.

        Waits while `maxinflight` calls are open.

        Raises:
          WireError: the arguments cannot be sent.
          Disconnected, AuthError: the client is closed or refused.
        """
        structure, arrays, values = wire.flatten(args)
        spec = self._codec.spec(method, structure)
        if spec.nbytes > self._max_bytes:
            raise wire.WireError(
                f"Arguments of '{method}' have {spec.nbytes} bytes; the server takes "
                f"{self._max_bytes}."
            )
        future = Future(f"'{method}' from {self.addr}", self._wait)
        call = Call(method, future)
        bulk = self._place(call, spec, arrays)
        with self._changed:
            while len(self._calls) >= self.maxinflight and not self._failure:
                self._changed.wait()
            if self._failure:
                self._release(call)
                raise self._failure
            seq = self._next
            self._next += 1
            call.frame = self._codec.encode(
                wire.CALL,
                seq,
                spec,
                values,
                arrays,
                rows,
                bulk,
                list(self._calls),
                in_memory=call.request is not None,
            )
            if len(call.frame) > self._max_bytes + sockets.MESSAGE_SLACK:
                self._release(call)
                raise wire.WireError(
                    f"Arguments of '{method}' have {len(call.frame)} bytes; the server "
                    f"takes {self._max_bytes}."
                )
            self._calls[seq] = call
            if self._welcome:
                self._transmit(seq, call)
            self._statistics.counts["calls"] += 1
            self._statistics.counts["sent_bytes"] += spec.nbytes
        return future

    def stats(self) -> dict[str, float]:
        """Counts since the last call, open calls, and latencies in seconds."""
        return {
            **self._statistics.collect(
                "calls",
                "replies",
                "errors",
                "reconnects",
                "sent_bytes",
                "received_bytes",
            ),
            "inflight": len(self._calls),
        }

    def close(self) -> None:
        """Says BYE and fails open calls with Disconnected."""
        if self._closing.is_set():
            return
        self._fail(Disconnected(f"{self.name}: the client is closed."))
        self._closing.set()
        self._listener.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.close()

    # The calling threads.

    def _place(self, call: Call, spec: wire.Spec, arrays: list) -> list | None:
        """Puts large arguments into shared memory, and offers some for the reply."""
        if not self._use_memory or self._arena is None:
            return None
        if spec.nbytes >= memory.THRESHOLD:
            call.request = self._arena.allocate(spec.nbytes)
            if call.request:
                memory.write(call.request.view, spec, arrays)
        expected = self._reply_bytes.get(call.method, 0)
        if expected:
            call.reply = self._arena.allocate(expected)
        if not call.request and not call.reply:
            return None
        return [
            call.request.where() if call.request else None,
            call.reply.where() if call.reply else None,
        ]

    def _transmit(self, seq: int, call: Call) -> None:
        """Sends a call, by the short cut if it overtakes no other call there."""
        if self._lane and not self._detours and self._lane.send(call.frame):
            return
        if self._lane:
            self._detours.add(seq)
        self._socket.send(call.frame)

    def _wait(self, future: Future, timeout: float | None) -> None:
        """Receives until a future is done, or waits for the thread that does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._listener.take():
            try:
                while not future.done():
                    ready = self._listener.wait(deadline)
                    if ready is None:
                        return
                    self._receive(ready)
            finally:
                self._listener.release()
            return
        while not future.done():
            if deadline is not None and time.monotonic() >= deadline:
                return
            future.block(deadline)

    # Any thread that receives.

    def _receive(self, ready: list[int]) -> None:
        """Handles what arrived at the descriptors that are ready."""
        lane = self._lane
        if lane is not None and lane.fileno in ready:
            frame = lane.receive()
            if frame:
                self._decode(frame)
            elif frame is not None:
                self._lane_ended(lane)
        if self._socket.fileno in ready or self._swallowed in ready:
            for parts in self._socket.receive():
                if len(parts) == 1:  # No server of ours sends anything else.
                    self._decode(contents(parts[0]))

    def _decode(self, frame: Any) -> None:
        try:
            self._handle(self._codec.decode(frame))
        except wire.WireError as error:
            log.error("%s: undecodable answer: %s", self.name, error)

    def _handle(self, message: wire.Message) -> None:
        if message.seq != wire.NO_CALL:
            self._answer(message)
        elif message.kind == wire.WELCOME:
            self._welcomed(wire.message_tree(message))
        elif message.kind == wire.STRANGER:
            self._say_hello()  # The server forgot us, or restarted unnoticed.
        elif message.kind == wire.ERROR:
            error = wire.message_tree(message)
            self._fail(RemoteError(error["kind"], f"{self.name}: {error['message']}"))

    def _answer(self, message: wire.Message) -> None:
        with self._changed:
            self._detours.discard(message.seq)
            call = self._calls.pop(message.seq, None)
            if call is None:
                return  # The answer to a call that was sent twice.
            self._statistics.counts["replies"] += 1
            self._changed.notify()
        self._statistics.latencies.append(time.perf_counter() - call.started)
        self._statistics.counts["received_bytes"] += message.spec.nbytes
        if message.spec.nbytes >= memory.THRESHOLD:
            self._reply_bytes[call.method] = message.spec.nbytes
        try:
            if message.flags & wire.BULK:
                if call.reply is None or call.reply.size < message.spec.nbytes:
                    raise wire.WireError("a reply in memory that was not offered")
                assert self._arena is not None
                block, call.reply = call.reply, None
                arrays = self._arena.lease(block, message.spec)
                structure = message.spec.structure
                tree = wire.unflatten(structure, arrays, message.values)
            else:
                tree = wire.message_tree(message)
        except wire.WireError as error:
            call.future.set_error(error)
            return
        finally:
            self._release(call)
        if message.kind == wire.REPLY:
            call.future.set_result(tree)
        else:
            self._statistics.counts["errors"] += 1
            call.future.set_error(RemoteError(**tree))

    def _release(self, call: Call) -> None:
        for block in (call.request, call.reply):
            if block is not None:
                assert self._arena is not None
                self._arena.free(block)
        call.request = call.reply = None

    def _welcomed(self, welcome: dict) -> None:
        with self._changed:
            self._use_memory = bool(welcome["bulk"]) and self._arena is not None
            self._max_bytes = welcome["max_bytes"]
            self._heartbeat = welcome["heartbeat"]
            self._handshakes_failed = 0
            self._welcome = self._linked = True
            self._open_lane(welcome["lane"])
            for seq, call in self._calls.items():
                self._transmit(seq, call)
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
            self._detours.clear()
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

    def _send_control(self, kind: int, data: Any = None) -> None:
        structure, arrays, values = wire.flatten(data)
        spec = self._codec.spec("", structure)
        frame = self._codec.encode(kind, wire.NO_CALL, spec, values, arrays)
        self._socket.send(frame)

    def _fail(self, error: Exception) -> None:
        """Ends all open calls, and every later one, with an error."""
        with self._changed:
            self._failure = self._failure or error
            self._abandon(error)

    def _abandon(self, error: Exception) -> None:
        with self._changed:
            calls = list(self._calls.values())
            self._calls.clear()
            self._changed.notify_all()
        for call in calls:
            # Its memory is not reused: the server may still write there.
            call.future.set_error(error)
        self._listener.interrupt()

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
                self._say_hello()
            elif event == zmq.EVENT_DISCONNECTED:
                self._disconnected()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused("it does not allow this client's key")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refused("one of the two uses keys and the other does not")
            elif value != errno.EAGAIN:  # That is a server too busy to answer.
                self._handshakes_failed += 1
                if self._handshakes_failed >= FAILED_HANDSHAKES:
                    self._refused("its key is not the one expected")

    def _disconnected(self) -> None:
        with self._changed:
            self._close_lane()
            self._welcome = False
            was_linked, self._linked = self._linked, False
            if not was_linked:
                return
            self._statistics.counts["reconnects"] += 1
        if not self._autoconn:
            self._fail(Disconnected(f"{self.name}: {self.addr} is gone."))

    def _refused(self, reason: str) -> None:
        self._fail(
            auth.AuthError(
                f"{self.name}: no connection to {self.addr}: {reason}. Use the key "
                "file of the run (--run.keyfile FILE) on both sides."
            )
        )
