"""Agreement between the hosts of one run: clocks, the end, saves. Agent process.

The first replica answers; every replica, the first included, asks. With one replica
nobody is asked.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from embodied.clock import ClockServer
from embodied.rpc import Unanswered
from embodied.run.parallel import wiring
from embodied.run.settings import RunSettings

WAIT_SECONDS = 1800.0  # For the slowest replica, which may still be compiling.

logger = logging.getLogger("embodied.run")


class ReplicaServer(ClockServer):
    """Answers all replicas. `_changed` guards the state below it.

    Args:
      addr: where to listen.
      replicas: how many ask.
      **kwargs: passed to rpc.Server.
    """

    def __init__(self, addr: str, replicas: int, **kwargs: Any):
        super().__init__(addr, replicas, **kwargs)
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._ends: dict[int, tuple[bool, int]] = {}  # Decision, and who has asked.
        self._given: dict[str, dict[int, str]] = {}
        self._taken: dict[str, int] = {}
        self._server.bind("over", self._over)
        self._server.bind("gather", self._gather, workers=replicas)

    def __exit__(self, *error: object) -> None:
        with self._changed:  # Ends waits, so that the server can close.
            self._closed = True
            self._changed.notify_all()
        super().__exit__(*error)

    def _over(self, call: int, ended: bool) -> bool:
        """Returns whether the run ends with a replica's call of that number."""
        with self._changed:
            self._ended |= bool(ended)
            answer, asked = self._ends.pop(int(call), (self._ended, 0))
            if asked + 1 < self._replicas:
                self._ends[int(call)] = (answer, asked + 1)
            return answer

    def _gather(self, name: str, replica: int, value: str) -> list[str]:
        """Returns what all replicas have given under a name, once they have."""
        with self._changed:
            self._given.setdefault(name, {})[int(replica)] = str(value)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or len(self._given[name]) == self._replicas,
                WAIT_SECONDS,
            )
            missing = set(range(self._replicas)) - self._given[name].keys()
            if missing and self._closed:
                raise Unanswered("The first replica is closing.")
            if missing:
                raise TimeoutError(
                    f"Replicas {sorted(missing)} of {self._replicas} gave no {name!r} "
                    f"within {WAIT_SECONDS:.0f} s."
                )
            values = [self._given[name][index] for index in range(self._replicas)]
            self._taken[name] = self._taken.get(name, 0) + 1
            if self._taken[name] == self._replicas:
                del self._given[name], self._taken[name]
            return values


class Replicas:
    """One replica's view of all of them. Belongs to the learner, except `gather`.

    Args:
      replica: index of this one.
      count: of all.
      client: connection to the first one; None if there is only one.
    """

    def __init__(self, replica: int = 0, count: int = 1, client: Any = None):
        self.replica = replica
        self.count = count
        self.client = client
        self._calls = 0
        self._next: Any = None

    @property
    def alone(self) -> bool:
        """Whether this is the only one."""
        return self.client is None

    @property
    def first(self) -> bool:
        """Whether this is the one that commits checkpoints."""
        return self.replica == 0

    def meet(self, stopped: Callable[[], bool]) -> bool:
        """Waits until all are there; False if that was given up.

        Args:
          stopped: whether to give up.
        """
        if self.alone:
            return True
        if not wiring.connect(self.client, "The learner", "first replica", stopped):
            return False
        asked = self.client.gather("meet", self.replica, "")
        note = f"Replica {self.replica} waits for the others of {self.count}."
        tell = functools.partial(logger.info, note)
        if not wiring.wait_until(asked.wait, tell, stopped):
            return False
        asked.result(0)
        return True

    def over(self, ended: bool) -> bool:
        """Returns whether the run ends now, the same in all replicas.

        The answer was asked for a call ago, so that nobody waits for the network; so
        it may come a call late.

        Args:
          ended: whether this one wants it to.
        """
        if self.alone:
            return ended
        asked, self._next = self._next, self.client.over(self._calls, ended)
        self._calls += 1
        return bool(asked.result(WAIT_SECONDS)) if asked is not None else False

    def gather(self, name: str, value: str) -> list[str]:
        """Returns what all replicas give under a name that occurs once. Any thread."""
        if self.alone:
            return [value]
        values = self.client.gather(name, self.replica, value).result(WAIT_SECONDS)
        return [str(value) for value in values]


@contextlib.contextmanager
def join_replicas(settings: RunSettings) -> Iterator[Replicas]:
    """Makes the connections between replicas; `Replicas.meet` waits for them.

    Raises:
      RoleError: the address of the first replica is not known.
    """
    if settings.replicas <= 1:
        yield Replicas()
        return
    if not settings.clock_port:
        raise wiring.RoleError(
            f"clock_port: expected the port at which replica 0 of {settings.replicas} "
            "listens, got nothing. Pass --clock_port PORT, and --clock_addr HOST of "
            "replica 0, the same to every replica."
        )
    address = f"{settings.clock_addr or wiring.LOCAL_HOST}:{settings.clock_port}"
    with contextlib.ExitStack() as stack:
        if settings.replica == 0:
            stack.enter_context(
                ReplicaServer(
                    address, settings.replicas, **wiring.security(settings, "zmq")
                )
            )
        client = stack.enter_context(
            wiring.make_client(
                address, f"replica-{settings.replica}", settings, kind="zmq"
            )
        )
        yield Replicas(settings.replica, settings.replicas, client)
