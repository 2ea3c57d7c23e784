"""The learner: trains the agent on batches from the replay. Agent process, a thread."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from embodied.base import Agent, Array, Stream, Tree
from embodied.checkpoint import CheckpointError
from embodied.clock import GlobalClock
from embodied.rpc import Disconnected
from embodied.run.metrics import Means, Meter
from embodied.run.parallel import wiring
from embodied.run.parallel.bottleneck import UPDATES
from embodied.run.parallel.conductor import Conductor
from embodied.run.parallel.rendezvous import Rendezvous
from embodied.run.parallel.replicas import Replicas, join_replicas, serve_replicas
from embodied.run.parallel.reports import report_role
from embodied.run.parallel.stopping import RunEnd, StopDeadline, note_compiling
from embodied.run.settings import RunSettings
from embodied.run.usage import Usage

AHEAD = 3  # Batches requested in advance, beside those that wait on the device.
INFLIGHT = 8  # Updates of the replay that may be on their way.
END_SECONDS = 60.0  # For the actor to end after the learner.
END_ATTEMPTS = 2  # Of the last save: a role may be restarted during the first.

logger = logging.getLogger("embodied.run")


class Learner:
    """The learner without its connections.

    Args:
      agent: to train.
      batches: from `agent.stream`.
      replay: client of the replay: `update` and, for reports, `sample_batch_…`.
      logger: client of the logger: `add`.
      settings: sizes of batches and reports.
      stream_stats: returns metrics of the stream since the last call.
    """

    def __init__(
        self,
        agent: Agent,
        batches: Iterator[dict[str, Array]],
        replay: Any,
        logger: Any,
        settings: RunSettings,
        stream_stats: Callable[[], dict[str, float]] = dict,
    ):
        self.updates = 0
        self._agent = agent
        self._batches = batches
        self._replay = replay
        self._logger = logger
        self._settings = settings
        self._stream_stats = stream_stats
        self._carry: Tree = agent.init_train(settings.batch_size)
        self._means = Means()
        self._usage = Usage(settings.usage)
        self._rows = settings.batch_size * settings.batch_length
        self._meter = Meter()
        self._results = wiring.PendingCalls(self._not_taken)

    def step(self) -> None:
        """Makes one update; raises StopIteration if there are no more batches."""
        with self._meter.section("learner/wait"):
            batch = next(self._batches)
        if not self.updates:
            self._send({UPDATES: 0})
        with self._meter.section("learner/train"):
            self._carry, outputs, metrics = self._agent.train(self._carry, batch)
        self.updates += 1
        self._meter.count("train", self._rows)
        if self.updates == 1:
            self._begin()
        self._give_back(outputs)
        self._means.add(metrics)

    def flush(self) -> None:
        """Waits for all updates, if the agent makes them in the background."""
        if hasattr(self._agent, "flush"):
            outputs, metrics = self._agent.flush()
            self._give_back(outputs)
            self._means.add(metrics)

    def report(self, source: str, opened: Callable[[RemoteStream], None]) -> None:
        """Sends the agent's report on fresh samples of a source to the logger."""
        settings = self._settings
        count = settings.consec_report * settings.report_batches
        stream = RemoteStream(self._replay, source, ahead=1, count=count)
        opened(stream)
        batches = self._agent.stream(stream)
        carry, means = self._agent.init_report(settings.batch_size), Means()
        try:
            for batch in batches:
                carry, metrics = self._agent.report(carry, batch)
                means.add(metrics)
        finally:
            for part in (stream, batches):
                getattr(part, "close", lambda: None)()
        self._send(wiring.prefixed(source, means.result()))

    def log(self) -> None:
        """Sends metrics since the last call to the logger."""
        idle, rates = self._meter.idle, self._meter.result()
        per_second = rates.pop("fps/train", 0.0)
        if not idle:  # Otherwise every curve would end with zero.
            rates["fps/train"] = per_second
        self._send(
            {
                **wiring.prefixed("train", self._means.result()),
                **rates,
                UPDATES: self.updates,
                "parallel/updates_per_second": per_second / self._rows,
                **self._stream_stats(),
                **wiring.prefixed("client/learner_replay", self._replay.stats()),
                **wiring.prefixed("client/learner_logger", self._logger.stats()),
                **wiring.prefixed("usage/agent", self._usage.result()),
            }
        )

    def _begin(self) -> None:
        """Restarts measurements: the time so far went into filling and compiling."""
        self._meter.result()
        self._stream_stats()
        self._send({UPDATES: self.updates})

    def _give_back(self, outputs: dict[str, Any]) -> None:
        if "replay" in outputs:
            self._results.add(self._replay.update(outputs["replay"]), "replay")

    def _send(self, metrics: dict[str, Any]) -> None:
        self._results.add(self._logger.add(metrics), "logger")

    def _not_taken(self, role: str, error: Exception) -> None:
        logger.warning("The %s did not take what the learner sent: %s", role, error)


def parallel_learner(agent: Agent, barrier: threading.Barrier, args: Any) -> None:
    """Trains until `args.steps` or `args.duration`, then saves.

    Args:
      agent: shared with the actor.
      barrier: of two; passed when the agent is restored, and at the end.
      args: the `run` block of the configuration and what belongs to it.
    """
    settings = RunSettings.from_args(args)
    wiring.check_addresses(settings, "replay_addr", "logger_addr")
    with Rendezvous(barrier, "learner", "actor"), serve_replicas(settings):
        run_learner(agent, barrier, settings, threading.Event())


def run_learner(
    agent: Agent,
    barrier: threading.Barrier,
    settings: RunSettings,
    stop: threading.Event,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Trains until the end of the run, or until `stop` is set; then saves.

    Args:
      agent: shared with the actor.
      barrier: see `parallel_learner`.
      settings: see there.
      stop: ends the run when set; set when the run ends.
      progress: called after every update, and while the agent compiles during a stop.
    """
    with (
        Rendezvous(barrier, "learner", "actor") as rendezvous,
        join_replicas(settings) as replicas,
    ):
        begun = _learn(agent, rendezvous, replicas, settings, stop, progress)
        rendezvous.check()
        if not begun:
            rendezvous.call_off()
            return
        with contextlib.suppress(TimeoutError):
            rendezvous.meet(END_SECONDS)


def _learn(
    agent: Agent,
    rendezvous: Rendezvous,
    replicas: Replicas,
    settings: RunSettings,
    stop: threading.Event,
    progress: Callable[[], None],
) -> bool:
    """Connects, restores the agent and trains; returns False if the run is over before.

    The replicas, the hosts of the run, train, save and end together.
    """
    with contextlib.ExitStack() as stack:

        def connect(name: str, address: str, inflight: int = 16) -> Any:
            return stack.enter_context(
                wiring.make_client(
                    address, f"learner-{name}", settings, maxinflight=inflight
                )
            )

        samples = connect("samples", settings.replay_addr)
        replay = connect("replay", settings.replay_addr, INFLIGHT)
        log = connect("logger", settings.logger_addr)
        ended = connect("end", settings.logger_addr)
        over = stack.enter_context(
            RunEnd(stop, rendezvous, settings.duration, replicas)
        )
        if not _connect(samples, log, replicas, stop):
            return False
        conductor = Conductor(agent, samples, log, settings, replicas)
        stack.callback(conductor.close)
        rendezvous.on_failure(
            lambda: conductor.abandon() if rendezvous.abandoned else None
        )
        # Makes the agent fail if its last save makes no progress.
        watch = StopDeadline(
            *(stop, settings.logdir, settings.stop_timeout),
            give_up=rendezvous.abandon,
            awaited=lambda: conductor.awaited,
            progress=note_compiling(agent, progress),
        )
        stack.enter_context(watch)
        if not _restore(conductor, over, settings, replicas):
            return False
        rendezvous.meet()
        steps = math.ceil(settings.steps / replicas.count)
        over.when(lambda: ended.wait_step(steps))
        stream = RemoteStream(samples, "train", AHEAD)
        over.opened(stream)
        _fill(stream, conductor, settings, replicas)
        batches = agent.stream(stream)
        stack.callback(getattr(batches, "close", lambda: None))
        stack.callback(stream.close)  # Runs before the one above, which waits for it.
        learner = Learner(
            *(agent, iter(batches), replay, log, settings), stream_stats=stream.stats
        )
        ends = {
            "client/learner_samples": samples,
            "client/learner_replay": replay,
            "client/learner_logger": log,
        }
        counters = {"train": lambda: learner.updates}
        stack.enter_context(report_role(settings, "learner", ends, counters))
        notes = (watch.step, progress)
        _train(learner, conductor, over, rendezvous, settings, notes, replicas.client)
    return True


def _connect(replay: Any, log: Any, replicas: Replicas, stop: threading.Event) -> bool:
    """Waits for replay, logger and other replicas; returns False if told to stop."""
    for client, whom in ((replay, "replay"), (log, "logger")):
        if not wiring.connect(client, "The learner", whom, stop.is_set):
            return False
    return replicas.meet(stop.is_set)


def _restore(
    conductor: Conductor, over: RunEnd, settings: RunSettings, replicas: Replicas
) -> bool:
    """Continues the run, or saves its start; False if it has made its steps already."""
    step = conductor.restore()
    if step is None and not over:
        conductor.save(trained=0)
        conductor.wait()
    if step is None or step < settings.steps:
        return True
    # Replicas may be at different steps, and only end together; hosts of environments
    # have to be told by the actor that the run is over.
    if not replicas.alone or settings.remote_envs:
        return True
    logger.info("The run has made its %d steps already.", settings.steps)
    return False


def _fill(
    stream: RemoteStream,
    conductor: Conductor,
    settings: RunSettings,
    replicas: Replicas,
) -> None:
    """Waits until there is a batch. Saves meanwhile: slow envs may need hours for it.

    Replicas have their first batches at different times, and only save together.
    """
    if settings.save_every <= 0 or not replicas.alone:
        return
    while not stream.ready(settings.save_every) and not stream.closed:
        if not conductor.busy:
            conductor.save(trained=0)


def _train(
    learner: Learner,
    conductor: Conductor,
    over: RunEnd,
    rendezvous: Rendezvous,
    settings: RunSettings,
    stepped: Iterable[Callable[[], None]],
    clock: Any,
) -> None:
    """Runs the learner's loop; `clock` gives all replicas the same decisions."""
    should_log = GlobalClock(settings.log_every, client=clock, name="log")
    should_report = GlobalClock(settings.report_every, client=clock, name="report")
    should_save = GlobalClock(settings.save_every, client=clock, name="save")
    while not over:
        try:
            learner.step()
        except StopIteration:
            break
        for note in stepped:
            note()
        if should_report():
            learner.report("report", over.opened)
            # Replicas without evaluation steps yet would get out of step with others.
            if settings.eval_envs and clock is None:
                learner.report("eval", over.opened)
        if should_log():
            learner.log()
        # Skip a save that is due while the previous one is still being written.
        if should_save() and (settings.save_every < 0 or clock or not conductor.busy):
            conductor.save(learner.updates)
    if rendezvous.broken:
        return  # The state of the other side is not known: the last save stands.
    learner.flush()
    learner.log()
    for _ in range(END_ATTEMPTS):
        conductor.save(learner.updates)
        if conductor.wait():
            return
        rendezvous.check()
    raise CheckpointError(
        f"The end of the run could not be saved to {settings.logdir}. The warning "
        "above says why."
    )


class RemoteStream(Stream):
    """Batches of one kind from the replay role.

    One thread reads; any other may close, which ends the reader's wait.

    Args:
      client: connection to the replay role.
      source: 'train', 'report' or 'eval'.
      ahead: calls that are open beside the one being waited for.
      count: batches after which the stream ends; None for no end.
    """

    def __init__(
        self, client: Any, source: str, ahead: int = 0, count: int | None = None
    ):
        self._waiting = wiring.TimeShare()
        self._client = client
        self._method = f"sample_batch_{source}"
        self._ahead = ahead
        self._count = count
        self._asked = 0
        self._open: deque[tuple[int, Any]] = deque()  # With their numbers.
        self._wake = threading.Event()
        self.closed = False

    def __next__(self) -> dict[str, Array]:
        if not self.ready():
            raise StopIteration
        batch = self._open[0][1].result(0)
        self._open.popleft()
        if not batch:
            raise StopIteration  # There is nothing to sample yet.
        return batch

    def ready(self, seconds: float | None = None) -> bool:
        """Waits for the next batch; returns whether it, or an error, has come.

        Args:
          seconds: to wait; None for as long as the stream is open.
        """
        while True:
            while len(self._open) <= self._ahead and self._asked != self._count:
                self._ask(self._asked)
                self._asked += 1
            if not self._open or not self._wait(self._open[0][1], seconds):
                return False
            if not isinstance(self._open[0][1].exception(0), Disconnected):
                return True
            self._ask_again()

    def stats(self) -> dict[str, float]:
        """Returns metrics of the connection and of waits, since the last call."""
        return {
            "timer/learner/stream_wait": self._waiting.share(),
            **wiring.prefixed("client/learner_samples", self._client.stats()),
        }

    def save(self) -> Tree:
        """Returns nothing: batches are drawn at random, and have no position."""

    def load(self, data: Tree) -> None:
        """Does nothing, as there is no position to restore."""

    def close(self) -> None:
        """Ends the stream."""
        self.closed = True
        self._wake.set()

    def _ask(self, number: int) -> None:
        # The number lets the replay distinguish drawn batches from trained ones.
        self._open.append((number, self._client.call(self._method, number)))

    def _ask_again(self) -> None:
        """Repeats calls that failed because the replay restarted, in their order."""
        calls, self._open = self._open, deque()
        for number, future in calls:
            failed = future.done() and isinstance(future.exception(0), Disconnected)
            if failed:
                self._ask(number)
            else:
                self._open.append((number, future))

    def _wait(self, future: Any, seconds: float | None) -> bool:
        """Waits for a call; returns False if the stream closes or time is over."""
        if self.closed:
            return False
        future.add_callback(lambda _: self._wake.set())
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        with self._waiting:
            # An earlier call may wake it, too: once for every wait for that call.
            while not future.done() and not self.closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wake.wait(None if seconds is None else left)
                self._wake.clear()  # What it stands for is checked after this.
        return future.done()
