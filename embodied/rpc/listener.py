"""Which of a client's threads listens to its server. The client's process.

A thread that waits for a result takes the turn and polls the sockets itself; the
background thread then stays asleep. On Linux the switch is one change of an epoll
set, which wakes nobody. Elsewhere both wake up, and one finds nothing.
"""

from __future__ import annotations

import select
import threading
import time
from typing import Any

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
        self._arrivals: Any = None
        own = (monitor, self._control.fileno())
        if hasattr(select, "epoll"):
            self._arrivals = select.epoll()
            self.add(socket)
            self.add(swallowed.fileno())
            arrivals = self._arrivals.fileno()
            self._foreground = Poller(arrivals, self._interrupt.fileno())
            self._background: Any = select.epoll()
            for descriptor in (*own, arrivals):
                self._background.register(descriptor, select.EPOLLIN)
        else:
            both = (socket, swallowed.fileno())
            self._foreground = Poller(*both, self._interrupt.fileno())
            self._background = Poller(*both, *own)

    def add(self, descriptor: int) -> None:
        """Listens to another socket too. Linux only, like what needs it."""
        self._arrivals.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        """Listens to it no longer."""
        self._arrivals.unregister(descriptor)

    def take(self) -> bool:
        """Takes the turn if it is free."""
        if not self._turn.acquire(blocking=False):
            return False
        if self._arrivals:
            self._background.modify(self._arrivals.fileno(), 0)
        return True

    def release(self) -> None:
        """Gives the turn back; the background thread listens again."""
        if self._arrivals:
            self._background.modify(self._arrivals.fileno(), select.EPOLLIN)
        self._turn.release()

    @property
    def taken(self) -> bool:
        """Whether a thread has the turn."""
        return self._turn.locked()

    def wait(self, deadline: float | None) -> bool:
        """Waits for something to receive; False when the deadline has passed.

        For the thread that has the turn.
        """
        timeout = None
        if deadline is not None:
            timeout = deadline - time.monotonic()
            if timeout <= 0:
                return False
        if self._interrupt.fileno() in self._foreground.wait(timeout):
            self._interrupt.clear()
        return True

    def interrupt(self) -> None:
        """Makes the thread that has the turn look at its future again."""
        self._interrupt.set()

    def wake(self) -> None:
        """Makes the background thread look around."""
        self._control.set()

    def background(self, timeout: float) -> None:
        """Waits for what is the background thread's."""
        if self._arrivals:
            ready = [descriptor for descriptor, _ in self._background.poll(timeout)]
        else:
            ready = self._background.wait(timeout)
        if self._control.fileno() in ready:
            self._control.clear()

    def close(self) -> None:
        """Frees the descriptors. No thread may wait any more."""
        with self._turn:
            if self._arrivals:
                self._arrivals.close()
            self._background.close()
            self._foreground.close()
            self._interrupt.close()
            self._control.close()
            self._swallowed.close()
