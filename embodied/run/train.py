"""Collects and trains in turns, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodied.base import Agent
from embodied.clock import LocalClock
from embodied.replay import Replay
from embodied.run.collecting import MakeEnv
from embodied.run.settings import RunSettings
from embodied.run.trainer import MakeStream
from embodied.run.training_run import TRAIN_REPLAY, TrainResult, open_run


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
    args = RunSettings.from_args(args)
    should_log = LocalClock(args.log_every)
    should_report = LocalClock(args.report_every)
    should_save = LocalClock(args.save_every)
    replays = {TRAIN_REPLAY: make_replay}
    with open_run(make_agent, replays, make_env, make_stream, make_logger, args) as run:
        while not run.over():
            if not run.behind():
                run.collect()
            run.train(should_report, should_log, should_save)
            if should_report():
                run.report(TRAIN_REPLAY, "report")
            if should_log():
                run.log()
            if should_save():
                run.save()
    return run.result()
