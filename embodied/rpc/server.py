"""A server: answers calls of many clients over one socket. Any process.

Threads: the loop receives, checks and hands out; workers call the bound functions and
send the replies themselves; one thread runs what comes after replies. The loop waits
on file descriptors only and uses no time while nothing comes. Quick batches it runs
itself, see `embodied/rpc/loop.py`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from embodied.rpc import auth, lane, memory, sockets, wire
from embodied.rpc.lanes import Lanes
from embodied.rpc.loop import Loop
from embodied.rpc.methods import Job, Method, Output
from embodied.rpc.outbox import Outbox
from embodied.rpc.pause import Pause
from embodied.rpc.pool import Afterwork, Pool
from embodied.rpc.session import NEW, REFUSED, Session, Sessions
from embodied.rpc.statistics import Statistics

log = logging.getLogger("embodied.rpc")

HEARTBEAT = 2.0  # Seconds between signs of life of a client.
CLIENT_TIMEOUT = 8.0  # Seconds of silence after which a client counts as gone.
MAX_HELD = 1000  # Clients that wait to be let in.


class Unanswered(Exception):
    """Raised by a bound function that ends before it can answer.

    The caller hears nothing, and sends the call again to the server that comes next.
    """


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
      keys: who may connect. Default: the keys of this user on this machine.
      insecure: no keys at all: everyone who reaches the address may call.
      max_bytes: of the arrays of one message.
      backlog: results that may wait for their `postfn` before workers wait too.
    """

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
    ):
        self.name = name
        self.addr = sockets.bind_address(addr, keys, insecure)
        self._keys = None if insecure else keys or auth.Keys.default()
        self._identity = secrets.token_hex(8)  # Tells a restarted server apart.
        self._codec = wire.Codec(max_bytes)
        self._statistics = Statistics(name)
        self._outbox = Outbox(name, self._codec, self._statistics)
        self._methods: dict[str, Method] = {}
        self._pool = Pool(workers, name, self._work)
        self._pools = [self._pool]
        self._post = Afterwork(f"{name}-post", backlog, self._post_failed)
        self._pause = Pause(name)
        self._wakeup = sockets.Wakeup()
        self._poller = sockets.Poller(self._wakeup.fileno())
        self.sessions = Sessions(CLIENT_TIMEOUT)
        self._lanes: Lanes | None = None  # Set while it runs, like the next two.
        self._loop = Loop(name, self._step)
        self._held: set[bytes] = set()  # Clients that are not let in yet.
        self._expire_at = 0.0
        self._closing = threading.Event()
        self._context: zmq.Context | None = None
        self._gate: auth.Gate | None = None

    @staticmethod
    def check(
        addr: str | int, *, keys: auth.Keys | None = None, insecure: bool = False
    ) -> None:
        """Raises AuthError or ValueError if a server could not listen there."""
        sockets.check_free(sockets.bind_address(addr, keys, insecure))

    def bind(
        self,
        name: str,
        workfn: Callable,
        postfn: Callable | None = None,
        workers: int = 0,
        schema: dict | None = None,
        once: bool = False,
        output: bool = False,
    ) -> None:
        """Offers a function to clients.

        Args:
          name: what clients call.
          workfn: called with the client's arguments. Its result is the reply; with
            `postfn`, it returns (reply, info).
          postfn: called with `info` after the reply, in the order of the calls.
          workers: threads of its own; 0 shares those of the server.
          schema: {key: (dtype, shape)} of the first argument, checked on arrival.
          once: answered calls are part of `save`, so that they are not applied
            again when the server restarts from there.
          output: workfn takes a keyword `output`, an `Output` for its reply.
        """
        pool = self._own_pool(name, workers)
        self._add(Method(name, workfn, postfn, pool, schema, once, output, None, set()))

    def start(self, block: bool = True) -> None:
        """Starts to answer; with `block`, returns when the server is closed."""
        if self._context or self._closing.is_set():
            raise RuntimeError(f"Server {self.name} was started before.")
        context = zmq.Context()
        try:
            if self._keys:
                self._gate = auth.Gate(context, self._keys)
                self._poller.add(self._gate.fileno)
            socket = sockets.server_socket(
                context, self.addr, self._keys, self._codec.max_bytes
            )
        except BaseException:
            context.destroy(linger=0)
            raise
        self._context = context
        self._socket = sockets.LockedSocket(socket, self._wakeup)
        self._outbox.socket = self._socket
        self._poller.add(self._socket.fileno)
        if lane.AVAILABLE:
            self._lanes = Lanes(self._poller, self.sessions, self._lane_frame)
        for pool in self._pools:
            pool.start()
        self._post.start()
        self._expire_at = time.monotonic() + HEARTBEAT
        self._loop.start()
        if block:
            self._closing.wait()
            self._loop.join()

    def close(self, timeout: float = 10.0) -> None:
        """Ends: running calls are answered, waiting ones are left to be sent again.

        Raises:
          TimeoutError: a function did not return in time; its thread is left behind.
        """
        if self._closing.is_set() or not self._context:
            self._closing.set()
            return
        deadline = time.monotonic() + timeout
        self._closing.set()
        self._pause.close()
        self._loop.close()
        self._wakeup.set()
        ended = [self._loop.join(deadline)]
        ended += [pool.stop(deadline) for pool in self._pools]
        ended.append(self._post.stop(deadline))
        if self._lanes:
            self._lanes.close()
        self._socket.close()
        if self._gate:
            self._gate.close()
        self._context.destroy(linger=500)  # For the last replies.
        self._poller.close()
        self._wakeup.close()
        if not all(ended):
            raise TimeoutError(
                f"Server {self.name}: a bound function did not return within "
                f"{timeout} s of closing."
            )

    def __enter__(self) -> Server:
        if not self._context:
            self.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def paused(self, timeout: float = 60.0) -> contextlib.AbstractContextManager[None]:
        """No call of a `once` method runs inside: state and `save` belong together."""
        return self._pause.saving(timeout)

    def save(self) -> dict:
        """The answered calls of `once` methods, as a tree for a checkpoint."""
        return self.sessions.save()

    def load(self, data: dict) -> None:
        """Takes over what `save` returned. Call it before `start`."""
        self.sessions.load(data)

    def stats(self) -> dict[str, float]:
        """Counts and rates since the last call, queue lengths, and latencies."""
        return {
            **self._statistics.collect(
                "calls",
                "replies",
                "received_bytes",
                "sent_bytes",
                "errors",
                "repeated",
                "post_errors",
            ),
            "clients": len(self.sessions),
            "waiting": sum(pool.waiting for pool in self._pools),
            "post_waiting": self._post.waiting,
            "rejected": sum(self.rejected.values()),
        }

    @property
    def rejected(self) -> dict[str, int]:
        """Messages and handshakes that were not served, by reason, since the start."""
        refused = sum(self._gate.refused.values()) if self._gate else 0
        return {**self._statistics.rejected, **({"key": refused} if refused else {})}

    def _own_pool(self, name: str, workers: int) -> Pool:
        if not workers:
            return self._pool
        pool = Pool(workers, f"{self.name}-{name}", self._work)
        self._pools.append(pool)
        return pool

    def _add(self, method: Method) -> None:
        if self._context:
            raise RuntimeError(f"Bind '{method.name}' before {self.name} starts.")
        if method.name in self._methods:
            raise ValueError(f"Server {self.name} has '{method.name}' already.")
        self._methods[method.name] = method

    # The loop thread.

    def _step(self) -> None:
        now = time.monotonic()
        if now >= self._expire_at:
            # If it is late, it was stopped itself, and has yet to hear what its
            # clients have said meanwhile.
            if now < self._expire_at + HEARTBEAT:
                self._expire()
            self._expire_at = now + HEARTBEAT
        due = self._due()
        if len(self.sessions) or self._held:
            due = self._expire_at if due is None else min(due, self._expire_at)
        ready = self._poller.wait(None if due is None else max(0, due - now))
        # Only those that have something: asking the others costs as much.
        others = self._lanes.handle(ready) if self._lanes else [x[0] for x in ready]
        if others:
            self._handle_socket(others)
        self._after_receive()

    def _expire(self) -> None:
        self.sessions.expire()
        held, self._held = self._held, set()
        for client in held:
            self._outbox.control(client, wire.STRANGER)  # It says HELLO again.
        if self._lanes:
            self._lanes.expire()

    def _handle_socket(self, ready: list[int]) -> None:
        if self._gate and self._gate.fileno in ready:
            self._gate.handle()
        if self._socket.fileno in ready or self._wakeup.fileno() in ready:
            for parts in self._socket.receive():
                self._receive(parts)

    def _due(self) -> float | None:
        """When the loop has to wake up although nothing came."""
        return None

    def _after_receive(self) -> None:
        """Called last, when all messages that were there have been looked at."""

    def _receive(self, parts: list[zmq.Frame]) -> None:
        if len(parts) != 2:
            self._statistics.reject("parts", f"a message of {len(parts)} parts")
            return
        client = parts[0].bytes
        if self._lanes:
            # What a client sent before this by the short cut comes before this.
            self._lanes.drain(client)
        self._frame(client, contents(parts[1]))

    def _lane_frame(self, session: Session, frame: bytes) -> None:
        self._frame(session.client, frame)

    def _frame(self, client: bytes, frame: Any) -> None:
        self._statistics.counts.received_bytes += len(frame)
        try:
            message = self._codec.decode(frame)
        except wire.WireError as error:
            self._statistics.reject("undecodable", str(error))
            return
        try:
            self._message(client, message)
        except Exception:
            self._mistake()

    def _mistake(self) -> None:
        """One of ours, which a message brought out, and which must not end others."""
        self._statistics.reject("internal", traceback.format_exc())

    def _message(self, client: bytes, message: wire.Message) -> None:
        if message.kind == wire.HELLO:
            self._hello(client, message)
            return
        if message.kind == wire.BYE:
            # Not `get`, which would let in again whose lane has just ended.
            leaving = self.sessions.find(client)
            if leaving is not None:
                self.sessions.bye(leaving)
            return
        session = self.sessions.get(client)
        if session is None:
            self._outbox.control(client, wire.STRANGER)
        elif message.kind == wire.CALL:
            self._call(session, message)
        elif message.kind != wire.HEARTBEAT:
            self._statistics.reject("kind", f"a message of kind {message.kind}")

    def _hello(self, client: bytes, message: wire.Message) -> None:
        try:
            hello = wire.message_tree(message)
            session = self.sessions.hello(client, hello)
            if session is None:
                self._hold(client)
                return
        except wire.WireError as error:
            self._statistics.reject("hello", str(error))
            refusal = {"kind": "hello", "message": str(error)}
            self._outbox.control(client, wire.ERROR, refusal)
            return
        welcome = {
            "server": self._identity,
            "max_bytes": self._codec.max_bytes,
            "bulk": session.memory.pid is not None,
            "heartbeat": HEARTBEAT,
            "lane": self._lanes.offer(session) if self._lanes else None,
        }
        self._outbox.control(client, wire.WELCOME, welcome)

    def _hold(self, client: bytes) -> None:
        if len(self._held) >= MAX_HELD:
            raise wire.WireError(f"{MAX_HELD} clients wait to be let in already")
        self._held.add(client)

    def _call(self, session: Session, message: wire.Message) -> None:
        name = message.spec.method
        method = self._methods.get(name)
        once = method is not None and method.once
        if self._begin(session, message.seq, message.open, once):
            try:
                self._check(method, message)
                assert method is not None
                self._accept(session, message, method)
            except wire.WireError as error:
                self._refuse(session, message.seq, name, error)

    def _refuse(
        self, session: Session, seq: int, name: str, error: wire.WireError
    ) -> None:
        self._statistics.reject("request", f"{session.name}: {error}")
        text = f"Server {self.name} refused '{name[:100]}': {error}"
        self._outbox.finish(session, seq, self._outbox.error(seq, "bad", text))

    def _begin(
        self, session: Session, seq: int, open_calls: Sequence[int], once: bool
    ) -> bool:
        """Registers a call; False if it is not to be applied, and was answered."""
        state, reply = session.begin(seq, open_calls, once)
        if state == NEW:
            self._statistics.counts.calls += 1
            return True
        if state == REFUSED:
            text = f"{session.name} has more than {session.max_inflight} calls open"
            self._statistics.reject("credits", text)
            self._outbox.send(session, self._outbox.error(seq, "credits", text))
        elif reply is not None:
            self._statistics.counts.repeated += 1
            self._outbox.send(session, reply)
        return False

    def _check(self, method: Method | None, message: wire.Message) -> None:
        if method is None:
            known = ", ".join(sorted(self._methods))
            raise wire.WireError(f"there is no such method; there are: {known}")
        if method.schema is not None:
            shape = (message.spec, message.rows)
            if shape not in method.checked:
                wire.check_schema(method.schema, message.spec.structure, message.rows)
                if len(method.checked) >= wire.MAX_CACHED_SPECS:
                    method.checked.clear()
                method.checked.add(shape)

    def _accept(self, session: Session, message: wire.Message, method: Method) -> None:
        """Hands a call to a worker."""
        request, reply_memory = self._memory(session, message)
        if request is None:
            arguments = wire.message_tree(message)
        else:
            # The client takes its memory back with the reply; the function may keep
            # its arguments longer.
            owned = bytearray(memoryview(request.pages)[: message.spec.nbytes])
            arguments = message.spec.build(owned, 0, message.values)
        if not isinstance(arguments, tuple):
            raise wire.WireError("the arguments are not a tuple")
        ticket = self._post.ticket() if method.postfn else None
        now = time.perf_counter()
        job = Job(session, message.seq, method, arguments, reply_memory, ticket, now)
        method.pool.put(job, session.queues)

    def _memory(
        self, session: Session, message: wire.Message
    ) -> tuple[memory.Mapping | None, Any]:
        """Maps the client's memory for a call's arrays and for its reply."""
        request, reply = message.places
        request_memory = reply_memory = None
        if message.flags & wire.BULK:
            request_memory = session.memory.map(request)
            if len(request_memory.pages) < message.spec.nbytes:
                raise wire.WireError("the arrays are larger than their shared memory")
        if reply != wire.NOWHERE:
            reply_memory = session.memory.map(reply).pages
        return request_memory, reply_memory

    # Worker threads.

    def _work(self, job: Any) -> None:
        method, after, info, made = job.method, None, None, False
        with self._applying(method) as allowed:
            if not allowed:
                self._drop(job)
                return
            try:
                if method.output:
                    output = Output(self._codec, job.reply_memory)
                    result = method.workfn(*job.arguments, output=output)
                    made = output.made
                else:
                    result = method.workfn(*job.arguments)
                if method.postfn:
                    result, info = result
                spec, arrays, values = self._codec.result(method.name, result)
                frame = self._outbox.reply(
                    job.seq, spec, values, arrays, job.reply_memory, made
                )
                after = method.postfn
            except Unanswered:
                self._drop(job)
                return
            except Exception as error:
                # Whatever a bound function raises belongs to its caller.
                frame = self._outbox.exception(job.seq, method.name, error)
            self._outbox.finish(job.session, job.seq, frame)
        self._statistics.latencies.append(time.perf_counter() - job.received)
        if job.ticket is not None:
            self._post.put(job.ticket, after, info)

    def _drop(self, job: Job) -> None:
        """Leaves a call to be sent again, to the server that comes next."""
        job.session.forget(job.seq)
        if job.ticket is not None:
            self._post.put(job.ticket, None)

    def _applying(self, method: Method) -> contextlib.AbstractContextManager[bool]:
        if method.once:
            return self._pause.applying()
        return contextlib.nullcontext(not self._closing.is_set())

    def _post_failed(self, error: BaseException) -> None:
        self._statistics.counts.post_errors += 1
        text = "".join(traceback.format_exception(error))
        log.error("%s: work after a reply failed:\n%s", self.name, text)


def contents(frame: zmq.Frame) -> Any:
    """The bytes of a frame; a copy of small ones, which are cheaper to look at."""
    buffer = frame.buffer
    return buffer if len(buffer) >= memory.THRESHOLD else bytes(buffer)
