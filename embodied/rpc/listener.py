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
        self._arrivals = Poller(socket, swallowed.fileno(), self._interrupt.fileno())
        self._switch: Any = None
        if hasattr(select, "epoll"):
            self._background = Poller(monitor, self._control.fileno())
            self._background.add(self._arrivals.fileno())
            self._switch = self._background.arm
        else:
            everything = (socket, swallowed.fileno(), monitor, self._control.fileno())
            self._background = Poller(*everything)

    def add(self, descriptor: int) -> None:
        """Listens to another socket too."""
        self._arrivals.add(descriptor)

    def remove(self, descriptor: int) -> None:
        """Listens to it no longer."""
        self._arrivals.remove(descriptor)

    def take(self) -> bool:
        """Takes the turn if it is free."""
        if not self._turn.acquire(blocking=False):
            return False
        if self._switch:
            self._switch(self._arrivals.fileno(), False)
        return True

    def release(self) -> None:
        """Gives the turn back; the background thread listens again."""
        if self._switch:
            self._switch(self._arrivals.fileno(), True)
        self._turn.release()

    @property
    def taken(self) -> bool:
        """Whether a thread has the turn."""
        return self._turn.locked()

    def wait(self, deadline: float | None) -> list[int] | None:
        """Waits for arrivals; returns where, or None when the deadline has passed.

        For the thread that has the turn.
        """
        timeout = None
        if deadline is not None:
            timeout = deadline - time.monotonic()
            if timeout <= 0:
                return None
        return self._look(timeout)

    def interrupt(self) -> None:
        """Makes the thread that has the turn look at its future again."""
        self._interrupt.set()

    def wake(self) -> None:
        """Makes the background thread look around."""
        self._control.set()

    def background(self, timeout: float) -> list[int]:
        """Waits for what is the background thread's; returns where things arrived."""
        if self._control.fileno() in self._background.wait(timeout):
            self._control.clear()
        return [] if self.taken else self._look(0)

    def _look(self, timeout: float | None) -> list[int]:
        ready = self._arrivals.wait(timeout)
        if self._interrupt.fileno() in ready:
            self._interrupt.clear()
        return ready

    def close(self) -> None:
        """Frees the descriptors. No thread may wait any more."""
        with self._turn:
            self._arrivals.close()
            self._background.close()
            self._interrupt.close()
            self._control.close()
            self._swallowed.close()
