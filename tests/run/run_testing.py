"""A small task, an agent that records its calls, and factories for the loops."""

from __future__ import annotations

import functools
import json
import threading

import elements
from loop_testing import SETTINGS, CountingAgent, Notes, Task, make_replay, make_stream

import embodied
import embodied.run
from embodied.checkpoint import Checkpoint
from embodied.logger import JSONLOutput, Logger

START = 36  # Steps of two envs after which there are 4 · 6 sequences: training begins.

DEFAULTS = {
    **SETTINGS,
    "eval_envs": 2,
    "eval_eps": 2,
    "from_checkpoint_regex": ".*",
    "usage": {"psutil": True},
    "debug": True,
    "env_timeout": 30.0,
    "batch_size": 4,
    "batch_length": 6,
    "report_length": 3,
}


def make_args(logdir, **changes):
    return elements.Config({**DEFAULTS, "logdir": str(logdir), **changes})


class NotingAgent(CountingAgent):
    """Agent that also records its calls."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.policies = []  # (mode, envs)
        self.trained = []  # Batches.
        self.reported = []
        self.streams = 0

    def policy(self, carry, obs, mode="train"):
        self.policies.append((mode, obs["where"][:, 0].tolist()))
        return super().policy(carry, obs, mode)

    def train(self, carry, batch):
        self.trained.append(batch)
        return super().train(carry, batch)

    def report(self, carry, batch):
        self.reported.append(batch)
        return super().report(carry, batch)

    def stream(self, st):
        self.streams += 1
        return super().stream(st)


class FailingAgent(NotingAgent):
    """Agent whose sixth update fails."""

    def train(self, carry, batch):
        if self.updates == 5:
            raise FloatingPointError("not a number")
        return super().train(carry, batch)


def make_named_replay(args, name="replay", **kwargs):
    """Returns a buffer that is saved in the folder of its name."""
    folder = f"{args.logdir}/{name}"
    kwargs = {"directory": folder, "chunksize": 64, "name": name, **kwargs}
    return make_replay(args, name == "replay", **kwargs)


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
        self.replay = make_named_replay(self.args, **kwargs)
        return self.replay

    def make_replay_eval(self):
        self.replay_eval = make_named_replay(self.args, "replay_eval")
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
