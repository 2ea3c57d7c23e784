"""A tiny task and an agent that counts, for runs in many processes."""

from __future__ import annotations

import functools

import numpy as np

import embodied
from dreamerv3.cli.config import load_config, make_args
from dreamerv3.cli.factories import make_logger, make_replay, make_stream

LENGTH = 5  # Actions in an episode, which has one transition more.
TRAIN_SCORE, EVAL_SCORE = 1.0 * LENGTH, 3.0 * LENGTH


class Task(embodied.Env):
    """Episodes of a fixed length; `where` holds env, episode and position."""

    def __init__(self, index=0, reward=1.0):
        self._index = index
        self._reward = reward
        self._episode = -1
        self._count = 0
        self._done = True

    @property
    def obs_space(self):
        return {
            "where": embodied.Space(np.int32, 3),
            "reward": embodied.Space(np.float32),
            "is_first": embodied.Space(bool),
            "is_last": embodied.Space(bool),
            "is_terminal": embodied.Space(bool),
            "log/count": embodied.Space(np.float32),
        }

    @property
    def act_space(self):
        return {
            "action": embodied.Space(np.int32, (), 0, 5),
            "reset": embodied.Space(bool),
        }

    def step(self, action):
        if self._done or action["reset"]:
            self._episode += 1
            self._count = 0
        else:
            self._count += 1
        self._done = self._count == LENGTH
        return {
            "where": np.array([self._index, self._episode, self._count], np.int32),
            "reward": np.float32(0 if self._count == 0 else self._reward),
            "is_first": np.bool_(self._count == 0),
            "is_last": np.bool_(self._done),
            "is_terminal": np.bool_(self._done),
            "log/count": np.float32(self._count),
        }


def make_eval_task(index):
    return Task(index, reward=3.0)


class CountingAgent(embodied.RandomAgent):
    """Acts at random; its state is the number of its updates."""

    def __init__(self):
        env = Task()
        spaces = {k: v for k, v in env.obs_space.items() if not k.startswith("log/")}
        super().__init__(spaces, env.act_space)
        self.updates = 0

    def train(self, carry, batch):
        self.updates += 1
        carry, outputs, metrics = super().train(carry, batch)
        return carry, outputs, {**metrics, "updates": np.float32(self.updates)}

    def save(self):
        return {**super().save(), "updates": self.updates}

    def load(self, data, regex=None):
        super().load(data, regex)
        self.updates = data["updates"]


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
