"""What the training loops have in common. The process that trains."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from embodied.base import Agent
from embodied.clock import LocalClock
from embodied.episodes import Episodes
from embodied.replay import Replay, limiters
from embodied.run.collecting import Collector, MakeEnv
from embodied.run.evaluation import Evaluator
from embodied.run.metrics import Meter
from embodied.run.progress import Limit, Result
from embodied.run.saving import RunCheckpoint, must_continue
from embodied.run.signals import SAVING, stop_on_signals
from embodied.run.training import MakeStream, Trainer
from embodied.run.usage import Usage

TRAIN_REPLAY = "replay"  # Names of folders, parts of checkpoints, and metrics.
EVAL_REPLAY = "replay_eval"
LIMITER = "limiter"


@dataclasses.dataclass(frozen=True)
class Session:
    """The parts of a training run, and the things that a loop does with them.

    Everything happens in the caller's thread and in a fixed order.
    """

    args: Any
    agent: Agent
    logger: Any
    replays: Mapping[str, Replay]
    episodes: Episodes
    limiter: limiters.SamplesPerInsert
    collector: Collector
    trainer: Trainer
    checkpoint: RunCheckpoint
    limit: Limit
    meter: Meter
    usage: Usage

    def over(self) -> bool:
        """Whether `steps` are trained on, or the duration or a signal has ended it."""
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
        """Makes the updates that are due, as far as there is nothing else to do.

        A signal or the duration ends them; what is not made stays due.

        Args:
          clocks: once one of them is due, further updates wait for the next call.
        """

        def pause() -> bool:
            return self.limit.interrupted() or any(clock.due() for clock in clocks)

        due = 0 if self.limit.interrupted() else self._due()
        with self.meter.section("train"):
            updates = self.trainer.train(due, pause)
        if updates:
            self.limiter.sample(updates * self.args.batch_size)
            self.checkpoint.changed()
        batch = self.args.batch_size * self.args.batch_length
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
        """Writes what has not been written yet."""
        self.trainer.finish()
        if not self.meter.idle:
            self.log()
        elif metrics := self.trainer.result():
            # These alone, since rates of zero would end every curve.
            self.logger.add(metrics, prefix="train")
            self.logger.write()

    def save(self) -> None:
        """Saves a checkpoint."""
        with self.meter.section("save"):
            self.checkpoint.save()

    def result(self) -> Result:
        """Returns what was done until now."""
        collector = self.collector
        scores = collector.scores
        return Result(
            step=int(self.logger.step),
            steps=collector.steps,
            updates=self.trainer.updates,
            seconds=self.limit.seconds,
            episodes=collector.episodes,
            mean_score=sum(scores) / len(scores) if scores else None,
        )

    def _due(self) -> int:
        return self.limiter.due(self.args.batch_size)


def make_limiter(args: Any) -> limiters.SamplesPerInsert:
    """Returns what keeps training to `args.train_ratio`, in all training programs.

    Training begins when the replay has as many sequences as a batch has time steps.
    """
    return limiters.SamplesPerInsert(
        args.train_ratio / args.batch_length,
        tolerance=4 * args.batch_size,
        min_size=args.batch_size * args.batch_length,
    )


@contextlib.contextmanager
def open_session(
    make_agent: Callable[[], Agent],
    make_replays: Mapping[str, Callable[[], Replay]],
    make_env: MakeEnv,
    make_stream: MakeStream,
    make_logger: Callable[[], Any],
    args: Any,
) -> Iterator[Session]:
    """Starts or continues the run of `args.logdir`, for the body to train.

    The end of the body is logged and saved, then everything is closed. After an error
    that is not an environment's, nothing is saved.

    Args:
      make_agent: makes the agent.
      make_replays: make the replays, by name.
      make_env: makes the training environment of an id.
      make_stream: makes the stream of batches of a replay and a mode.
      make_logger: makes the logger: `add`, `write`, `close` and a counter `step`.
      args: the `run` block of the configuration and what belongs to it.

    Raises:
      CheckpointError: the logdir has checkpoints, but none that can be continued.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(SAVING))
        logger = stack.enter_context(contextlib.closing(make_logger()))
        agent = make_agent()
        replays = {name: make() for name, make in make_replays.items()}
        replay = replays[TRAIN_REPLAY]
        limiter = make_limiter(args)
        checkpoint = RunCheckpoint(
            args, logger.step, agent, {**replays, LIMITER: limiter}
        )
        with must_continue(args.logdir):
            checkpoint.restore()
        limiter.available(len(replay), replay.full)
        # Without a timeout: a pause, as for a report, must not abandon episodes.
        episodes = Episodes(timeout=0)
        collector = stack.enter_context(
            Collector(agent, make_env, replay, logger, episodes, args)
        )
        trainer = stack.enter_context(Trainer(agent, replay, make_stream, args))
        session = Session(
            args=args,
            agent=agent,
            logger=logger,
            replays=replays,
            episodes=episodes,
            limiter=limiter,
            collector=collector,
            trainer=trainer,
            checkpoint=checkpoint,
            limit=Limit(lambda: int(logger.step), args.steps, args.duration, stop),
            meter=Meter(),
            usage=Usage(args.usage),
        )
        with checkpoint.saved_at_end(session.finish):
            yield session
