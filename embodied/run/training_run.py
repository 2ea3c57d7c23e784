"""A training run in one process: its parts, its steps, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from embodied.base import Agent
from embodied.clock import LocalClock
from embodied.episodes import Episodes
from embodied.logger import rewind
from embodied.replay import Replay, limiters
from embodied.run.collecting import Collector, Evaluator, MakeEnv
from embodied.run.console import SAVING, show_messages, stop_on_signals
from embodied.run.live import LiveFile, Rate, logged_step, record_run
from embodied.run.metrics import Meter
from embodied.run.saving import Part, RunCheckpoint, write_config
from embodied.run.settings import RunSettings
from embodied.run.trainer import MakeStream, Trainer
from embodied.run.usage import Usage

TRAIN_REPLAY = "replay"  # Names of folders, parts of checkpoints, and metrics.
EVAL_REPLAY = "replay_eval"
LIMITER = "limiter"


class Limit:
    """Ends a loop by its steps, by its duration, or by a signal.

    Args:
      step: returns the number of steps until now.
      steps: number of steps at which the loop ends.
      duration: seconds from now after which it ends; 0 for no limit.
      stop: event that ends the loop once set.
    """

    def __init__(
        self,
        step: Callable[[], int],
        steps: float,
        duration: float,
        stop: threading.Event,
    ):
        self._step = step
        self._steps = steps
        self._stop = stop
        self._start = time.monotonic()
        self._end = self._start + duration if duration else math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the limit was made."""
        return time.monotonic() - self._start

    def interrupted(self) -> bool:
        """Whether a signal has come, or the duration is over."""
        return self._stop.is_set() or time.monotonic() >= self._end

    def reached(self) -> bool:
        """Whether the loop is over: it was interrupted, or has made its steps."""
        return self.interrupted() or self._step() >= self._steps


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Figures of a call of a training loop.

    Attributes:
      step: agent steps of training environments, over all resumes.
      steps: agent steps of this call.
      updates: updates of the agent in this call.
      seconds: duration of this call, without the start-up.
      episodes: number of episodes that were finished in this call.
      mean_score: mean score of the last 10 of them; None if there were none.
    """

    step: int
    steps: int
    updates: int
    seconds: float
    episodes: int
    mean_score: float | None


class TrainingRun:
    """The parts of a training run, and the steps that a loop makes with them.

    Everything happens in the caller's thread and in a fixed order. `open_run` makes it.

    Args:
      stack: closes the parts at the end of the run.
      stop: event that ends the run once set.
      make_agent: see `open_run`, as for the other arguments.

    Raises:
      CheckpointError: the logdir has checkpoints, but none that can be continued.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        stop: threading.Event,
        make_agent: Callable[[], Agent],
        make_replays: Mapping[str, Callable[[], Replay]],
        make_env: MakeEnv,
        make_stream: MakeStream,
        make_logger: Callable[[], Any],
        settings: RunSettings,
    ):
        self.settings = settings
        self.logger = stack.enter_context(contextlib.closing(make_logger()))
        self.agent = make_agent()
        write_config(settings.logdir, self.agent)
        stack.enter_context(show_messages())
        stack.enter_context(record_run(settings.logdir, "A run in one process"))
        self.replays = {name: make() for name, make in make_replays.items()}
        for replay in self.replays.values():
            replay.use_context(settings.replay_context)
        replay = self.replays[TRAIN_REPLAY]
        self.limiter = make_limiter(settings)
        parts: dict[str, Part] = {**self.replays, LIMITER: self.limiter}
        step = self.logger.step
        self.checkpoint = RunCheckpoint(settings, step, self.agent, parts)
        self.checkpoint.restore()
        rewind(self.logger)
        self.limiter.available(len(replay), replay.full)
        # Without a timeout: a pause, as for a report, must not abandon episodes.
        self.episodes = Episodes(timeout=0)
        self.collector = stack.enter_context(
            Collector(
                self.agent, make_env, replay, self.logger, self.episodes, settings
            )
        )
        self.trainer = Trainer(self.agent, replay, make_stream, settings, stack)
        self.limit = Limit(lambda: int(step), settings.steps, settings.duration, stop)
        self.meter = Meter()
        self.usage = Usage(settings.usage)
        self.rates = {"env": Rate(), "train": Rate()}  # For `live`.

    def over(self) -> bool:
        """Whether all steps are made and trained on, or the run was interrupted."""
        if self.limit.interrupted():
            return True
        return self.limit.reached() and not self.behind()

    def behind(self) -> bool:
        """Whether updates are due, which come before further environment steps."""
        return self._due() > 0

    def collect(self) -> None:
        """Steps every training environment once."""
        with self.meter.section("collect"):
            steps = self.collector.collect()
        self.meter.count("policy", steps)
        self.limiter.insert(steps)
        replay = self.replays[TRAIN_REPLAY]
        self.limiter.available(len(replay), replay.full)

    def train(self, *clocks: LocalClock) -> None:
        """Makes the updates that are due, until one of the clocks is due.

        A signal or the end of the duration also ends them; the rest stays due.

        Args:
          clocks: clocks of other work; once one is due, further updates wait for the
            next call.
        """

        def pause() -> bool:
            return self.limit.interrupted() or any(clock.due() for clock in clocks)

        due = 0 if self.limit.interrupted() else self._due()
        with self.meter.section("train"):
            updates = self.trainer.train(due, pause)
        if updates:
            self.limiter.sample(updates * self.settings.batch_size)
            self.checkpoint.changed()
        batch = self.settings.batch_size * self.settings.batch_length
        self.meter.count("train", updates * batch)

    def evaluate(self, evaluator: Evaluator) -> None:
        """Plays evaluation episodes, unless a signal or the duration ends them."""
        with self.meter.section("evaluate"):
            evaluator.begin()
            while not (evaluator.done or self.limit.interrupted()):
                evaluator.play()

    def report(self, name: str, mode: str) -> None:
        """Logs the agent's report on samples of a replay, under the mode's name."""
        with self.meter.section("report"):
            metrics = self.trainer.report(self.replays[name], mode)
        self.logger.add(metrics, prefix=mode)

    def log(self) -> None:
        """Writes all metrics since the last call."""
        self.logger.add(self.episodes.result())
        self.logger.add(self.meter.result())
        self.logger.add(self.trainer.result(), prefix="train")
        self.logger.add(self.usage.result(), prefix="usage")
        for name, replay in self.replays.items():
            self.logger.add(replay.stats(), prefix=name)
        self.logger.write()

    def finish(self) -> None:
        """Writes the remaining metrics."""
        self.trainer.finish()
        if not self.meter.idle:
            self.log()
        elif metrics := self.trainer.result():
            # Only these, since rates of zero would be the last point of every curve.
            self.logger.add(metrics, prefix="train")
            self.logger.write()

    def save(self) -> None:
        """Saves a checkpoint."""
        with self.meter.section("save"):
            self.checkpoint.save()

    def result(self) -> TrainResult:
        """Returns the figures of this call until now."""
        collector = self.collector
        scores = collector.scores
        return TrainResult(
            step=int(self.logger.step),
            steps=collector.steps,
            updates=self.trainer.updates,
            seconds=self.limit.seconds,
            episodes=collector.episodes,
            mean_score=sum(scores) / len(scores) if scores else None,
        )

    def live(self) -> dict[str, Any]:
        """Returns steps, scores and rates, for `live.json`. Called by one thread."""
        counts = {"env": self.collector.steps, "train": self.trainer.updates}
        return {
            "step": logged_step(self.logger),
            "episodes": self.collector.episodes,
            "scores": list(self.collector.history),
            "rates": {name: self.rates[name](count) for name, count in counts.items()},
            "metrics": {"replay/items": len(self.replays[TRAIN_REPLAY])},
        }

    def _due(self) -> int:
        return self.limiter.due(self.settings.batch_size)


def make_limiter(settings: RunSettings) -> limiters.SamplesPerInsert:
    """Returns the limiter that keeps training to `settings.train_ratio`.

    All training programs use it. Training begins when the replay has as many sequences
    as a batch has time steps, over all its rows.
    """
    return limiters.SamplesPerInsert(
        settings.train_ratio / settings.batch_length,
        tolerance=4 * settings.batch_size,
        min_size=settings.batch_size * settings.batch_length,
    )


@contextlib.contextmanager
def open_run(
    make_agent: Callable[[], Agent],
    make_replays: Mapping[str, Callable[[], Replay]],
    make_env: MakeEnv,
    make_stream: MakeStream,
    make_logger: Callable[[], Any],
    args: Any,
) -> Iterator[TrainingRun]:
    """Starts or continues the run of `args.logdir`, for the body to train.

    When the body ends, its last state is logged and saved, then everything is closed.
    After an error other than an environment's failure, nothing is saved.

    Args:
      make_agent: makes the agent.
      make_replays: functions that make the replays, by name.
      make_env: makes the training environment of an id.
      make_stream: makes the stream of batches of a replay and a mode.
      make_logger: makes the logger: `add`, `write`, `close` and a counter `step`.
      args: the `run` block of the configuration, and sizes of batches.

    Raises:
      CheckpointError: the logdir has checkpoints, but none that can be continued.
    """
    settings = RunSettings.from_args(args)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(SAVING))
        run = TrainingRun(
            *(stack, stop, make_agent, make_replays),
            *(make_env, make_stream, make_logger, settings),
        )
        stack.enter_context(LiveFile(settings.logdir, run.live))
        with run.checkpoint.saved_at_end(run.finish):
            yield run
