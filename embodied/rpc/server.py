"""A server, which answers calls of many clients. Any process.

Threads: the loop receives and checks calls, and hands them out; workers call the bound
functions and send the replies themselves; one thread runs each `postfn` after the
replies. The loop waits on file descriptors, and looks every two seconds for clients
that are gone. It runs quick batches itself; see `threads.Loop`.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from embodied.rpc import auth, links, wire, zmq_links
from embodied.rpc.calls import Statistics, Unanswered
from embodied.rpc.links import Link
from embodied.rpc.sessions import NEW, REFUSED, ClientSession, Outbox, Sessions
from embodied.rpc.threads import Loop, Poller, PostThread, ThreadPool, Wakeup
from embodied.rpc.wire import check_schema

log = logging.getLogger("embodied.rpc")

HEARTBEAT = 2.0  # Seconds between signs of life of a client.
CLIENT_TIMEOUT = 8.0  # Seconds of silence after which a client counts as gone.
ListenerOptions = tuple[str, auth.Keys | None, int, Poller]
# 'repeated' are calls that came again and got the reply that was kept.
COUNTS = ("calls", "replies", "received_bytes", "sent_bytes", "errors", "repeated")


class Method(NamedTuple):
    """A function that clients can call."""

    name: str
    workfn: Callable
    postfn: Callable | None
    pool: ThreadPool
    schema: dict | None
    batching: Any = None  # `Batching` of a batched method; None for others.


class PendingCall(NamedTuple):
    """One call that has no answer yet."""

    session: ClientSession
    seq: int
    received: float
    reply_memory: Any  # Where the client wants large replies, or None.
    start: int = 0  # Index of its first row in a batch.
    rows: int = 0  # 0 for an unstacked call, which has one row.


class Job:
    """One run of a function, which answers one call, or several as a batch."""

    def __init__(self, method: Method, calls: list[PendingCall]):
        self.method = method
        self.calls = calls
        self.data: list = []
        self.ticket: int | None = None  # Its place in the order of `postfn`.

    def arguments(self) -> list:
        """Returns the arguments of the function."""
        return self.data


class Server:
    """Answers calls of clients.

        server = Server(port)
        server.bind('add', lambda x, y: x + y)
        with server:          # Or server.start(block=True).
          ...

    Args:
      addr: port or HOST:PORT. Without a host, only this machine can connect.
      name: used in thread names, statistics and messages.
      workers: threads shared by all methods that have none of their own.
      keys: which clients may connect. Default: the keys of this user on this machine.
      insecure: no keys at all: everyone who reaches the address may call.
      max_bytes: maximum bytes of the arrays of one message.
      backlog: results that may wait for their `postfn` before workers wait too.
      on_failure: called with an error that ends the server's loop for good. Its owner
        should end then; `close` raises a RuntimeError.
    """

    ADVICE = "pass the keys of the run (--run.keyfile FILE), or listen at localhost."

    def __init__(
        self,
        addr: str | int,
        name: str = "Server",
        workers: int = 1,
        *,
        keys: auth.Keys | None = None,
        insecure: bool = False,
        max_bytes: int = 1 << 30,
        backlog: int = 16,
        on_failure: Callable[[BaseException], None] | None = None,
    ):
        self.name = name
        self.addr = auth.bind_address(addr, keys, insecure, self.ADVICE)
        self._keys = None if insecure else keys or auth.Keys.default()
        self._identity = secrets.token_hex(8)  # Tells a restarted server apart.
        self._codec = wire.Codec(max_bytes)
        self._statistics = Statistics(name, *COUNTS, "post_errors")
        self._counts = self._statistics.counts
        self._outbox = Outbox(name, self._codec, self._statistics)
        self._methods: dict[str, Method] = {}
        self._pool = ThreadPool(workers, name, self._work)
        self._pools = [self._pool]
        self._post = PostThread(f"{name}-post", backlog, self._post_failed)
        self._wakeup = Wakeup()
        self._poller = Poller()
        self._poller.add(self._wakeup.fileno(), lambda _: self._wakeup.clear())
        self.sessions = Sessions(CLIENT_TIMEOUT, self._discard)
        self._listeners: list[Any] = []  # Opened by `start`.
        self._loop = Loop(name, self._step, self._failed)
        self._on_failure = on_failure
        self._failure: BaseException | None = None
        self._expire_at = 0.0
        self._started = False
        self._closing = threading.Event()

    @classmethod
    def check(
        cls, addr: str | int, *, keys: auth.Keys | None = None, insecure: bool = False
    ) -> None:
        """Raises AuthError or ValueError if a server could not listen there."""
        auth.check_free(auth.bind_address(addr, keys, insecure, cls.ADVICE))

    def bind(
        self,
        name: str,
        workfn: Callable,
        postfn: Callable | None = None,
        workers: int = 0,
        schema: dict | None = None,
    ) -> None:
        """Offers a function to clients.

        Args:
          name: what clients call.
          workfn: called with the client's arguments. Its result is the reply; with
            `postfn`, it returns (reply, info).
          postfn: called with `info` after the reply, in the order of their beginning.
          workers: threads of its own; 0 shares those of the server.
          schema: {key: (dtype, shape)} of the first argument, checked on arrival.
        """
        pool = self._own_pool(name, workers)
        self._add(Method(name, workfn, postfn, pool, schema))

    def start(self, block: bool = True) -> None:
        """Starts to answer; with `block`, returns when the server is closed."""
        if self._started or self._closing.is_set():
            raise RuntimeError(f"Server {self.name} was started or closed before.")
        self._listeners = self._listen()
        self._started = True
        for pool in self._pools:
            pool.start()
        self._post.start()
        self._expire_at = time.monotonic() + HEARTBEAT
        self._loop.start()
        if block:
            self._loop.join()
            self._check_failure()

    def close(self, timeout: float = 10.0) -> None:
        """Ends the server: running calls are answered, waiting ones are dropped.

        A dropped call fails when its client is welcomed by the next server.

        Raises:
          TimeoutError: a function did not return in time; its thread is left behind.
          RuntimeError: the loop of the server had failed.
        """
        if self._closing.is_set() or not self._started:
            if not self._closing.is_set():
                self._poller.close()
                self._wakeup.close()
            self._closing.set()
            return
        deadline = time.monotonic() + timeout
        self._closing.set()
        self._loop.close()
        self._wakeup.set()
        ended = [self._loop.join(deadline)]
        ended += [pool.stop(deadline) for pool in self._pools]
        ended.append(self._post.stop(deadline))
        for listener in self._listeners:
            listener.close()
        self._poller.close()
        self._wakeup.close()
        self._check_failure()
        if not all(ended):
            text = f"a bound function did not return within {timeout} s of closing."
            raise TimeoutError(f"Server {self.name}: {text}")

    def __enter__(self) -> Server:
        if not self._started:
            self.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stats(self) -> dict[str, float]:
        """Returns counts since the last `stats`, rates, queue lengths and latencies."""
        return {
            **self._statistics.collect(),
            "clients": len(self.sessions),
            "waiting": sum(pool.waiting for pool in self._pools),
            "post_waiting": self._post.waiting,
            "rejected": sum(self.rejected.values()),
        }

    def totals(self) -> dict[str, float]:
        """Returns counts since the start, and latencies; does not affect `stats`."""
        return self._statistics.totals()

    @property
    def rejected(self) -> dict[str, int]:
        """Messages and handshakes that were not served, by reason, since the start."""
        refused = sum(getattr(x, "refused", 0) for x in self._listeners)
        return {**self._statistics.rejected, **({"key": refused} if refused else {})}

    def _own_pool(self, name: str, workers: int) -> ThreadPool:
        if not workers:
            return self._pool
        pool = ThreadPool(workers, f"{self.name}-{name}", self._work)
        self._pools.append(pool)
        return pool

    def _add(self, method: Method) -> None:
        if self._started:
            raise RuntimeError(f"Bind '{method.name}' before {self.name} starts.")
        if method.name in self._methods:
            raise ValueError(f"Server {self.name} has '{method.name}' already.")
        self._methods[method.name] = method

    def _listen(self) -> list[Any]:
        """Opens the listeners that accept links.

        The local one comes first: a client that connects over ZeroMQ looks for it then.
        """
        options = (self.addr, self._keys, self._codec.max_bytes, self._poller)
        listeners: list[Any] = self._listen_locally(options)
        try:
            listeners.append(
                zmq_links.RouterListener(
                    *options, self._receive, self._statistics.reject
                )
            )
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        if len(listeners) == 1:  # The previous server may have been closing.
            listeners += self._listen_locally(options)
        return listeners

    def _listen_locally(self, options: ListenerOptions) -> list[Any]:
        if not links.LOCAL_AVAILABLE:
            return []
        try:
            return [links.LocalListener(*options, self._receive, self._link_ended)]
        except OSError as error:
            log.warning("%s has no local link: %s", self.name, error)
            return []

    # The loop thread.

    def _step(self) -> None:
        now = time.monotonic()
        if now >= self._expire_at:
            # If the loop is late, it was held up itself, and has yet to receive what
            # its clients have sent meanwhile.
            late = now >= self._expire_at + HEARTBEAT
            self._expire_at = now + HEARTBEAT
            if not late:
                self._expire()
        due = min(self._due(), self._expire_at)
        self._poller.wait(max(0, due - now))
        self._after_receive()

    def _failed(self, error: BaseException) -> None:
        """Records the error that ended the loop, and tells the owner."""
        self._failure = error
        if self._on_failure is not None:
            self._on_failure(error)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"Server {self.name} has failed: {self._failure!r}"
            ) from self._failure

    def _expire(self) -> None:
        self.sessions.expire()
        for listener in self._listeners:
            listener.expire()

    def _discard(self, link: Link) -> None:
        for listener in self._listeners:
            listener.discard(link)

    def _link_ended(self, link: Link) -> None:
        """Marks the client of an ended link as gone; it may say HELLO again."""
        if link.session is not None and link.session.link is link:
            self.sessions.lost(link.session)

    def _due(self) -> float:
        """Returns when the loop has to wake up even if nothing arrives."""
        return math.inf

    def _after_receive(self) -> None:
        """Called at the end of each step, after the messages that came were handled."""

    def _receive(self, link: Link, frame: Any) -> None:
        """Handles a frame; a bad one does not affect other clients."""
        self._counts["received_bytes"] += len(frame)
        try:
            message = self._codec.decode(frame)
        except wire.WireError as error:
            self._statistics.reject("undecodable", str(error))
            return
        try:
            self._message(link, message)
        except Exception:
            self._internal_error()

    def _internal_error(self) -> None:
        """Counts an error of the server itself, which must not affect other clients."""
        self._statistics.reject("internal", traceback.format_exc())

    def _message(self, link: Link, message: wire.Message) -> None:
        if message.kind == wire.HELLO:
            self._hello(link, message)
            return
        if message.kind == wire.BYE:
            if link.session is not None and link.session.link is link:
                self.sessions.bye(link.session)
            return
        session = self.sessions.get(link)
        if session is None:
            self._outbox.control(link, wire.STRANGER)
        elif message.kind == wire.CALL:
            self._call(session, message)
        elif message.kind != wire.HEARTBEAT:
            self._statistics.reject("kind", f"a message of kind {message.kind}")

    def _hello(self, link: Link, message: wire.Message) -> None:
        try:
            if self.sessions.hello(link, message.value()) is None:
                return  # It is not admitted yet, and will ask again.
        except wire.WireError as error:
            self._statistics.reject("hello", str(error))
            refusal = {"kind": "hello", "message": str(error)}
            self._outbox.control(link, wire.ERROR, refusal)
            return
        welcome = make_welcome(self._identity, self._codec.max_bytes)
        self._outbox.control(link, wire.WELCOME, welcome)

    def _call(self, session: ClientSession, message: wire.Message) -> None:
        if not self._begin(session, message.seq, message.open):
            return
        name = message.spec.method
        try:
            if name not in self._methods:
                known = ", ".join(sorted(self._methods))
                raise wire.WireError(f"unknown method; there are: {known}")
            method = self._methods[name]
            if method.schema is not None:
                check_schema(method.schema, message.spec, message.rows)
            self._accept(session, message, method)
        except wire.WireError as error:
            self._refuse(session, message.seq, name, error)
        except Exception as error:
            self._fail_call(session, message.seq, name, error)

    def _fail_call(
        self, session: ClientSession, seq: int, name: str, error: Exception
    ) -> None:
        """Answers a call that an error of the server itself keeps from running."""
        self._internal_error()
        self._outbox.finish(session, seq, self._outbox.exception(seq, name, error))

    def _refuse(
        self, session: ClientSession, seq: int, name: str, error: wire.WireError
    ) -> None:
        self._statistics.reject("request", f"{session.name}: {error}")
        text = f"Server {self.name} refused '{name[:100]}': {error}"
        self._outbox.finish(session, seq, self._outbox.error(seq, "bad", text))

    def _begin(self, session: ClientSession, seq: int, others: Sequence[int]) -> bool:
        """Registers a call; False if it must not run, as it is repeated or refused."""
        state, reply = session.begin(seq, others)
        if state == NEW:
            self._counts["calls"] += 1
            return True
        if state == REFUSED:
            text = f"{session.name} has more than {session.max_inflight} calls open"
            self._statistics.reject("credits", text)
            self._outbox.send(session, self._outbox.error(seq, "credits", text))
        elif reply is not None:
            self._counts["repeated"] += 1
            self._outbox.send(session, reply)
        return False

    def _accept(
        self, session: ClientSession, message: wire.Message, method: Method
    ) -> None:
        """Hands a call to a worker."""
        source, start, reply_memory = self._memory(session, message)
        if message.flags & wire.IN_MEMORY:
            # The client reuses its memory after the reply, while the function may keep
            # its arguments longer.
            source = bytearray(memoryview(source)[: message.spec.nbytes])
        now = time.perf_counter()
        job = Job(method, [PendingCall(session, message.seq, now, reply_memory)])
        job.data = message.spec.build(source, start)
        method.pool.put(job, session)

    def _memory(
        self, session: ClientSession, message: wire.Message
    ) -> tuple[Any, int, Any]:
        """Returns the buffer of a call's arrays, their start in it and reply memory."""
        if not (message.flags & wire.IN_MEMORY or message.reply):
            return message.frame, message.start, None
        blocks = session.link.memory if session.link else None
        if blocks is None:
            raise wire.WireError("this client shares no memory with the server")
        reply = blocks.find(message.reply) if message.reply else None
        if not message.flags & wire.IN_MEMORY:
            return message.frame, message.start, reply
        self._counts["received_bytes"] += message.spec.nbytes
        return blocks.find(message.request, message.spec.nbytes), 0, reply

    # Worker threads, and the loop thread for quick batches.

    def _work(self, job: Job) -> None:
        """Runs a function, answers its calls, and hands over its `postfn`."""
        after = info = None
        # Not earlier: a job whose turn others wait for must not wait for a worker.
        if job.method.postfn and job.ticket is None:
            job.ticket = self._post.ticket()
        try:
            after, info = self._answer(job)
        finally:
            # Even after an error: the `postfn` of later tickets waits for this one.
            if job.ticket is not None:
                self._post.put(job.ticket, after, info)

    def _answer(self, job: Job) -> tuple[Callable | None, Any]:
        """Runs a job and sends its replies; returns `postfn` or None, and its info."""
        method, after, info = job.method, None, None
        try:
            if self._closing.is_set():
                raise Unanswered
            result = method.workfn(*job.arguments())
            if method.postfn:
                result, info = result
            frames = self._encode(job, result)
            after = method.postfn
        except Unanswered:
            for call in job.calls:
                call.session.forget(call.seq)
            return None, None
        except BaseException as error:
            # Whatever a bound function raises is sent to its callers.
            frames = [
                self._outbox.exception(call.seq, method.name, error)
                for call in job.calls
            ]
        for call, frame in zip(job.calls, frames):
            self._outbox.finish(call.session, call.seq, frame)
        now = time.perf_counter()
        self._statistics.latencies.extend(now - call.received for call in job.calls)
        return after, info

    def _encode(self, job: Job, result: Any) -> list[bytes]:
        """Returns the answer to each call of a job."""
        spec, arrays = self._codec.flatten("", [result])
        (call,) = job.calls
        return [self._outbox.reply(call.seq, spec, arrays, call.reply_memory)]

    def _post_failed(self, error: BaseException) -> None:
        self._counts["post_errors"] += 1
        text = "".join(traceback.format_exception(error))
        log.error("%s: a `postfn` failed:\n%s", self.name, text)


def make_welcome(server: str, max_bytes: int) -> dict[str, Any]:
    """Returns the answer to a HELLO, with the identity of the server."""
    return {"server": server, "max_bytes": max_bytes, "heartbeat": HEARTBEAT}
