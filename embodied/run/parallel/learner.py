"""The learner: trains the agent on batches from the replay. Agent process, a thread."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from embodied.base import Agent, Array, Tree
from embodied.checkpoint import CheckpointError
from embodied.clock import GlobalClock
from embodied.rpc import Disconnected
from embodied.run.metrics import Means
from embodied.run.parallel import wiring
from embodied.run.parallel.bottleneck import UPDATES
from embodied.run.parallel.conductor import Conductor
from embodied.run.parallel.ending import Ending
from embodied.run.parallel.remote_stream import RemoteStream
from embodied.run.parallel.replicas import Replicas, join_replicas
from embodied.run.usage import Usage

AHEAD = 3  # Calls for batches that are open beside those that wait on the device.
INFLIGHT = 8  # Updates of the replay that may be on their way.
END_SECONDS = 60.0  # For the actor to end after the learner.
END_ATTEMPTS = 2  # Saves of the end: a role may be restarted during the first.

logger = logging.getLogger("embodied.run")


class Learner:
    """The learner without its connections.

    Args:
      agent: to train.
      batches: from `agent.stream`.
      replay: client of the replay: `update` and, for reports, `sample_batch_…`.
      logger: client of the logger: `add`.
      args: sizes of batches and reports.
      stream_wait: share of the time that the stream has waited for the replay.
      stream_stats: of the connection that the batches come over.
    """

    def __init__(
        self,
        agent: Agent,
        batches: Iterator[dict[str, Array]],
        replay: Any,
        logger: Any,
        args: Any,
        stream_wait: Callable[[], float] = lambda: 0.0,
        stream_stats: Callable[[], dict[str, float]] = dict,
    ):
        self.updates = 0
        self._agent = agent
        self._batches = batches
        self._replay = replay
        self._logger = logger
        self._args = args
        self._stream_wait = stream_wait
        self._stream_stats = stream_stats
        self._carry: Tree = agent.init_train(args.batch_size)
        self._means = Means()
        self._usage = Usage(args.usage)
        self._waiting = wiring.Stopwatch()
        self._training = wiring.Stopwatch()
        self._counted = (time.monotonic(), 0)
        self._results = wiring.Results(self._not_taken)

    def step(self) -> None:
        """Makes one update; StopIteration if there are no batches any more."""
        with self._waiting:
            batch = next(self._batches)
        if not self.updates:
            self._send({UPDATES: 0})
        with self._training:
            self._carry, outputs, metrics = self._agent.train(self._carry, batch)
        self.updates += 1
        if self.updates == 1:
            self._begin()
        self._give_back(outputs)
        self._means.add(metrics)

    def flush(self) -> None:
        """Waits for the update that the agent is still working on, if it does."""
        if hasattr(self._agent, "flush"):
            outputs, metrics = self._agent.flush()
            self._give_back(outputs)
            self._means.add(metrics)

    def report(self, source: str, opened: Callable[[RemoteStream], None]) -> None:
        """Sends the agent's report on fresh samples of a source to the logger."""
        args = self._args
        count = args.consec_report * args.report_batches
        stream = RemoteStream(self._replay, source, ahead=1, count=count)
        opened(stream)
        batches = self._agent.stream(stream)
        carry, means = self._agent.init_report(args.batch_size), Means()
        try:
            for batch in batches:
                carry, metrics = self._agent.report(carry, batch)
                means.add(metrics)
        finally:
            for part in (stream, batches):
                getattr(part, "close", lambda: None)()
        self._send(dict(wiring.prefixed(source, means.result())))

    def log(self) -> None:
        """Sends metrics since the last call to the logger."""
        now, (since, before) = time.monotonic(), self._counted
        self._counted = (now, self.updates)
        rate = (self.updates - before) / max(1e-9, now - since)
        self._send(
            {
                **dict(wiring.prefixed("train", self._means.result())),
                "fps/train": rate * self._args.batch_size * self._args.batch_length,
                UPDATES: self.updates,
                "parallel/updates_per_second": rate,
                "timer/learner/wait": self._waiting.share(),
                "timer/learner/train": self._training.share(),
                "timer/learner/stream_wait": self._stream_wait(),
                **dict(wiring.prefixed("client/learner_samples", self._stream_stats())),
                **dict(wiring.prefixed("client/learner_replay", self._replay.stats())),
                **dict(wiring.prefixed("client/learner_logger", self._logger.stats())),
                **dict(wiring.prefixed("usage/agent", self._usage.result())),
            }
        )

    def drain(self, timeout: float) -> None:
        """Waits until all that was sent has arrived."""
        self._results.wait(timeout)

    def _begin(self) -> None:
        """Counts from here on: before, the replay was filled, the update compiled."""
        for share in (self._waiting.share, self._training.share, self._stream_wait):
            share()
        self._counted = (time.monotonic(), self.updates)
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
    wiring.check_addresses(args, "replay_addr", "logger_addr")
    with Ending(barrier, "learner", "actor") as ending, join_replicas(args) as replicas:
        run_learner(agent, ending, args, threading.Event(), replicas=replicas)


def run_learner(
    agent: Agent,
    ending: Ending,
    args: Any,
    stop: threading.Event,
    progress: Callable[[], None] = lambda: None,
    replicas: Replicas | None = None,
) -> None:
    """Trains until the end of the run, or until `stop` is set; then saves.

    Args:
      agent: shared with the actor.
      ending: the learner's side of the barrier.
      args: see `parallel_learner`.
      stop: ends the run when set; set when the run ends.
      progress: called after every update.
      replicas: the hosts of the run, which train, save and end together.
    """
    replicas = replicas or Replicas()
    with contextlib.ExitStack() as stack:

        def connect(name: str, address: str, inflight: int = 16) -> Any:
            return stack.enter_context(
                wiring.make_client(
                    address, f"learner-{name}", args, maxinflight=inflight
                )
            )

        samples = connect("samples", args.replay_addr)
        replay = connect("replay", args.replay_addr, INFLIGHT)
        log = connect("logger", args.logger_addr)
        ended = connect("end", args.logger_addr)
        over = stack.enter_context(_Over(stop, ending, args.duration, replicas))
        if not _connect(samples, log, replicas, stop):
            ending.check()
            ending.call_off()
            return
        conductor = Conductor(agent, samples, log, args, replicas)
        stack.callback(conductor.close)
        ending.on_failure(lambda: conductor.abandon() if ending.abandoned else None)
        if not conductor.restore() and not over:
            conductor.save(trained=0)
            conductor.wait()
        ending.meet()
        steps = math.ceil(args.steps / replicas.count)
        over.when(lambda: ended.wait_step(steps))
        stream = RemoteStream(samples, "train", AHEAD)
        over.opened(stream)
        batches = agent.stream(stream)
        stack.callback(getattr(batches, "close", lambda: None))
        stack.callback(stream.close)  # Before the other, which waits for it.
        learner = Learner(
            *(agent, iter(batches), replay, log, args),
            stream_wait=stream.waiting.share,
            stream_stats=samples.stats,
        )
        _train(learner, conductor, over, ending, args, progress, replicas.client)
    ending.check()
    with contextlib.suppress(TimeoutError):
        ending.meet(END_SECONDS)


def _connect(replay: Any, log: Any, replicas: Replicas, stop: threading.Event) -> bool:
    """Waits for replay, logger and the other replicas; False if told to stop."""
    for client, whom in ((replay, "replay"), (log, "logger")):
        if not wiring.connect(client, "The learner", whom, stop.is_set):
            return False
    return replicas.meet(stop.is_set)


def _train(
    learner: Learner,
    conductor: Conductor,
    over: _Over,
    ending: Ending,
    args: Any,
    progress: Callable[[], None],
    clock: Any,
) -> None:
    """The learner's loop; `clock` gives all replicas the same decisions."""
    should_log = GlobalClock(args.log_every, client=clock, name="log")
    should_report = GlobalClock(args.report_every, client=clock, name="report")
    should_save = GlobalClock(args.save_every, client=clock, name="save")
    while not over:
        try:
            learner.step()
        except StopIteration:
            break
        progress()
        if should_report():
            learner.report("report", over.opened)
            # Replicas that have no evaluation steps yet would be out of step.
            if args.eval_envs and clock is None:
                learner.report("eval", over.opened)
        if should_log():
            learner.log()
        # One that is still being written when the next is due stands for both.
        if should_save() and (args.save_every < 0 or clock or not conductor.busy):
            conductor.save(learner.updates)
    if ending.broken:
        return  # What the other side has left is not known: the last save stands.
    learner.flush()
    learner.log()
    for _ in range(END_ATTEMPTS):
        conductor.save(learner.updates)
        if conductor.wait():
            return
        ending.check()
    raise CheckpointError(
        f"The end of the run could not be saved to {args.logdir}. The warning above "
        "says why."
    )


class _Over:
    """Says when the run is over, and ends what waits for batches then.

    Args:
      stop: set when the run is over.
      ending: a failure of the actor is the end, too.
      duration: seconds; 0 for no limit.
      replicas: which end together, each after the same update.
    """

    def __init__(
        self,
        stop: threading.Event,
        ending: Ending,
        duration: float,
        replicas: Replicas,
    ):
        self._stop = stop
        self._replicas = replicas
        self._duration = duration
        self._lock = threading.Lock()  # Guards the streams.
        self._streams: list[RemoteStream] = []
        self._watch = threading.Thread(target=self._run, name="over", daemon=True)
        ending.on_failure(stop.set)

    def __enter__(self) -> _Over:
        self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._watch.join()

    def __bool__(self) -> bool:
        return self._replicas.over(self._stop.is_set())

    def when(self, ask: Callable[[], Any]) -> None:
        """Ends the run when a call is answered; asks again if its server restarts."""

        def answered(future: Any) -> None:
            if isinstance(future.exception(0), Disconnected):
                with contextlib.suppress(Disconnected):  # The client is closed.
                    self.when(ask)
                    return
            self._stop.set()

        ask().add_callback(answered)

    def opened(self, stream: RemoteStream) -> None:
        """Closes a stream when the run is over."""
        with self._lock:
            self._streams = [x for x in self._streams if not x.closed] + [stream]
        if self._stop.is_set() and self._replicas.alone:
            stream.close()

    def _run(self) -> None:
        self._stop.wait(self._duration or None)
        self._stop.set()
        if not self._replicas.alone:
            return  # The others may have another update to make, which needs batches.
        with self._lock:
            for stream in self._streams:
                stream.close()
