"""Collects, trains and, if asked to, evaluates in turns, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodied.base import Agent
from embodied.clock import LocalClock
from embodied.replay import Replay
from embodied.run.collecting import Evaluator, MakeEnv, make_driver
from embodied.run.trainer import MakeStream
from embodied.run.training_run import (
    EVAL_REPLAY,
    TRAIN_REPLAY,
    TrainingRun,
    TrainResult,
    open_run,
)


def train(
    make_agent: Callable[[], Agent],
    make_replay: Callable[[], Replay],
    make_env: MakeEnv,
    make_stream: MakeStream,
    make_logger: Callable[[], Any],
    args: Any,
) -> TrainResult:
    """Trains until `args.steps` or `args.duration`, or until Ctrl-C or SIGTERM.

    The next call with the same `args.logdir` continues the run. Two runs with the same
    seeds are equal, however far the agent reads ahead in its stream.

    Args:
      make_agent: makes the agent.
      make_replay: makes the replay, which saves to `logdir/replay`.
      make_env: makes the environment of an id.
      make_stream: makes the stream of batches of a replay and a mode.
      make_logger: makes the logger: `add`, `write`, `close` and a counter `step`.
      args: the `run` block of the configuration, and sizes of batches.

    Returns:
      The figures of this call.
    """
    replays = {TRAIN_REPLAY: make_replay}
    with open_run(make_agent, replays, make_env, make_stream, make_logger, args) as run:
        _loop(run)
    return run.result()


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
    replays = {TRAIN_REPLAY: make_replay_train, EVAL_REPLAY: make_replay_eval}
    with open_run(
        make_agent, replays, make_env_train, make_stream, make_logger, args
    ) as run:
        envs, eval_envs = run.settings.envs, run.settings.eval_envs
        with make_driver(make_env_eval, envs, eval_envs, run.settings) as driver:
            evaluator = Evaluator(
                *(run.agent, driver, run.settings.eval_eps),
                *(run.logger, run.episodes, run.replays[EVAL_REPLAY]),
            )
            _loop(run, evaluator)
    return run.result()


def _loop(run: TrainingRun, evaluator: Evaluator | None = None) -> None:
    should_log = LocalClock(run.settings.log_every)
    should_report = LocalClock(run.settings.report_every)
    should_save = LocalClock(run.settings.save_every)
    while not run.over():
        if not run.behind():
            run.collect()
        run.train(should_report, should_log, should_save)
        if should_report():
            if evaluator is not None:
                run.evaluate(evaluator)
            run.report(TRAIN_REPLAY, "report")
            if evaluator is not None:
                run.report(EVAL_REPLAY, "eval")
        if should_log():
            run.log()
        if should_save():
            run.save()
