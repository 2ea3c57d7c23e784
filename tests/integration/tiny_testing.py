"""Factories of a tiny run, made from command-line arguments."""

from __future__ import annotations

import functools

from loop_testing import LENGTH, CountingAgent, Task

from dreamerv3.cli.config import load_config, make_args
from dreamerv3.cli.factories import make_logger, make_replay, make_stream

TRAIN_SCORE, EVAL_SCORE = 1.0 * LENGTH, 3.0 * LENGTH


def make_eval_task(index):
    return Task(index, reward=3.0)


class Parts:
    """The factories and the settings of a run, made from command-line arguments."""

    def __init__(self, argv):
        self.config = load_config(argv)
        self.args = make_args(self.config)
        self.make_agent = CountingAgent
        self.make_replay = functools.partial(make_replay, self.config, "replay")
        self.make_replay_eval = functools.partial(
            make_replay, self.config, "replay_eval", "eval"
        )
        self.make_env = Task
        self.make_env_eval = make_eval_task
        self.make_stream = functools.partial(make_stream, self.config)
        self.make_logger = functools.partial(make_logger, self.config)

    def seven(self):
        """Returns the seven factories that `combined` takes before the settings."""
        return (
            self.make_agent,
            self.make_replay,
            self.make_replay_eval,
            self.make_env,
            self.make_env_eval,
            self.make_stream,
            self.make_logger,
        )
