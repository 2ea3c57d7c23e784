"""A client: calls a server's methods, now or ahead of time. Any process.

Whoever calls sends at once, and whoever waits for a result receives it in that same
thread, so that a round trip costs no change of threads on this side. The rest is the
background thread's, see `embodied/rpc/connection.py`.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from embodied.rpc import auth, buffers, links, structures, wire
from embodied.rpc.calls import PENDING, Call, Disconnected, Future, RemoteError
from embodied.rpc.connection import Connection
from embodied.rpc.sessions import CLIENT_BYTES, MAX_INFLIGHT, make_hello

__all__ = ["Client", "Disconnected", "RemoteError"]


class Client(Connection):
    """Calls a server's methods.

        client = Client('localhost:1234')
        future = client.add(1, 2)
        print(future.result())
        client.close()

    `close`, or the end of a `with` block, is the only way to end it: until then its
    background thread keeps it alive.

    Args:
      addr: HOST:PORT or a port of this machine.
      name: shown by the server.
      maxinflight: open calls; one more waits until a reply has come.
      autoconn: reconnect and send open calls again. Those that were sent to a server
        that was restarted meanwhile fail, since it is not known whether they were
        applied. Without it, all fail.
      keys: default: the keys of this user on this machine.
      insecure: no keys, for a server without keys.
      slots: env slots whose rows the server's batches can wait for.
      group: which batches those rows belong to.
      info: plain values for the server's owner.
      link: 'local' for a socket and shared memory of this host, 'remote' for ZeroMQ,
        'auto' for the first of them that works.
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
        link: str = "auto",
    ):
        if not 1 <= maxinflight <= MAX_INFLIGHT:
            raise ValueError(f"maxinflight must be 1..{MAX_INFLIGHT}: {maxinflight}")
        keys = None if insecure else keys or auth.Keys.default()
        identity = secrets.token_bytes(CLIENT_BYTES)
        hello = make_hello(identity, name, maxinflight, slots, group, info)
        super().__init__(addr, hello, keys, link)
        self.maxinflight = maxinflight
        self._autoconn = autoconn
        self._reply_bytes: dict[str, int] = {}  # Room for large replies, by method.
        # The lock of the connection guards the calls and their numbers.
        self._calls: dict[int, Call] = {}
        self._waiting = 0  # Threads that wait for one of them to end.
        self._next = 0
        self._counts = self._statistics.counts
        self._latencies = self._statistics.latencies
        self.attend = self._turn.attend  # Of `Receiver`.
        self._thread.start()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        # Kept as an attribute, so that the next call finds it without coming here.
        caller = self.__dict__[method] = functools.partial(self.call, method)
        return caller

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
        spec, arrays, values = self._codec.call(method, args)
        nbytes = spec.nbytes
        if nbytes > self._max_bytes:
            raise self._too_large(method, nbytes)
        call = Call(method, self.addr, self)
        request, arena = None, self._memory
        if arena is not None:
            if nbytes >= buffers.THRESHOLD:
                request = call.request = arena.allocate(spec.room)
                if request is not None:
                    request.fill(spec, arrays, rows)
            if method in self._reply_bytes:
                call.reply = arena.allocate(self._reply_bytes[method])
        with self._lock:
            if self._calls or self._failure:
                self._wait_for_room(call)
            seq = self._next
            self._next = seq + 1
            if request is None or values or call.reply or self._calls:
                call.frame = self._encode(call, seq, spec, values, arrays, rows)
                if self._calls:
                    self.attend()
            else:
                call.frame = request.frame(seq)  # The commonest case, and the fastest.
            self._calls[seq] = call
            if self._welcome:
                self._transmit(call)
            self._counts.sent_bytes += nbytes
        return call

    def stats(self) -> dict[str, float]:
        """Counts since the last call, open calls, and latencies in seconds."""
        self._counts.calls = self._next
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
        """Leaves the server, and fails open calls with Disconnected."""
        if self._closing.is_set():
            return
        self._fail(Disconnected(f"{self.name}: the client is closed."))
        self._closing.set()
        self._turn.control.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # The calling threads.

    def _wait_for_room(self, call: Call) -> None:
        """Waits until fewer than `maxinflight` calls are open. Holds the lock."""
        self._waiting += 1
        try:
            while len(self._calls) >= self.maxinflight and not self._failure:
                self.attend()
                self._changed.wait()
        finally:
            self._waiting -= 1
        if self._failure:
            call.release()
            raise self._failure

    def _too_large(self, method: str, nbytes: int) -> wire.WireError:
        return wire.WireError(
            f"Arguments of '{method}' have {nbytes} bytes; the server takes "
            f"{self._max_bytes}."
        )

    def _encode(
        self,
        call: Call,
        seq: int,
        spec: structures.Spec,
        values: Sequence[Any],
        arrays: list,
        rows: int,
    ) -> bytes:
        """Returns the frame of a call, one that can be sent. Holds the lock."""
        places = None
        if call.request or call.reply:
            places = (
                call.request.place if call.request else wire.NOWHERE,
                call.reply.place if call.reply else wire.NOWHERE,
            )
        in_memory = call.request is not None
        frame = self._codec.encode(
            wire.CALL, seq, spec, values, arrays, rows, places, self._calls, in_memory
        )
        if len(frame) > self._max_bytes + links.MESSAGE_SLACK:
            call.release()
            raise self._too_large(call.method, len(frame))
        return frame

    def _transmit(self, call: Call) -> None:
        """Sends a call, and its memory before that. Holds the lock."""
        link = self._link
        if link is None:
            return  # It has just ended; the next one gets all open calls.
        call.sent = True
        if call.request is not None and call.request.shared is not link:
            self._share(call, call.request, link)
        if call.reply is not None and call.reply.shared is not link:
            self._share(call, call.reply, link)
        link.send(call.frame)

    def _share(self, call: Call, block: buffers.Block, link: links.Link) -> None:
        """Passes a block, or puts all into the frame if the link cannot do that."""
        if isinstance(link, links.LocalLink):
            link.share(block)
            return
        old = self._codec.decode(call.frame)
        arrays: list = []
        if call.request is not None:
            arrays = structures.payload_arrays(old.spec, call.request.pages)
        elif old.spec.nbytes:
            arrays = structures.payload_arrays(old.spec, old.frame, old.start)
        call.frame = self._codec.encode(
            wire.CALL, old.seq, old.spec, old.values, arrays, old.rows, open=old.open
        )

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Receives until a future is done, or waits for the thread that does."""
        if self._turn.serve(future, timeout, self._receive):
            if self._calls:
                self.attend()  # Whoever waits for those was told to sleep.
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while future.state == PENDING:
            if deadline is not None and time.monotonic() >= deadline:
                return
            future.block(deadline)

    # Any thread that receives.

    def _answer(self, seq: int, kind: int, flags: int, reply: wire.Payload) -> None:
        with self._lock:
            call = self._calls.pop(seq, None)
            if call is None:
                return  # The answer to a call that was sent twice.
            if self._waiting:
                self._changed.notify()
        spec, values, frame, start = reply
        nbytes = spec.nbytes
        self._counts.replies += 1
        self._counts.received_bytes += nbytes
        self._latencies.append(time.perf_counter() - call.started)
        if nbytes >= buffers.THRESHOLD:
            self._reply_bytes[call.method] = spec.room
        try:
            if flags & wire.BULK:
                tree = spec.build(self._leased(call, spec), 0, values)
            else:
                tree = spec.build(frame, start, values)
        except wire.WireError as error:
            call.set_error(error)
            return
        finally:
            if call.request or call.reply:
                call.release()
        if kind == wire.REPLY:
            call.set_result(tree)
        else:
            self._counts.errors += 1
            call.set_error(RemoteError(**tree))

    def _leased(self, call: Call, spec: structures.Spec) -> Any:
        """The memory which was offered for a reply, and which it lies in."""
        if call.reply is None or call.reply.size < spec.nbytes:
            raise wire.WireError("a reply in memory that was not offered")
        block, call.reply = call.reply, None
        return block.leased()

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
            call.set_error(error)
        self._turn.interrupt()

    def _send_open_calls(self, restarted: bool) -> list[Future]:
        failed: list[Future] = []
        for seq, call in list(self._calls.items()):
            if restarted and call.sent:
                # Its memory is not reused: the other server may still write there.
                failed.append(self._calls.pop(seq))
            else:
                self._transmit(call)
        return failed

    def _restarted(self) -> Disconnected:
        return Disconnected(
            f"{self.name}: the server at {self.addr} was restarted. Whether the call "
            "was applied before is not known."
        )

    def _lost(self) -> None:
        if not self._autoconn:
            self._fail(Disconnected(f"{self.name}: {self.addr} is gone."))
