"""Agreement of the replicas of a run on clocks, the end, saves, and lost replicas.

The first replica answers, in its launching process. Every replica asks, including the
first: its agent asks for agreement, its launching process asks which replicas are gone.
With a single replica nothing is asked.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from embodied.clock import ClockServer
from embodied.rpc import AuthError, Unanswered
from embodied.run.parallel import wiring
from embodied.run.settings import RunSettings

# Exit code of a program that did nothing wrong and continues when it is started again:
# that of sysexits.h for a temporary failure, which launchers of jobs know.
EXIT_START_AGAIN = os.EX_TEMPFAIL  # 75
BEAT_SECONDS = 1.0  # Between signs of life of a replica.
WAIT_SECONDS = 1800.0  # For the slowest replica, which may still be compiling.

logger = logging.getLogger("embodied.run")


class ReplicaLost(RuntimeError):
    """Another replica is gone or has failed; all of them have to be started again."""


class ReplicaServer(ClockServer):
    """Answers all replicas. `_changed` guards the state below it.

    Args:
      addr: where to listen.
      replicas: number of replicas.
      silence: seconds after its last sign of life at which a replica counts as gone.
      **kwargs: passed to rpc.Server.
    """

    def __init__(
        self, addr: str, replicas: int, silence: float = WAIT_SECONDS, **kwargs: Any
    ):
        super().__init__(addr, replicas, **kwargs)
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._ends: dict[int, tuple[bool, int]] = {}  # Decision, times asked.
        self._given: dict[str, dict[int, str]] = {}
        self._taken: dict[str, int] = {}
        self._silence = silence
        self._heard: dict[int, float] = {}  # Last sign of life of each replica.
        self._loss: tuple[int, str] | None = None  # First replica lost, and why.
        self._ending = False
        self._told: set[int] = set()  # Replicas that know of the loss or the end.
        self._server.bind("over", self._over)
        self._server.bind("beat", self._beat, workers=1)
        self._server.bind("gather", self._gather, workers=replicas)

    def __exit__(self, *error: object) -> None:
        with self._changed:  # Ends waits, so that the server can close.
            self._closed = True
            self._changed.notify_all()
        super().__exit__(*error)

    def tell_end(self, failure: str = "") -> None:
        """Tells the replicas that are not gone that the first one ends.

        Waits a few beats for them to ask.

        Args:
          failure: the reason if the first one fails; empty otherwise.
        """
        with self._changed:
            self._ending = not failure
            if failure and self._loss is None:
                self._loss = (0, f"has failed: {failure}")
            self._changed.wait_for(
                lambda: self._told >= self._heard.keys() - {0}, 3 * BEAT_SECONDS
            )

    def _beat(self, replica: int, leaves: bool, failure: str) -> dict[str, Any]:
        """Records a sign of life; returns what a replica has to know of the others.

        Args:
          replica: the one that gives it.
          leaves: whether this is its last sign of life, at the end of the run.
          failure: why this replica fails, or empty.
        """
        with self._changed:
            now = self._time()
            self._heard[int(replica)] = now
            if leaves:
                del self._heard[int(replica)]
            ages = {index: now - heard for index, heard in self._heard.items()}
            if failure and self._loss is None:
                self._loss = (int(replica), f"has failed: {failure}")
            silent = [index for index, age in ages.items() if age > self._silence]
            if silent and self._loss is None:
                reason = f"is gone: nothing was heard of it for {self._silence:g} s."
                self._loss = (min(silent), reason)
            for index in silent:
                del self._heard[index]
            if self._loss or self._ending:
                self._told.add(int(replica))
                self._changed.notify_all()
            return {
                "loss": list(self._loss) if self._loss else [],
                "ending": self._ending,
                "age": max(ages.values(), default=0.0),
            }

    def _over(self, call: int, ended: bool) -> bool:
        """Returns whether the run ends with this call number, the same for all."""
        with self._changed:
            self._ended |= bool(ended)
            answer, asked = self._ends.pop(int(call), (self._ended, 0))
            if asked + 1 < self._replicas:
                self._ends[int(call)] = (answer, asked + 1)
            return answer

    def _gather(self, name: str, replica: int, value: str) -> list[str]:
        """Returns the values of all replicas under a name, once all have given one."""
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
        """Waits until all replicas are there; returns False if it gave up.

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

        The answer was requested by the previous call, so that this one need not wait
        for the network; so the end may come one call late.

        Args:
          ended: whether this replica wants the run to end.
        """
        if self.alone:
            return ended
        asked, self._next = self._next, self.client.over(self._calls, ended)
        self._calls += 1
        return bool(asked.result(WAIT_SECONDS)) if asked is not None else False

    def gather(self, name: str, value: str) -> list[str]:
        """Returns the values of all replicas under a unique name. Any thread."""
        if self.alone:
            return [value]
        values = self.client.gather(name, self.replica, value).result(WAIT_SECONDS)
        return [str(value) for value in values]


class ReplicaWatch:
    """Detects lost replicas. A thread of its own, in the launching process.

    It does not depend on the agent, which may hang in a collective operation or be
    aborted by JAX when another replica is gone. `_changed` guards the state.

    Args:
      replica: index of this one.
      count: of all.
      client: connection to the first one.
      silence: seconds without an answer after which the first one counts as gone.
      on_lost: called once when another replica is gone or has failed.

    Raises:
      ReplicaLost: at the end of the block, if that was the case.
    """

    def __init__(
        self,
        replica: int,
        count: int,
        client: Any,
        silence: float,
        on_lost: Callable[[], None],
    ):
        self.lost: ReplicaLost | None = None
        self._replica = replica
        self._count = count
        self._client = client
        self._silence = silence
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._left = threading.Event()
        self._watching = False  # From the first answer to the end of the thread.
        self._all_heard = 0.0  # All replicas were heard from since this time.
        self._failure = ""
        self._failure_told = False
        self._thread = threading.Thread(
            target=self._run, name="replica watch", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        watching = self._watching
        self._left.set()
        self._thread.join()
        if self.lost is not None and (error is None or isinstance(error, Exception)):
            raise self.lost from error
        if error is None and watching:
            with contextlib.suppress(Exception):  # The first one may have left before.
                self._client.beat(self._replica, True, "").wait(BEAT_SECONDS)

    def report(self, failure: str) -> None:
        """Tells the others that this replica fails, unless another one did before.

        The failure may be a consequence: the loss of another replica can end an update
        at once, but is certain only when nothing was heard from it for a while. So this
        first waits until all replicas were heard from again, or one is lost.

        Args:
          failure: why this replica fails.
        """
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._watching or self._all_heard > began + 2 * BEAT_SECONDS
                ),
                self._silence + 5 * BEAT_SECONDS,
            )
            self._failure = failure
            self._changed.wait_for(
                lambda: not self._watching or self._failure_told, 3 * BEAT_SECONDS
            )

    def _run(self) -> None:
        stopped = self._left.is_set
        # What prevents a connection, such as a wrong key, is also found by the agent.
        with contextlib.suppress(AuthError, wiring.RoleError):
            if wiring.connect(
                self._client, "The launcher", "first replica", stopped, quiet=True
            ):
                self._set_watching(True)
                try:
                    self._watch(stopped)
                finally:
                    self._set_watching(False)

    def _set_watching(self, watching: bool) -> None:
        with self._changed:
            self._watching = watching
            self._changed.notify_all()

    def _watch(self, stopped: Callable[[], bool]) -> None:
        """Exchanges signs of life until a replica is lost or the run ends."""
        answered = time.monotonic()
        while self.lost is None:
            failure = self._failure
            answer = self._ask(failure, answered + self._silence)
            if answer is None and not stopped():
                self._lose(0, f"is gone: it did not answer for {self._silence:g} s.")
            if answer is None or (answer["ending"] and not answer["loss"]):
                return
            answered = time.monotonic()
            if answer["loss"] and answer["loss"][0] != self._replica:
                self._lose(*answer["loss"])
            with self._changed:
                self._all_heard = answered - answer["age"]
                self._failure_told = bool(failure)
                self._changed.notify_all()
            if self._left.wait(BEAT_SECONDS):
                return

    def _ask(self, failure: str, deadline: float) -> dict[str, Any] | None:
        """Gives a sign of life; returns None without an answer in time, or at the end.

        Tries again if the connection breaks meanwhile.
        """
        while time.monotonic() < deadline and not self._left.is_set():
            future = self._client.beat(self._replica, False, failure)
            while time.monotonic() < deadline and not future.wait(BEAT_SECONDS):
                if self._left.is_set():
                    return None
            if future.done() and future.exception(0) is None:
                return future.result(0)
            self._left.wait(BEAT_SECONDS)
        return None

    def _lose(self, replica: int, reason: str) -> None:
        with self._changed:
            self.lost = ReplicaLost(
                f"Replica {replica} of {self._count} {reason} Replicas train together, "
                f"so replica {self._replica} ends, too, with exit code "
                f"{EXIT_START_AGAIN}: start all of them again, and they go on from the "
                "newest checkpoint."
            )
            self._changed.notify_all()
        self._on_lost()


@contextlib.contextmanager
def watch_replicas(
    settings: RunSettings, on_lost: Callable[[], None]
) -> Iterator[Callable[[str], None]]:
    """Serves the replicas of a run, if this is the first one, and watches the others.

    For the launching process of a replica.

    Args:
      settings: of the run.
      on_lost: called once when another replica is gone; must end the block.

    Yields:
      A function to call with the reason if this replica fails.

    Raises:
      ReplicaLost: at the end of the block, if another replica is gone or has failed.
      RoleError: the address of the first replica is not known.
    """
    if settings.replicas <= 1:
        yield lambda failure: None
        return
    with (
        serve_replicas(settings),
        _client(settings, "watch") as client,
        ReplicaWatch(
            *(settings.replica, settings.replicas, client),
            *(settings.replica_timeout, on_lost),
        ) as watch,
    ):
        yield watch.report


@contextlib.contextmanager
def serve_replicas(settings: RunSettings) -> Iterator[None]:
    """Answers the replicas of a run if this is the first of several.

    Raises:
      RoleError: its address is not known.
    """
    if settings.replicas <= 1 or settings.replica != 0:
        yield
        return
    server = ReplicaServer(
        _address(settings),
        settings.replicas,
        settings.replica_timeout,
        **wiring.security(settings, "zmq"),
    )
    with server:
        try:
            yield
        except Exception as error:
            server.tell_end(f"{error}")
            raise
        server.tell_end()


@contextlib.contextmanager
def join_replicas(settings: RunSettings) -> Iterator[Replicas]:
    """Connects an agent with the first replica; `Replicas.meet` waits for all.

    Raises:
      RoleError: the address of the first replica is not known.
    """
    if settings.replicas <= 1:
        yield Replicas()
        return
    with _client(settings, "agent") as client:
        yield Replicas(settings.replica, settings.replicas, client)


def _client(settings: RunSettings, who: str) -> Any:
    name = f"replica-{settings.replica}-{who}"
    return wiring.make_client(_address(settings), name, settings, kind="zmq")


def _address(settings: RunSettings) -> str:
    if not settings.clock_port:
        raise wiring.RoleError(
            f"clock_port: expected the port at which replica 0 of {settings.replicas} "
            "listens, got nothing. Pass --clock_port PORT, and --clock_addr HOST of "
            "replica 0, the same to every replica."
        )
    return f"{settings.clock_addr or wiring.LOCAL_HOST}:{settings.clock_port}"
