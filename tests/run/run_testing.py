"""A small task, an agent that records its calls, and factories for the loops."""

from __future__ import annotations

import functools
import json
import threading

import elements
import numpy as np

import embodied
import embodied.run
from embodied.checkpoint import Checkpoint
from embodied.logger import JSONLOutput, Logger
from embodied.replay import Replay
from embodied.streams import Consec, Stateless

LENGTH = 5  # Actions in an episode, which has one transition more.
START = 36  # Steps of two envs after which there are 4 · 6 sequences: training begins.

DEFAULTS = {
    "steps": 200,
    "duration": 0.0,
    "train_ratio": 8.0,
    "log_every": 0.0,
    "report_every": 0.0,
    "save_every": 0.0,
    "envs": 2,
    "eval_envs": 2,
    "eval_eps": 2,
    "report_batches": 1,
    "from_checkpoint": "",
    "from_checkpoint_regex": ".*",
    "usage": {"psutil": True},
    "debug": True,
    "env_timeout": 30.0,
    "env_offset": 0,
    "keep": 3,
    "replica": 0,
    "replicas": 1,
    "batch_size": 4,
    "batch_length": 6,
    "report_length": 3,
    "consec_train": 1,
    "consec_report": 1,
    "replay_context": 1,
    # Read by the parallel program only.
    "episode_timeout": 180.0,
    "actor_addr": "localhost:{auto}",
    "replay_addr": "localhost:{auto}",
    "logger_addr": "localhost:{auto}",
    "actor_batch": -1,
    "actor_threads": 1,
    "agent_process": False,
    "remote_replay": False,
    "remote_envs": False,
}


def make_args(logdir, **changes):
    return elements.Config({**DEFAULTS, "logdir": str(logdir), **changes})


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
        first = self._count == 0
        return {
            "where": np.array([self._index, self._episode, self._count], np.int32),
            "reward": np.float32(0 if first else self._reward),
            "is_first": np.bool_(first),
            "is_last": np.bool_(self._done),
            "is_terminal": np.bool_(self._done),
            "log/count": np.float32(self._count),
        }


class NotingAgent(embodied.RandomAgent):
    """Random agent that records its calls; its state includes a count of updates."""

    def __init__(self, seed=0):
        env = Task()
        spaces = {k: v for k, v in env.obs_space.items() if not k.startswith("log/")}
        super().__init__(spaces, env.act_space, seed=seed)
        self.updates = 0
        self.policies = []  # (mode, envs)
        self.trained = []  # Batches.
        self.reported = []
        self.streams = 0

    def policy(self, carry, obs, mode="train"):
        self.policies.append((mode, obs["where"][:, 0].tolist()))
        return super().policy(carry, obs, mode)

    def train(self, carry, batch):
        self.updates += 1
        self.trained.append(batch)
        carry, outputs, metrics = super().train(carry, batch)
        return carry, outputs, {**metrics, "updates": np.float32(self.updates)}

    def report(self, carry, batch):
        self.reported.append(batch)
        return super().report(carry, batch)

    def stream(self, st):
        self.streams += 1
        return super().stream(st)

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


def make_replay(args, name="replay", **kwargs):
    training = name == "replay"
    length = (
        args.consec_train * args.batch_length
        if training
        else args.consec_report * args.report_length
    )
    return Replay(
        length + args.replay_context,
        directory=f"{args.logdir}/{name}",
        chunksize=64,
        context=args.replay_context,
        name=name,
        **{"capacity": 1000, **kwargs},
    )


def make_stream(args, replay, mode):
    training = mode == "train"
    return Consec(
        Stateless(replay.sample, args.batch_size, mode),
        length=args.batch_length if training else args.report_length,
        consec=args.consec_train if training else args.consec_report,
        prefix=args.replay_context,
        strict=training,
        contiguous=True,
    )


class Parts:
    """The factories of a run; attributes hold the objects that they made last."""

    def __init__(self, logdir, **changes):
        self.args = make_args(logdir, **changes)
        self.agent = None
        self.replay = None
        self.replay_eval = None
        self.logger = None
        self.envs = []  # (index, is_eval) of all environments.
        self.task = Task

    def make_agent(self):
        self.agent = NotingAgent()
        return self.agent

    def make_replay(self, **kwargs):
        self.replay = make_replay(self.args, **kwargs)
        return self.replay

    def make_replay_eval(self):
        self.replay_eval = make_replay(self.args, "replay_eval")
        return self.replay_eval

    def make_env(self, index):
        self.envs.append((index, False))
        return self.task(index)

    def make_env_eval(self, index):
        self.envs.append((index, True))
        return self.task(index, reward=3.0)

    def make_logger(self):
        self.logger = Notes()
        return self.logger

    @property
    def make_stream(self):
        return functools.partial(make_stream, self.args)

    def train(self):
        return embodied.run.train(
            self.make_agent,
            self.make_replay,
            self.make_env,
            self.make_stream,
            self.make_logger,
            self.args,
        )

    def train_eval(self):
        return embodied.run.train_eval(
            self.make_agent,
            self.make_replay,
            self.make_replay_eval,
            self.make_env,
            self.make_env_eval,
            self.make_stream,
            self.make_logger,
            self.args,
        )

    def eval_only(self):
        return embodied.run.eval_only(
            self.make_agent, self.make_env_eval, self.make_logger, self.args
        )


def saved_steps(logdir):
    """Returns the steps of all checkpoints, the oldest first."""
    folder = logdir / "ckpt" / "manifests"
    files = sorted(folder.glob("*.json"))
    return [json.loads(file.read_text())["content"]["meta"]["step"] for file in files]


def newest_step(logdir):
    manifest = Checkpoint(logdir).newest()
    return None if manifest is None else manifest.meta["step"]


def contents(replay):
    """Returns the first steps of all sequences, as (env, episode, position)."""
    if not len(replay):
        return set()
    batch = replay.sample(60 * len(replay), "report")
    return {tuple(where) for where in batch["where"][:, 0].tolist()}


def main(logdir, *changes):
    """Trains as a program of its own, for tests that send it signals.

    Besides settings of the run, `changes` can hold `say_every`, the steps between
    printed lines about progress, and `hang_at`, the step of the run at which the
    policy hangs.
    """
    changes = dict(json.loads(change) for change in changes)
    say_every, hang_at = changes.pop("say_every", 0), changes.pop("hang_at", 0)
    parts = Parts(logdir, **changes)
    logger = Logger(elements.Counter(), [JSONLOutput(logdir)])

    class SayingAgent(NotingAgent):
        calls = 0

        def policy(self, carry, obs, mode="train"):
            self.calls += 1
            step = int(logger.step)
            if say_every and self.calls * len(obs["where"]) % say_every == 0:
                print(f"step {step + len(obs['where'])}", flush=True)
            if hang_at and step >= hang_at:
                print("hanging", flush=True)
                threading.Event().wait(60)
            self.policies.clear()
            self.trained.clear()
            return super().policy(carry, obs, mode)

    parts.make_agent = SayingAgent
    parts.make_env = Task  # Can be sent to the processes of envs.
    parts.make_logger = lambda: logger
    result = parts.train()
    print(f"ended at step {result.step}", flush=True)
