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
from typing import Any

from embodied.rpc import auth, buffers, links, wire
from embodied.rpc.calls import Disconnected, Future, RemoteError
from embodied.rpc.connection import Connection
from embodied.rpc.links import Link
from embodied.rpc.sessions import CLIENT_BYTES, MAX_INFLIGHT, make_hello

__all__ = ["Client", "Disconnected", "RemoteError"]


class Caller(Connection):
    """A client's calls.

    `Client` is apart from it because Python looks up the attributes of a class that
    has `__getattr__` far more slowly. The arguments are those of `Connection`.
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
        self.attend = self._turn.attend  # Of `Receiver`.
        self._thread.start()

    @property
    def connected(self) -> bool:
        """True while the server knows this client."""
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
        spec, arrays = self._codec.flatten(method, args)
        nbytes = spec.nbytes
        limit = self._max_bytes
        if nbytes > limit or len(spec.encoded) > limit + links.MESSAGE_SLACK:
            size = max(nbytes, len(spec.encoded))
            raise wire.WireError(
                f"Arguments of '{method}' have {size} bytes; the server takes {limit}."
            )
        call = Future(method, self.addr, self)
        arena = self._memory
        if arena is not None:
            if nbytes >= buffers.THRESHOLD:
                call.request = arena.allocate(spec.room)
                if call.request is not None:
                    call.request.fill(spec, arrays, rows)
            if method in self._reply_bytes:
                call.reply = arena.allocate(self._reply_bytes[method])
        with self._lock:
            if self._calls or self._failure:
                self._wait_for_room(call)
            seq = self._next
            self._next = seq + 1
            request, reply = call.request, call.reply
            if request is not None and reply is None and not self._calls:
                call.frame = request.frame(seq)  # The commonest case, and the fastest.
            else:
                call.frame = wire.encode(
                    wire.CALL,
                    seq,
                    spec,
                    arrays,
                    rows,
                    request.number if request else wire.NOWHERE,
                    reply.number if reply else wire.NOWHERE,
                    self._calls,
                    in_memory=request is not None,
                )
            if self._calls:
                self.attend()
            self._calls[seq] = call
            if self._welcome:
                self._transmit(call)
            self._counts["sent_bytes"] += nbytes
        return call

    def stats(self) -> dict[str, float]:
        """Counts since the last call, open calls, and latencies in seconds."""
        self._counts["calls"] = self._next
        return {
            **self._statistics.collect(),
            "inflight": len(self._calls),
        }

    def totals(self) -> dict[str, float]:
        """Like `stats`, with counts since the start; the next `stats` is as without."""
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

    def _wait_for_room(self, call: Future) -> None:
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

    def _transmit(self, call: Future) -> None:
        """Sends a call, and its memory before that. Holds the lock."""
        link = self._link
        if link is None:
            return  # It has just ended; the next one gets all open calls.
        call.sent = True
        request, reply = call.request, call.reply
        if request is not None and request.shared is not link:
            self._pass_memory(call, request, link)
        if reply is not None and reply.shared is not link:
            self._pass_memory(call, reply, link)
        link.send(call.frame)

    def _pass_memory(self, call: Future, block: buffers.Block, link: Link) -> None:
        """Lets the server have a block, or else all that is in it."""
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
        """Receives until a future is done, or waits for the thread that does."""
        if self._turn.serve(future, timeout, self._receive):
            if self._calls:
                self.attend()  # Whoever waits for those was told to sleep.
            return
        future.block(timeout)

    # Any thread that receives.

    def _answer(self, message: wire.Message) -> None:
        # Faster than by their names.
        kind, flags, _, seq, spec, _, _, _, source, start = message
        with self._lock:
            call = self._calls.pop(seq, None)
            if call is None:
                return  # The answer to a call that was sent twice.
            if self._waiting:
                self._changed.notify()
        self._counts["replies"] += 1
        self._counts["received_bytes"] += spec.nbytes
        self._latencies.append(time.perf_counter() - call.started)
        if spec.nbytes >= buffers.THRESHOLD:
            self._reply_bytes[call.method] = spec.room
        if flags & wire.IN_MEMORY:
            # It is kept until the last array of the reply is gone.
            block, call.reply = call.reply, None
            if block is None or block.size < spec.nbytes:
                call.set_error(wire.WireError("a reply in memory that was not offered"))
                return
            source, start = block.leased(), 0
        call.release()
        (tree,) = spec.build(source, start)
        if kind == wire.REPLY:
            call.set_result(tree)
        else:
            self._counts["errors"] += 1
            call.set_error(RemoteError(**tree))

    def _fail(self, error: Exception) -> None:
        """Ends all open calls, and every later one, with an error."""
        with self._changed:
            self._failure = self._failure or error
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
            raise ValueError(f"maxinflight must be 1..{MAX_INFLIGHT}: {maxinflight}")
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
        """Waits until the server is there; see `Caller.connect`."""
        self._caller.connect(timeout)

    def call(self, method: str, *args: Any, rows: int = 0) -> Future:
        """Calls a method, also one with a name like those here; see `Caller.call`."""
        return self._caller.call(method, *args, rows=rows)

    def stats(self) -> dict[str, float]:
        """Counts since the last call, open calls, and latencies in seconds."""
        return self._caller.stats()

    def totals(self) -> dict[str, float]:
        """Like `stats`, with counts since the start; the next `stats` is as without."""
        return self._caller.totals()

    def close(self) -> None:
        """Leaves the server, and fails open calls with Disconnected."""
        self._caller.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
