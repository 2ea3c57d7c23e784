"""A client, which calls a server's methods and returns futures. Any process.

The calling thread sends its call, and a thread that waits for a result receives it
itself, so that a round trip costs no change of threads on this side. A background
thread does the rest; see `embodied/rpc/connection.py`.
"""

from __future__ import annotations

import functools
import secrets
import threading
from time import perf_counter
from typing import Any

from embodied.rpc import auth, buffers, links, wire
from embodied.rpc.buffers import THRESHOLD
from embodied.rpc.calls import Disconnected, Future, RemoteError
from embodied.rpc.connection import Connection
from embodied.rpc.links import Link
from embodied.rpc.sessions import CLIENT_BYTES, MAX_INFLIGHT, make_hello

__all__ = ["Client", "Disconnected", "RemoteError"]


class Caller(Connection):
    """A client's calls.

    It is separate from `Client` because Python looks up attributes far more slowly in a
    class that has `__getattr__`. The arguments are those of `Connection`.
    """

    def __init__(self, addr: str | int, hello: dict[str, Any], *args: Any):
        super().__init__(addr, hello, *args)
        self.maxinflight: int = hello["max_inflight"]
        self._reply_bytes: dict[str, int] = {}  # Room for large replies, by method.
        # The lock of the connection guards the calls and their numbers.
        self._calls: dict[int, Future] = {}
        self._waiting = 0  # Threads that wait for one of them to end.
        self._next = 0
        self._counts = self._statistics.counts
        self._latencies = self._statistics.latencies
        self.attend = self._turn.attend  # The method of `Receiver`.
        self._thread.start()

    @property
    def connected(self) -> bool:
        """True while the server knows this client."""
        return self._welcome

    def connect(self, timeout: float | None = None) -> None:
        """Waits until the server has welcomed this client.

        Raises:
          TimeoutError: it has not within `timeout` seconds.
          AuthError: the keys of server and client do not match.
          RemoteError, Disconnected: the server refused this client, or it is closed.
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
        """Calls a method; with `rows`, each array is a stack of that many rows.

        Waits while `maxinflight` calls are open.

        Raises:
          WireError: the arguments cannot be sent.
          Disconnected, AuthError, RemoteError: the client is closed or was refused.
        """
        spec, arrays = self._codec.flatten(method, args)
        if spec.size > self._max_bytes:
            self._check_size(spec)
        call = Future(method, self.addr, self)
        request = reply = None
        arena = self._memory
        if arena is not None:
            if spec.nbytes >= THRESHOLD:
                call.request = request = arena.allocate(spec.room)
                if request is not None:
                    request.fill(spec, arrays, rows)
            if method in self._reply_bytes:
                call.reply = reply = arena.allocate(self._reply_bytes[method])
        with self._lock:
            if self._calls or self._failure:
                self._wait_for_room(call)
            seq = self._next
            self._next = seq + 1
            if request is not None and reply is None and not self._calls:
                call.frame = request.frame(seq)  # The commonest case, and the fastest.
            else:
                call.frame = wire.encode(
                    wire.CALL,
                    seq,
                    spec,
                    arrays,
                    rows,
                    request.number if request else wire.NO_BLOCK,
                    reply.number if reply else wire.NO_BLOCK,
                    self._calls,
                    in_memory=request is not None,
                )
            if self._calls:
                self.attend()
            self._calls[seq] = call
            if self._welcome:
                self._transmit(call)
            self._counts["sent_bytes"] += spec.nbytes
        return call

    def stats(self) -> dict[str, float]:
        """Returns counts since the last `stats`, open calls, and latencies in s."""
        self._counts["calls"] = self._next
        return {
            **self._statistics.collect(),
            "inflight": len(self._calls),
        }

    def totals(self) -> dict[str, float]:
        """Like `stats`, with counts since the start; does not affect `stats`."""
        self._counts["calls"] = self._next
        return {**self._statistics.totals(), "inflight": len(self._calls)}

    def close(self) -> None:
        """Leaves the server, and fails open calls with Disconnected."""
        if self._closing.is_set():
            return
        self._fail(Disconnected(f"{self.name}: the client is closed."))
        self._closing.set()
        self._turn.control.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._arena.close()

    # The calling threads.

    def _check_size(self, spec: wire.Spec) -> None:
        limit = self._max_bytes
        if spec.nbytes > limit or spec.size > limit + links.MESSAGE_SLACK:
            raise wire.WireError(
                f"Arguments of '{spec.method}' have {spec.size} bytes; the server "
                f"takes {limit}."
            )

    def _wait_for_room(self, call: Future) -> None:
        """Waits while `maxinflight` calls are open. The caller holds the lock."""
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

    def _transmit(self, call: Future) -> None:
        """Sends a call, after passing its blocks. The caller holds the lock."""
        link = self._link
        if link is None:
            return  # The link has ended; the next one gets all open calls.
        call.sent = True
        request, reply = call.request, call.reply
        if request is not None and request.shared is not link:
            self._pass_memory(call, request, link)
        if reply is not None and reply.shared is not link:
            self._pass_memory(call, reply, link)
        link.send(call.frame)

    def _pass_memory(self, call: Future, block: buffers.Block, link: Link) -> None:
        """Passes a block to the server, or else its contents in the frame."""
        if isinstance(link, links.LocalLink):
            link.share(block)
        else:
            self._put_into_frame(call)

    def _put_into_frame(self, call: Future) -> None:
        """Encodes a call anew for a link that cannot pass memory."""
        old = self._codec.decode(call.frame)
        source, start = old.frame, old.start
        if call.request is not None:
            source, start = call.request.pages, 0
        arrays = old.spec.views(source, start)
        call.frame = wire.encode(
            wire.CALL, old.seq, old.spec, arrays, old.rows, open=old.open
        )

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Receives until a future is done, or waits for the thread that receives."""
        if self._turn.serve(future, timeout, self._receive):
            if self._calls:
                self.attend()  # The background thread may sleep; those need it.
            return
        future.block(timeout)

    # Any thread that receives.

    def _answer(self, message: wire.Message) -> None:
        # Faster than access by name.
        kind, flags, _, seq, spec, _, _, _, source, start = message
        with self._lock:
            call = self._calls.pop(seq, None)
            if call is None:
                return  # The answer to a call that was sent twice.
            if self._waiting:
                self._changed.notify()
        counts = self._counts
        counts["replies"] += 1
        counts["received_bytes"] += spec.nbytes
        self._latencies.append(perf_counter() - call.started)
        if spec.nbytes >= THRESHOLD:
            self._reply_bytes[call.method] = spec.room
        if flags & wire.IN_MEMORY:
            # The block stays in use until the last array of the reply is gone.
            block, call.reply = call.reply, None
            if block is None or block.size < spec.nbytes:
                call.set_error(wire.WireError("a reply in memory that was not offered"))
                return
            source, start = block.leased(), 0
        call.release()
        (tree,) = spec.combine(spec.views(source, start))
        if kind == wire.REPLY:
            call.set_result(tree)
        else:
            counts["errors"] += 1
            call.set_error(RemoteError(**tree))

    def _fail(self, error: Exception) -> None:
        """Ends all open calls, and every later one, with an error."""
        with self._changed:
            self._failure = self._failure or error
            calls = list(self._calls.values())
            self._calls.clear()
            self._changed.notify_all()
        for call in calls:
            call.abandon(error)
        self._turn.interrupt()

    def _send_open_calls(self, restarted: bool) -> list[Future]:
        failed: list[Future] = []
        for seq, call in list(self._calls.items()):
            if restarted and call.sent:
                # Its memory is not reused: the previous server may still write there.
                failed.append(self._calls.pop(seq))
            else:
                self._transmit(call)
        return failed


class Client:
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
      maxinflight: maximum number of open calls; a further call waits for a reply.
      autoconn: reconnect and send open calls again. Calls that were sent to a server
        that was restarted meanwhile fail, since it is not known whether they were
        applied. Without it, a lost connection fails all open and later calls.
      keys: default: the keys of this user on this machine.
      insecure: no keys, for a server without keys.
      slots: env slots whose rows the server's batches can wait for.
      group: group of those slots; a batch has rows of one group.
      info: plain values for the owner of the server, in its session.
      link: 'local' for a socket and shared memory of this host, 'remote' for ZeroMQ,
        'auto' for the first of them that works.
    """

    CALLER = Caller

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
            raise ValueError(
                f"Expected maxinflight from 1 to {MAX_INFLIGHT}, got {maxinflight}."
            )
        keys = None if insecure else keys or auth.Keys.default()
        identity = secrets.token_bytes(CLIENT_BYTES)
        hello = make_hello(identity, name, maxinflight, slots, group, info)
        self._caller = self.CALLER(addr, hello, keys, link, autoconn)
        self.name = name
        self.addr = self._caller.addr
        self.maxinflight = maxinflight

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        caller = functools.partial(self._caller.call, method)
        setattr(self, method, caller)  # The next call finds it without coming here.
        return caller

    @property
    def connected(self) -> bool:
        """True while the server knows this client."""
        return self._caller.connected

    def connect(self, timeout: float | None = None) -> None:
        """Waits until the server has welcomed this client; see `Caller.connect`."""
        self._caller.connect(timeout)

    def call(self, method: str, *args: Any, rows: int = 0) -> Future:
        """Calls a method, even one named like an attribute here; see `Caller.call`."""
        return self._caller.call(method, *args, rows=rows)

    def stats(self) -> dict[str, float]:
        """Returns counts since the last `stats`, open calls, and latencies in s."""
        return self._caller.stats()

    def totals(self) -> dict[str, float]:
        """Like `stats`, with counts since the start; does not affect `stats`."""
        return self._caller.totals()

    def close(self) -> None:
        """Leaves the server, and fails open calls with Disconnected."""
        self._caller.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
