"""Collects, trains and evaluates in turns, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodied.base import Agent
from embodied.clock import LocalClock
from embodied.replay import Replay
from embodied.run.collecting import Evaluator, MakeEnv, make_driver
from embodied.run.settings import RunSettings
from embodied.run.trainer import MakeStream
from embodied.run.training_run import EVAL_REPLAY, TRAIN_REPLAY, TrainResult, open_run


def train_eval(
    make_agent: Callable[[], Agent],
    make_replay_train: Callable[[], Replay],
    make_replay_eval: Callable[[], Replay],
    make_env_train: MakeEnv,
    make_env_eval: MakeEnv,
    make_stream: MakeStream,
    make_logger: Callable[[], Any],
    args: Any,
) -> TrainResult:
    """Trains as `train` does, and evaluates before every report.

    An evaluation plays `args.eval_eps` episodes, in mode 'eval', in `args.eval_envs`
    environments, whose ids follow those of the training environments. Their steps go
    to a separate replay, and there is a report on samples of either replay.

    Args:
      make_agent: makes the agent.
      make_replay_train: makes the training replay, which saves to `logdir/replay`.
      make_replay_eval: makes the evaluation replay, in `logdir/replay_eval`.
      make_env_train: makes the training environment of an id.
      make_env_eval: makes the evaluation environment of an id.
      make_stream: makes the stream of batches of a replay and a mode.
      make_logger: makes the logger: `add`, `write`, `close` and a counter `step`.
      args: the `run` block of the configuration, and sizes of batches.

    Returns:
      The figures of this call.
    """
    args = RunSettings.from_args(args)
    should_log = LocalClock(args.log_every)
    should_report = LocalClock(args.report_every)
    should_save = LocalClock(args.save_every)
    replays = {TRAIN_REPLAY: make_replay_train, EVAL_REPLAY: make_replay_eval}
    with open_run(
        make_agent, replays, make_env_train, make_stream, make_logger, args
    ) as run:
        with Evaluator(
            run.agent,
            make_driver(make_env_eval, args.envs, args.eval_envs, args),
            args.eval_eps,
            run.logger,
            run.episodes,
            run.replays[EVAL_REPLAY],
        ) as evaluator:
            while not run.over():
                if not run.behind():
                    run.collect()
                run.train(should_report, should_log, should_save)
                if should_report():
                    run.evaluate(evaluator)
                    run.report(TRAIN_REPLAY, "report")
                    run.report(EVAL_REPLAY, "eval")
                if should_log():
                    run.log()
                if should_save():
                    run.save()
    return run.result()
