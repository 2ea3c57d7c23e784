"""Tasks and logdirs for tests that load agents from checkpoints."""

from __future__ import annotations

import agent_testing as testing
import numpy as np
from dreamer_testing import make_agent, make_config

from dreamerv3.cli.logdir import prepare_logdir
from embodied import Env
from embodied.checkpoint import Checkpoint

# Actions that a policy returns: `reset` is for environments only.
ACT_SPACE = {k: v for k, v in testing.ACT_SPACE.items() if k != "reset"}


class Task(Env):
    """Episodes of five steps with the spaces of `agent_testing` and seeded values."""

    obs_space = testing.OBS_SPACE
    act_space = testing.ACT_SPACE

    def __init__(self, seed=0):
        self._rng = np.random.default_rng(seed)
        self._count = 5

    def step(self, action):
        first = bool(action["reset"]) or self._count == 5
        self._count = 0 if first else self._count + 1
        sampled = {
            key: space.sample(self._rng)
            for key, space in self.obs_space.items()
            if key not in testing.SIGNALS
        }
        return {
            **sampled,
            "reward": np.float32(0 if first else 1),
            "is_first": np.bool_(first),
            "is_last": np.bool_(self._count == 5),
            "is_terminal": np.bool_(False),
        }


class GoldenTask(Task):
    """The same task with the spaces of the golden arrays."""

    obs_space = testing.GOLDEN_OBS_SPACE
    act_space = testing.GOLDEN_ACT_SPACE


def save_run(logdir, *argv, step=7, without=()):
    """Makes a logdir with the checkpoint of an untrained agent."""
    config = make_config(
        *("--logdir", str(logdir), "--task", "inference_testing:Task"), *argv
    )
    agent = make_agent(*argv)
    data = {key: x for key, x in agent.save().items() if key not in without}
    prepare_logdir(config)
    Checkpoint(logdir).save({"agent": data}, {"step": step})
    return agent
