"""A client's connection: how it is made, kept alive and made again. Any process.

A background thread chooses the link, receives while nobody waits, sends signs of life,
and says HELLO again after a reconnect. The local link is tried first. Where there is
none, ZeroMQ waits for the server; once that is there, the local link is tried again,
since the server of this host may have started meanwhile.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from embodied.rpc import auth, buffers, links, wire
from embodied.rpc.calls import PENDING, Future, RemoteError, Statistics
from embodied.rpc.links import DOWN, UP, Link, LinkEnded, LocalLink
from embodied.rpc.threads import Poller, Wakeup

RETRY_SECONDS = 0.2  # Until a local link is tried again, if there may be no other.

log = logging.getLogger("embodied.rpc")


class ReceiveTurn:
    """Hands the turn to receive to one thread of a client at a time.

    A thread that waits for a result takes the turn and polls the link itself; the
    background thread then stays asleep. On Linux the switch is one change of an epoll
    set, which wakes nobody. Elsewhere both wake up, and one finds nothing.

    The change takes microseconds. So the background thread stays off until somebody
    needs it: a call beside another, a callback, a look at whether a call is done. One
    call at a time, waited for, needs it never. What else arrives, it finds when it
    sends its next heartbeat.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._interrupt = Wakeup()
        self.control = Wakeup()  # Makes the background thread look around.
        self._arrivals = Poller()
        self._arrivals.add(self._interrupt.fileno())
        self._background = Poller()
        self._background.add(self.control.fileno())
        self._switch: Any = None
        self._attends = True  # Whether the background thread listens to arrivals.
        self._switching = threading.Lock()
        if hasattr(select, "epoll"):
            self._inner = self._arrivals.fileno()
            self._background.add(self._inner)
            self._switch = self._background.modify

    def add(self, link: Link) -> None:
        """Receives from a link."""
        for descriptor in link.descriptors:
            self._arrivals.add(descriptor)
            if not self._switch:
                self._background.add(descriptor)
        if link.events_descriptor >= 0:
            self._background.add(link.events_descriptor)
        self.interrupt()  # Elsewhere than on Linux, who waits now does not see it.

    def remove(self, link: Link) -> None:
        """Receives from a link no longer. It must still be open."""
        for descriptor in link.descriptors:
            self._arrivals.remove(descriptor)
            if not self._switch:
                self._background.remove(descriptor)
        if link.events_descriptor >= 0:
            self._background.remove(link.events_descriptor)

    def blocked(self, link: LocalLink, blocked: bool) -> None:
        """Waits, or does not wait any more, for room in a link's socket."""
        events = select.POLLIN | (select.POLLOUT if blocked else 0)
        try:
            self._arrivals.modify(link.fileno, events)
        except OSError:
            return  # It was closed meanwhile.
        if blocked:
            self.attend()

    def serve(
        self, future: Future, timeout: float | None, handle: Callable[[list], None]
    ) -> bool:
        """Receives until a future is done or time is over; False if another does.

        Args:
          future: what the calling thread waits for.
          timeout: for how many seconds.
          handle: called with the descriptors at which something arrived.

        Afterwards nobody listens until `attend` is called, or the next who waits.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            deadline = None if timeout is None else time.monotonic() + timeout
            while future.state == PENDING:
                if self._attends:
                    self._rest()
                if deadline is not None:
                    timeout = deadline - time.monotonic()
                    if timeout <= 0:
                        break
                handle(self._arrivals.wait(timeout))
        finally:
            self._turn.release()
        return True

    def attend(self) -> None:
        """Lets the background thread listen, unless another has the turn."""
        if self._attends:
            return
        with self._switching:
            if not self._attends and not self._turn.locked():
                self._switch(self._inner, select.POLLIN)
                self._attends = True

    def _rest(self) -> None:
        """Lets the background thread sleep, whatever arrives."""
        if self._switch:
            with self._switching:
                self._switch(self._inner, 0)
                self._attends = False

    @property
    def taken(self) -> bool:
        """Whether a thread has the turn."""
        return self._turn.locked()

    def interrupt(self) -> None:
        """Makes the thread that has the turn look at its future again."""
        self._interrupt.set()

    def interrupted(self, descriptor: int) -> None:
        """Takes an interrupt back, if it is what a descriptor stands for."""
        if descriptor == self._interrupt.fileno():
            self._interrupt.clear()

    def background(self, timeout: float) -> list[tuple[int, int]]:
        """Waits for what is the background thread's; returns where things arrived."""
        control = self.control.fileno()
        if any(fd == control for fd, _ in self._background.wait(timeout)):
            self.control.clear()
        return [] if self.taken else self._arrivals.wait(0)

    def close(self) -> None:
        """Frees the descriptors. No thread may wait any more."""
        with self._turn, self._switching:
            self._attends = True  # There is nothing to switch any more.
            self._arrivals.close()
            self._background.close()
            self._interrupt.close()
            self.control.close()


class Connection:
    """One client's end of a connection. `Client` adds what is done with answers.

    Args:
      addr: HOST:PORT or a port of this machine.
      hello: the introduction of the client; see `sessions.make_hello`.
      keys: of the server and of this client; None for a server without keys.
      link: 'local', 'remote', or 'auto' for the first of them that works.
    """

    def __init__(
        self,
        addr: str | int,
        hello: dict[str, Any],
        keys: auth.Keys | None,
        link: str,
    ):
        if link not in links.KINDS:
            raise ValueError(
                f"Expected a link among {', '.join(links.KINDS)}, got {link!r}."
            )
        self.name = name = hello["name"]
        self.addr = auth.connect_address(addr)
        self._keys = keys
        self._kind = link
        self._hello = hello
        self._codec = wire.Codec()
        self._arena = buffers.Arena()
        self._memory: buffers.Arena | None = None  # While the link can pass it.
        self._max_bytes = self._codec.max_bytes
        self._statistics = Statistics(name)
        # Guards the state of the connection, and what the client adds. Sending is
        # done under it too, so that calls leave in the order of their numbers.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._link: Link | None = None
        self._welcome = False  # Whether the server knows us.
        self._linked = False  # Whether it did since the connection was made.
        self._server = ""  # Identity of the one that welcomed us last.
        self._failure: Exception | None = None
        self._heartbeat = 2.0
        self._retry_at = 0.0
        self._turn = ReceiveTurn()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _answer(self, seq: int, kind: int, flags: int, reply: wire.Payload) -> None:
        """Takes in the answer to a call: its number, kind, flags and contents."""
        raise NotImplementedError

    def _send_open_calls(self, restarted: bool) -> list[Future]:
        """Sends the calls that have no answer. Holds the lock.

        Args:
          restarted: whether the server is another one than before. Calls that were
            sent to that one are not sent; they are returned.
        """
        raise NotImplementedError

    def _lost(self) -> None:
        """Called when a connection that was there is gone."""
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        """Ends all open calls, and every later one, with an error."""
        raise NotImplementedError

    def _restarted(self) -> Exception:
        """The error of calls that were sent to a server that is gone."""
        raise NotImplementedError

    # Any thread that receives.

    def _receive(self, ready: list[tuple[int, int]]) -> None:
        """Handles what arrived at the descriptors that are ready."""
        link = self._link
        for descriptor, events in ready:
            if link is None or descriptor not in link.descriptors:
                self._turn.interrupted(descriptor)
                continue
            if events & select.POLLOUT and isinstance(link, LocalLink):
                link.flush()
            try:
                for frame in link.receive():
                    known = self._codec.decode_known(frame)
                    if known is not None:
                        self._answer(*known)
                    else:
                        self._decode(frame)
            except LinkEnded:
                self._end_link(link)
                return

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
            restarted = self._server not in ("", welcome["server"])
            self._server = welcome["server"]
            self._memory = self._arena if isinstance(self._link, LocalLink) else None
            self._max_bytes = welcome["max_bytes"]
            self._heartbeat = welcome["heartbeat"]
            self._welcome = self._linked = True
            failed = self._send_open_calls(restarted)
            self._changed.notify_all()
        for call in failed:
            call.set_error(self._restarted())
        if failed:
            self._turn.interrupt()

    def _say_hello(self) -> None:
        with self._lock:
            self._welcome = False
            if self._link is not None:
                self._link.send(self._codec.control(wire.HELLO, self._hello))
            self._turn.attend()

    def _end_link(self, link: Link) -> None:
        """Gives up a link that has ended; the background thread opens another."""
        with self._lock:
            if link is not self._link:
                return
            self._link = None
            self._turn.remove(link)
            link.close()
        self._disconnected()
        self._turn.control.set()

    def _disconnected(self) -> None:
        with self._changed:
            self._welcome = False
            self._memory = None
            was_linked, self._linked = self._linked, False
            if not was_linked:
                return
            self._statistics.counts.reconnects += 1
        self._lost()

    # The background thread.

    def _run(self) -> None:
        next_beat = time.monotonic() + self._heartbeat
        while not self._closing.is_set():
            if self._link is None and time.monotonic() >= self._retry_at:
                self._use(self._open_link())
            due = next_beat if self._link else min(next_beat, self._retry_at)
            self._receive(self._turn.background(max(0, due - time.monotonic())))
            self._handle_events()
            if self._turn.taken:
                # It took the turn meanwhile, and may wait for what came here.
                self._turn.interrupt()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._heartbeat
                self._tell(wire.HEARTBEAT)
        self._tell(wire.BYE)
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            self._turn.remove(link)
            link.close()
        self._turn.close()

    def _tell(self, kind: int) -> None:
        with self._lock:
            if self._welcome and self._link is not None:
                self._link.send(self._codec.control(kind))

    def _open_link(self) -> Link | None:
        """Opens a link; None if there is nobody yet."""
        if self._kind != "remote":
            local = self._open_local(look_up=False)
            if local is not None or self._kind == "local":
                return local
        # Not at the top: clients that need no ZeroMQ do not load it.
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
        """Takes a link in place of the one before."""
        if link is None:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return
        with self._lock:
            before, self._link = self._link, link
            if before is not None:
                self._turn.remove(before)
            self._turn.add(link)
        if before is not None:
            before.close()
        self._handle_events()

    def _handle_events(self) -> None:
        link = self._link
        if link is None:
            return
        for event, reason in link.events():
            if event == UP:
                self._connected(link)
            elif event == DOWN:
                self._disconnected()
            else:
                self._refused(reason)

    def _connected(self, link: Link) -> None:
        if self._kind == "auto" and not isinstance(link, LocalLink):
            local = self._open_local(look_up=True)
            if local is not None:
                self._use(local)
                return
        self._say_hello()

    def _refused(self, reason: str) -> None:
        self._fail(
            auth.AuthError(
                f"{self.name}: no connection to {self.addr}: {reason}. Use the key "
                "file of the run (--run.keyfile FILE) on both sides."
            )
        )
