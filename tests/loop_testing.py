"""A small task, settings and fakes, for tests of the loops and of the roles."""

from __future__ import annotations

import elements
import numpy as np

import embodied
from embodied.replay import Replay
from embodied.streams import Consec, Stateless

LENGTH = 5  # Actions in an episode, which has one transition more.

SETTINGS = {
    "logdir": "",
    "replica": 0,
    "replicas": 1,
    "steps": 200,
    "duration": 0.0,
    "train_ratio": 8.0,
    "log_every": 0.0,
    "report_every": 0.0,
    "save_every": 0.0,
    "envs": 2,
    "eval_envs": 1,
    "eval_eps": 1,
    "report_batches": 1,
    "from_checkpoint": "",
    "episode_timeout": 180.0,
    "usage": {"psutil": False},
    "debug": False,
    "keep": 3,
    "batch_size": 2,
    "batch_length": 4,
    "report_length": 2,
    "consec_train": 1,
    "consec_report": 1,
    "replay_context": 1,
    "actor_addr": "localhost:{auto}",
    "replay_addr": "localhost:{auto}",
    "logger_addr": "localhost:{auto}",
    "actor_batch": -1,
    "actor_threads": 1,
    "agent_process": False,
    "remote_replay": False,
    "remote_envs": False,
    "env_offset": 0,
}


class Task(embodied.Env):
    """Episodes of a fixed length; `where` holds env, episode and position."""

    def __init__(self, index=0, reward=1.0, length=LENGTH):
        self._index = index
        self._reward = reward
        self._length = length
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
            "action": embodied.Space(np.int32, (), 0, 1000),
            "reset": embodied.Space(bool),
        }

    def step(self, action):
        if self._done or action["reset"]:
            self._episode += 1
            self._count = 0
        else:
            self._count += 1
        self._done = self._count == self._length
        return {
            "where": np.array([self._index, self._episode, self._count], np.int32),
            "reward": np.float32(0 if self._count == 0 else self._reward),
            "is_first": np.bool_(self._count == 0),
            "is_last": np.bool_(self._done),
            "is_terminal": np.bool_(self._done),
            "log/count": np.float32(self._count),
        }


class CountingAgent(embodied.RandomAgent):
    """Acts at random in `Task`; its state includes the number of its updates."""

    def __init__(self, seed=0):
        env = Task()
        spaces = {k: v for k, v in env.obs_space.items() if not k.startswith("log/")}
        super().__init__(spaces, env.act_space, seed=seed)
        self.updates = 0

    def train(self, carry, batch):
        self.updates += 1
        carry, outputs, metrics = super().train(carry, batch)
        return carry, outputs, {**metrics, "updates": np.float32(self.updates)}

    def save(self):
        return {**super().save(), "updates": self.updates}

    def load(self, data, regex=None):
        super().load(data, regex)
        if regex is None or "rng" not in regex:
            self.updates = data["updates"]


class Notes:
    """Logger with the methods that loops use, which keeps all metrics in memory."""

    def __init__(self):
        self.step = elements.Counter()
        self.rows = []
        self.writes = 0
        self.closed = False

    def add(self, mapping, prefix=None):
        for name, value in mapping.items():
            name = f"{prefix}/{name}" if prefix else name
            self.rows.append((int(self.step), name, value))

    def write(self):
        self.writes += 1

    def close(self):
        self.closed = True

    def names(self):
        return {name for _, name, _ in self.rows}

    def values(self, name):
        return [value for _, found, value in self.rows if found == name]

    def steps(self, name):
        return [step for step, found, _ in self.rows if found == name]


def make_replay(args, training=True, **kwargs):
    """Returns a buffer whose sequences have the length that the settings need."""
    steps = (
        args.consec_train * args.batch_length
        if training
        else args.consec_report * args.report_length
    )
    kwargs = {"capacity": 1000, "context": args.replay_context, **kwargs}
    return Replay(steps + args.replay_context, **kwargs)


def make_stream(args, replay, mode):
    """Returns a stream of batches of the replay."""
    training = mode == "train"
    return Consec(
        Stateless(replay.sample, args.batch_size, mode),
        length=args.batch_length if training else args.report_length,
        consec=args.consec_train if training else args.consec_report,
        prefix=args.replay_context,
        strict=training,
        contiguous=True,
    )
