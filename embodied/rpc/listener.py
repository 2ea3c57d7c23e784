"""Which of a client's threads listens to its server. The client's process.

A thread that waits for a result takes the turn and polls the sockets itself; the
background thread then stays asleep. On Linux the switch is one change of an epoll
set, which wakes nobody. Elsewhere both wake up, and one finds nothing.

The change takes microseconds. So the background thread stays off until somebody needs
it: a call beside another, a callback, a look at whether a call is done. One call at a
time, waited for, needs it never. What else arrives, it finds when it sends its next
heartbeat.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Any

from embodied.rpc.future import PENDING, Future
from embodied.rpc.sockets import Poller, Wakeup


class Listener:
    """Hands the turn to listen to one thread at a time.

    Args:
      socket: descriptor of the ZeroMQ socket.
      swallowed: set when a sender took the socket's signal of an arrival.
      monitor: descriptor of connection events, always the background thread's.
    """

    def __init__(self, socket: int, swallowed: Wakeup, monitor: int):
        self._swallowed = swallowed
        self._turn = threading.Lock()
        self._interrupt = Wakeup()
        self._control = Wakeup()
        self._arrivals = Poller(socket, swallowed.fileno(), self._interrupt.fileno())
        self._switch: Any = None
        self._attends = True  # Whether the background thread listens to arrivals.
        self._switching = threading.Lock()
        if hasattr(select, "epoll"):
            self._background = Poller(monitor, self._control.fileno())
            self._inner = self._arrivals.fileno()
            self._background.add(self._inner)
            self._switch = self._background.modify
        else:
            everything = (socket, swallowed.fileno(), monitor, self._control.fileno())
            self._background = Poller(*everything)

    def add(self, descriptor: int) -> None:
        """Listens to another socket too."""
        self._arrivals.add(descriptor)

    def remove(self, descriptor: int) -> None:
        """Listens to it no longer."""
        self._arrivals.remove(descriptor)

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

    def wake(self) -> None:
        """Makes the background thread look around."""
        self._control.set()

    def background(self, timeout: float) -> list[tuple[int, int]]:
        """Waits for what is the background thread's; returns where things arrived."""
        control = self._control.fileno()
        if any(fd == control for fd, _ in self._background.wait(timeout)):
            self._control.clear()
        return [] if self.taken else self._arrivals.wait(0)

    def close(self) -> None:
        """Frees the descriptors. No thread may wait any more."""
        with self._turn, self._switching:
            self._attends = True  # There is nothing to switch any more.
            self._arrivals.close()
            self._background.close()
            self._interrupt.close()
            self._control.close()
            self._swallowed.close()
