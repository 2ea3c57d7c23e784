"""Clocks that say when an interval has passed. Any process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class LocalClock:
    """Tells at each call whether an interval has passed since it last returned True.

        should_log = LocalClock(120)
        while True:
          ...
          if should_log():
            logger.write()

    A late call ends one interval only, and the next interval starts at that call. A
    clock belongs to the thread that calls it.

    Args:
      every: seconds; 0 means never, a negative number at every call.
      first: result of the first call, which starts the clock. Ignored unless `every`
        is positive.
      time: returns seconds that never go backwards.
    """

    def __init__(
        self,
        every: float,
        first: bool = False,
        time: Callable[[], float] = time.monotonic,
    ):
        if every != every:
            raise ValueError(f"LocalClock expected a number of seconds, got {every}.")
        self._every = every
        self._first = first
        self._time = time
        self._start: float | None = None

    def __call__(self) -> bool:
        """Returns whether the interval has passed, and if so starts the next one."""
        if self._every <= 0:
            return self._every < 0
        now = self._time()
        if self._start is None:
            self._start = now
            return self._first
        if now - self._start < self._every:
            return False
        self._start = now
        return True

    def due(self) -> bool:
        """Returns whether a call would start an interval, without doing so.

        Clocks whose `every` is not positive have no intervals and are never due.
        """
        if self._every <= 0:
            return False
        return self._start is None or self._time() - self._start >= self._every


class GlobalClock:
    """A clock that gives all replicas of a run the same answer at every call.

        with ClockServer('host:1234', replicas=2):     # In one replica.
          ...
        client = rpc.Client('host:1234')               # In every replica.
        should_save = GlobalClock(900, client=client, name='save')

    Replicas must call it equally often. Each call requests the answer to the next
    one ahead of time, so that it does not wait for the network; an answer is then as
    old as the time between two calls. A clock belongs to the thread that calls it.

    Args:
      every: as in LocalClock.
      first: as in LocalClock.
      client: connection to the ClockServer; None if there is only one replica, where
        this behaves as a LocalClock.
      name: identifies the clock among those of a replica.
      timeout: seconds to wait for an answer of the server before raising an error.
    """

    def __init__(
        self,
        every: float,
        first: bool = False,
        client: Any = None,
        name: str = "clock",
        timeout: float = 600.0,
    ):
        self._local = LocalClock(every, first)
        self._arguments = (name, float(every), bool(first))
        # Without an interval, answers are constant and replicas agree on them anyway.
        self._client: Any = client if every > 0 else None
        self._timeout = timeout
        self._calls = 0
        self._next: Any = None

    def __call__(self) -> bool:
        """Returns whether the interval has passed, the same in all replicas."""
        if self._client is None:
            return self._local()
        decision = self._next or self._ask()
        answer = decision.result(self._timeout)
        self._next = self._ask()
        return answer

    def _ask(self) -> Any:
        self._calls += 1
        return self._client.decide(self._calls - 1, *self._arguments)


class ClockServer:
    """Answers the GlobalClocks of all replicas; runs in one of them.

    The time at which the first replica asks about a call decides its answer, which is
    kept until all replicas have asked. A context manager.

    Args:
      addr: where to listen, as for rpc.Server.
      replicas: number of replicas.
      time: returns seconds that never go backwards.
      **kwargs: passed to rpc.Server, such as `keys`.
    """

    MAX_OPEN_DECISIONS = 100_000  # Decisions that may wait for a slower replica.

    def __init__(
        self,
        addr: str | int,
        replicas: int,
        time: Callable[[], float] = time.monotonic,
        **kwargs: Any,
    ):
        # Not at the top: a process without replicas does not load the transport.
        from embodied.rpc import Server

        if replicas < 1:
            raise ValueError(f"ClockServer expected replicas >= 1, got {replicas}.")
        self._replicas = replicas
        self._time = time
        self._clocks: dict[str, LocalClock] = {}
        self._decisions: dict[tuple[str, int], tuple[bool, int]] = {}
        self._server = Server(addr, "ClockServer", **kwargs)
        # The server has a single worker, so the tables need no lock.
        self._server.bind("decide", self._decide)

    def __enter__(self) -> ClockServer:
        self._server.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def _decide(self, call: int, name: str, every: float, first: bool) -> bool:
        answer, asked = self._decisions.get((name, call), (None, 0))
        if answer is None:
            if name not in self._clocks:
                self._clocks[name] = LocalClock(every, first, self._time)
            if len(self._decisions) >= self.MAX_OPEN_DECISIONS:
                raise RuntimeError(
                    f"A replica is {self.MAX_OPEN_DECISIONS} calls behind the others "
                    f"of {self._replicas}: it has stopped, or calls clock '{name}' "
                    "less often than they do."
                )
            answer = self._clocks[name]()
        if asked + 1 < self._replicas:
            self._decisions[name, call] = (answer, asked + 1)
        else:
            self._decisions.pop((name, call), None)
        return answer
