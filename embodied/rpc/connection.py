"""A client's connection: how it is made, kept alive and made again. Any process.

A background thread chooses the link, receives while no thread waits for a result, sends
heartbeats, and says HELLO again after a reconnect. The local link is tried first. If
there is none, ZeroMQ waits for the server; once it is connected, the local link is
tried again, since a server on this host may have started meanwhile.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from select import POLLIN, POLLOUT, poll
from typing import Any

from embodied.rpc import auth, buffers, links, wire
from embodied.rpc.calls import PENDING, Disconnected, Future, RemoteError, Statistics
from embodied.rpc.links import DOWN, UP, Link, LinkEnded, LocalLink
from embodied.rpc.threads import Wakeup, raise_descriptor_limit

RETRY_SECONDS = 0.2  # Pause before the next attempt to open a link.
COUNTS = ("calls", "replies", "errors", "reconnects", "sent_bytes", "received_bytes")

log = logging.getLogger("embodied.rpc")


class ReceiveTurn:
    """Gives the turn to receive to one waiting thread of a client at a time.

    A thread that waits for a result takes the turn and polls the link itself. The
    background thread receives without the turn, while no thread has it. It may wake up
    once, and receive, beside a thread that has taken the turn meanwhile; then it sleeps
    until it is needed: by a second open call, a callback, or a check whether a call is
    done. A client that makes one call at a time and waits for it never needs it. Any
    other message is received when the background thread sends its next heartbeat.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._interrupt = Wakeup()
        self.control = Wakeup()  # Wakes the background thread.
        self._wanted = True  # Whether the background thread should listen.
        self._asleep = False  # Whether it sleeps, or is about to.
        self._lock = threading.Lock()  # Guards changes of the link and its polls.
        self._link: Link | None = None
        self.watch(None)

    def watch(self, link: Link | None) -> None:
        """Receives from a link, or from none, instead of the previous one.

        Any thread but the background thread has to set `control` afterwards.
        """
        with self._lock:
            self._link = link
            self._wait_for(POLLIN)

    def blocked(self, link: Link, blocked: bool) -> None:
        """Starts or stops waiting for room in a link's socket."""
        with self._lock:
            if link is self._link:
                self._wait_for(POLLIN | POLLOUT if blocked else POLLIN)
        self._wanted = True
        self.control.set()

    def _wait_for(self, events: int) -> None:
        link = self._link
        # One poll for the thread with the turn, one for the background thread while it
        # listens, and one for the background thread while it sleeps.
        turns, listen, sleep = poll(), poll(), poll()
        turns.register(self._interrupt.fileno(), POLLIN)
        listen.register(self.control.fileno(), POLLIN)
        sleep.register(self.control.fileno(), POLLIN)
        for descriptor in link.descriptors if link else ():
            turns.register(descriptor, events)
            listen.register(descriptor, events)
        if link and link.events_descriptor >= 0:
            listen.register(link.events_descriptor, POLLIN)
            sleep.register(link.events_descriptor, POLLIN)
        self._turns, self._listen, self._sleep = turns, listen, sleep
        self.interrupt()

    def serve(
        self, future: Future, timeout: float | None, handle: Callable[[list], None]
    ) -> bool:
        """Receives until a future is done or time is up; False if the turn is taken.

        Afterwards it may be that no thread listens until `attend` or `serve` is called.

        Args:
          future: what the calling thread waits for.
          timeout: for how many seconds; None for no limit.
          handle: called with the (descriptor, events) pairs that are ready.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            self._wanted = False
            deadline = None if timeout is None else time.monotonic() + timeout
            milliseconds = None
            while future.state == PENDING:
                if deadline is not None:
                    milliseconds = (deadline - time.monotonic()) * 1000
                    if milliseconds <= 0:
                        break
                handle(self._turns.poll(milliseconds))
        finally:
            self._turn.release()
        return True

    def attend(self) -> None:
        """Makes the background thread listen while no thread has the turn."""
        self._wanted = True
        if self._asleep:
            self._asleep = False
            self.control.set()

    @property
    def taken(self) -> bool:
        """True while a thread has the turn."""
        return self._turn.locked()

    def interrupt(self) -> None:
        """Makes the thread that has the turn look at its future again."""
        self._interrupt.set()

    def interrupted(self, descriptor: int) -> None:
        """Clears the interrupt if this is its descriptor."""
        if descriptor == self._interrupt.fileno():
            self._interrupt.clear()

    def background(self, timeout: float) -> list[tuple[int, int]]:
        """Waits as the background thread; returns (descriptor, events) to handle."""
        self._asleep = True  # Before `_wanted` is read, so as not to miss `attend`.
        if self._wanted and not self.taken:
            self._asleep = False
        (self._sleep if self._asleep else self._listen).poll(timeout * 1000)
        self._asleep = False
        self.control.clear()
        return [] if self.taken else self._listen.poll(0)

    def close(self) -> None:
        """Frees the descriptors. No thread may wait any more."""
        with self._turn:
            self._asleep = False  # No thread is left to wake.
            self._interrupt.close()
            self.control.close()


class Connection:
    """One client's end of a connection; `Caller` adds the calls and their answers.

    Args:
      addr: HOST:PORT or a port of this machine.
      hello: the introduction of the client; see `sessions.make_hello`.
      keys: of the server and of this client; None for a server without keys.
      link: 'local', 'remote', or 'auto' for the first of them that works.
      autoconn: whether to connect again when a connection is lost.
    """

    def __init__(
        self,
        addr: str | int,
        hello: dict[str, Any],
        keys: auth.Keys | None,
        link: str,
        autoconn: bool,
    ):
        if link not in links.KINDS:
            raise ValueError(
                f"Expected a link among {', '.join(links.KINDS)}, got {link!r}."
            )
        raise_descriptor_limit()
        self.name = name = hello["name"]
        self.addr = auth.connect_address(addr)
        self._keys = keys
        self._kind = link
        self._autoconn = autoconn
        self._hello = hello
        self._codec = wire.Codec()
        self._arena = buffers.Arena()
        self._memory: buffers.Arena | None = None  # While the link can pass it.
        self._max_bytes = self._codec.max_bytes
        self._statistics = Statistics(name, *COUNTS)
        # Guards the state of the connection, and the open calls that `Caller` adds. It
        # is held while sending, so that calls leave in the order of their numbers.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._link: Link | None = None
        self._greeted = False  # Whether HELLO was sent over this connection.
        self._welcome = False  # Whether the server knows this client.
        self._linked = False  # Whether WELCOME came over this connection.
        self._server = ""  # Identity of the last server that sent WELCOME.
        self._failure: Exception | None = None
        self._heartbeat = 2.0
        self._retry_at = 0.0
        self._failed = 0  # Links that this process could not open.
        self._turn = ReceiveTurn()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _answer(self, message: wire.Message) -> None:
        """Completes the call that a message answers."""
        raise NotImplementedError

    def _send_open_calls(self, restarted: bool) -> list[Future]:
        """Sends the calls that have no answer. The caller holds the lock.

        Args:
          restarted: whether the server is not the previous one. Calls that may have
            reached the previous one are not sent again, but removed and returned.
        """
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        """Ends all open calls, and every later one, with an error."""
        raise NotImplementedError

    # Any thread that receives.

    def _receive(self, ready: list[tuple[int, int]]) -> None:
        """Handles what arrived at the descriptors that are ready."""
        link = self._link
        for descriptor, events in ready:
            if link is None or descriptor not in link.descriptors:
                self._turn.interrupted(descriptor)
                continue
            if events & POLLOUT and isinstance(link, LocalLink):
                link.flush()
            try:
                for frame in link.receive():
                    self._handle(frame)
            except LinkEnded:
                self._end_link(link)
                return

    def _handle(self, frame: Any) -> None:
        try:
            message = self._codec.decode(frame)
            if message.seq != wire.NO_CALL:
                self._answer(message)
            elif message.kind == wire.WELCOME:
                self._welcomed(message.value())
            elif message.kind == wire.STRANGER:
                self._say_hello()  # The server forgot this client, or was restarted.
            elif message.kind == wire.ERROR:
                error = message.value()
                text = f"{self.name}: {error['message']}"
                self._fail(RemoteError(error["kind"], text))
        except wire.WireError as error:
            log.error("%s: an answer cannot be decoded: %s", self.name, error)

    def _welcomed(self, welcome: dict) -> None:
        with self._changed:
            restarted = self._server not in ("", welcome["server"])
            self._server = welcome["server"]
            self._memory = self._arena if isinstance(self._link, LocalLink) else None
            self._max_bytes = welcome["max_bytes"]
            self._heartbeat = welcome["heartbeat"]
            self._welcome = self._linked = True
            failed = self._send_open_calls(restarted)
            self._changed.notify_all()
        for call in failed:
            call.abandon(
                Disconnected(
                    f"{self.name}: the server at {self.addr} was restarted. Whether "
                    "the call was applied before is not known."
                )
            )
        if failed:
            self._turn.interrupt()

    def _say_hello(self) -> None:
        with self._lock:
            self._welcome = False
            if self._link is not None:
                self._link.send(self._codec.control(wire.HELLO, self._hello))
                self._greeted = True
            self._turn.attend()

    def _end_link(self, link: Link) -> None:
        """Gives up a link that has ended; the background thread opens another."""
        with self._lock:
            if link is not self._link:
                return
            self._link = None
            self._turn.watch(None)
            link.close()
        self._disconnected()
        self._turn.control.set()

    def _disconnected(self) -> None:
        with self._changed:
            self._welcome = self._greeted = False
            self._memory = None
            was_linked, self._linked = self._linked, False
        if was_linked:
            self._statistics.counts["reconnects"] += 1
            if not self._autoconn:
                self._fail(Disconnected(f"{self.name}: {self.addr} is gone."))

    # The background thread.

    def _run(self) -> None:
        try:
            self._keep_connected()
        except Exception as error:
            # Threads that wait would wait for ever: nothing receives any more.
            log.exception("%s: the connection to %s failed.", self.name, self.addr)
            text = f"{self.name}: the connection to {self.addr} failed: {error}"
            self._fail(Disconnected(text))
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()
        self._turn.close()

    def _keep_connected(self) -> None:
        """Opens links, receives and sends heartbeats until the client is closed."""
        next_beat = time.monotonic() + self._heartbeat
        while not self._closing.is_set():
            if self._link is None and time.monotonic() >= self._retry_at:
                self._use(self._try_to_open())
            due = next_beat if self._link else min(next_beat, self._retry_at)
            self._receive(self._turn.background(max(0, due - time.monotonic())))
            self._handle_events()
            if self._turn.taken:
                # A thread took the turn meanwhile, and may wait for what came here.
                self._turn.interrupt()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._heartbeat
                self._tell(wire.HEARTBEAT)
                if self._greeted and not self._welcome:
                    self._say_hello()  # The server may admit it now.
        self._tell(wire.BYE)

    def _tell(self, kind: int) -> None:
        with self._lock:
            if self._welcome and self._link is not None:
                self._link.send(self._codec.control(kind))

    def _try_to_open(self) -> Link | None:
        try:
            return self._open_link()
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise  # The address will not become a valid one.
            self._failed += 1
            if self._failed & (self._failed - 1) == 0:  # The 1st, 2nd, 4th, 8th, ...
                log.warning("%s cannot connect to %s: %s", self.name, self.addr, error)
            return None

    def _open_link(self) -> Link | None:
        """Opens a link; None if there is no server yet."""
        if self._kind != "remote":
            local = self._open_local(look_up=False)
            if local is not None or self._kind == "local":
                return local
        # Imported here, so that clients with a local link do not load this module.
        from embodied.rpc.zmq_links import DealerLink

        return DealerLink(self.addr, self._hello["client"], self._keys)

    def _open_local(self, look_up: bool) -> Link | None:
        link = links.connect_local(
            self.addr, self._keys, self._codec.max_bytes, self._turn.control, look_up
        )
        if link is not None:
            link.on_blocked = self._turn.blocked
        return link

    def _use(self, link: Link | None) -> None:
        """Replaces the link, if there is a new one."""
        # The next attempt is not before then, even if this link ends at once.
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if link is None:
            return
        with self._lock:
            before, self._link = self._link, link
            self._turn.watch(link)
        if before is not None:
            before.close()
        if link.events_descriptor < 0:
            self._say_hello()
        else:
            self._handle_events()

    def _handle_events(self) -> None:
        link = self._link
        for event, reason in link.events() if link is not None else ():
            if event == UP:
                self._connected()
            elif event == DOWN:
                self._disconnected()
            else:
                self._fail(
                    auth.AuthError(
                        f"{self.name}: no connection to {self.addr}: {reason}. Use the "
                        "key file of the run (--run.keyfile FILE) on both sides."
                    )
                )

    def _connected(self) -> None:
        """Says HELLO once ZeroMQ has connected, by the local link if there is one."""
        local = self._open_local(look_up=True) if self._kind == "auto" else None
        if local is not None:
            self._use(local)
        else:
            self._say_hello()
