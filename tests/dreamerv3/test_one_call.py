"""Training by one call from Python."""

from __future__ import annotations

import functools
import json
import os

import gymnasium
import numpy as np
import pytest
from program_testing import run_program

import dreamerv3
from dreamerv3.cli.config import ConfigError, read_config
from dreamerv3.cli.factories import EnvFactory
from dreamerv3.cli.scripts import SCRIPTS, RunError
from embodied.base import TaskError
from embodied.envs.grid import Grid

# Quick: in this process, and without networks.
QUICK = {
    "script": "train",
    "random_agent": True,
    "envs": 1,
    "outputs": ["jsonl"],
    "batch_size": 2,
    "batch_length": 4,
    "report_length": 4,
}


class Coin(gymnasium.Env):
    """Episodes of four steps with a reward for action 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        obs = np.full(2, self.count / self.length, np.float32)
        return obs, float(action == 1), False, self.count == self.length, {}


class Plain(gymnasium.ObservationWrapper):
    """A wrapper whose arguments Gymnasium does not record."""

    def observation(self, observation):
        return observation


def seeded(seed):
    return Grid("reach", seed=seed)


SOURCES = {
    "id": ("CartPole-v1", "gym_CartPole-v1", "obs"),
    "task": ("grid_reach", "grid_reach", "image"),
    "named": ("test_one_call:Coin", "test_one_call:Coin", "obs"),
    "class": (Coin, "test_one_call:Coin", "obs"),
    "partial": (functools.partial(Coin, length=2), "test_one_call:Coin", "obs"),
    "function": (seeded, "test_one_call:seeded", "image"),
    "lambda": (lambda: Coin(3), "test_one_call:lambda", "obs"),
    "env": (Grid("reach"), "embodied.envs.grid:Grid", "image"),
    "gym env": (Coin(), "test_one_call:Coin", "obs"),
    "spec": (gymnasium.make("CartPole-v1"), "gym_CartPole-v1", "obs"),
    "wrapped": (
        Plain(gymnasium.make("CartPole-v1")),
        "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        "obs",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_environments_of_every_kind_are_taken(name, tmp_path):
    env, task, key = SOURCES[name]
    policy = dreamerv3.train(env, 60, tmp_path, **QUICK)
    assert policy.step == 60
    assert policy.logdir == str(tmp_path)
    assert key in policy.obs_space
    assert read_config(tmp_path / "config.yaml").task == task
    rows = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert all(np.isfinite(json.loads(row)["episode/score"]) for row in rows)
    obs = {k: np.zeros(x.shape, x.dtype) for k, x in policy.obs_space.items()}
    assert policy.act(obs)["action"] in policy.act_space["action"]


def test_an_id_that_only_this_process_knows_reaches_the_others(tmp_path):
    gymnasium.register("OneCallCoin-v0", lambda: Coin(5))
    try:
        flags = {
            **QUICK,
            "run.debug": False,
        }  # The environment runs in another process.
        policy = dreamerv3.train("OneCallCoin-v0", 20, tmp_path, **flags)
    finally:
        del gymnasium.registry["OneCallCoin-v0"]
    assert policy.step == 20


def test_keys_may_be_short_nested_or_whole(tmp_path):
    dreamerv3.train(
        Coin,
        10,
        tmp_path,
        "1m",
        **QUICK,
        agent={"opt": {"lr": 1e-3}},
        **{"run.log_every": 7, r".*\.layers": 2},
        seed=3,
    )
    config = read_config(tmp_path / "config.yaml")
    assert config.agent.opt.lr == 1e-3
    assert config.run.log_every == 7
    assert config.run.envs == 1
    assert config.agent.policy.layers == config.agent.value.layers == 2
    assert config.agent.dyn.rssm.deter == 512
    assert config.seed == 3


def test_arguments_of_an_environment_keep_their_type(tmp_path):
    gymnasium.register("OneCallCoin-v1", lambda version: Coin(int(version + "0")))
    try:
        env = gymnasium.make("OneCallCoin-v1", version="2")
        dreamerv3.train(env, 10, tmp_path, **QUICK)
    finally:
        del gymnasium.registry["OneCallCoin-v1"]
    assert read_config(tmp_path / "config.yaml").env.gym.kwargs.version == "2"


def test_files_are_as_private_as_the_configuration_says(tmp_path):
    before = os.umask(0o022)
    try:
        for access, mode in (("user", 0o600), ("group", 0o640)):
            logdir = tmp_path / access
            dreamerv3.train(Coin, 10, logdir, logdir_access=access, **QUICK)
            assert (logdir / "metrics.jsonl").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_blocks_come_after_the_size(tmp_path):
    dreamerv3.train(Coin, 10, tmp_path, configs=["debug"], **QUICK)
    assert read_config(tmp_path / "config.yaml").agent.dyn.rssm.deter == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"enws": 3}, "--enws 3: there is no such key. Did you mean --run.envs"),
        (
            {"repeat": 3},
            "repeat: expected one key, but it may be env.atari",
        ),
        ({"envs": 0}, "run.envs: expected at least 1, got 0"),
        ({"size": "13m"}, "--configs size13m: expected one or more of"),
        ({"script": "suite"}, "script: expected one of parallel, train, train_eval"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message, tmp_path):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        dreamerv3.train(Coin, 10, tmp_path / "run", **{**QUICK, **flags})
    assert not (tmp_path / "run").exists()


def test_what_is_no_environment_is_refused(tmp_path):
    with pytest.raises(TaskError, match="test_one_call:lambda to return an embodied"):
        dreamerv3.train(lambda: 3, 10, tmp_path, **QUICK)
    with pytest.raises(TaskError, match="NoSuch-v0"):
        dreamerv3.train("NoSuch-v0", 10, tmp_path, **QUICK)


def test_a_vector_environment_is_refused_with_what_to_give_instead(tmp_path):
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    with pytest.raises(TypeError, match="lambda num_envs: gymnasium"):
        dreamerv3.train(envs, 8, tmp_path, **QUICK)
    envs.close()


def test_a_run_that_is_stopped_before_its_first_checkpoint_has_no_policy(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(SCRIPTS, "train", lambda config, make: None)
    with pytest.raises(RunError, match="before its first checkpoint"):
        dreamerv3.train(Coin, 8, tmp_path, **QUICK)


@pytest.mark.parametrize("env", ["CartPole-v1", Coin])
def test_environments_step_together_if_that_is_asked_for(env, tmp_path, monkeypatch):
    found = []

    def script(config, make):
        batch = EnvFactory(config, make).make_batch([0, 1])
        found.append(len(batch))
        batch.close()

    monkeypatch.setitem(SCRIPTS, "train", script)
    with pytest.raises(RunError):
        dreamerv3.train(env, 8, tmp_path, **{**QUICK, "env.gym.vector": "sync"})
    assert found == [2]


def test_an_environment_that_cannot_be_sent_is_refused(tmp_path):
    env = Coin()
    env.lock = __import__("threading").Lock()
    with pytest.raises(TypeError, match="Give a function that makes the environment"):
        dreamerv3.train(env, 10, tmp_path, **QUICK)


# A script without a `__main__` guard, with a class that other processes cannot import.
SCRIPT = """
import sys
import gymnasium, numpy as np, dreamerv3

class Coin(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])
    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        assert self.action_space.contains(action), action
        self.count += 1
        return np.ones(2, np.float32), float(action[0]), False, self.count == 5, {}

policy = dreamerv3.train(
    Coin, 120, sys.argv[1], configs=["debug"], batch_size=2, batch_length=4,
    report_length=4, imag_length=3, envs=2, eval_envs=0, report_every=0,
    outputs=["jsonl"], train_ratio=2,
)
print("STEP", policy.step)
print("ACTION", policy.act({"obs": np.zeros(2, np.float32)})["action"].tolist())
"""


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_script_trains_in_parallel_and_gets_the_policy(tmp_path):
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    text = run_program(SCRIPT, str(tmp_path), **flags)
    step = int(text.partition("STEP ")[2].split()[0])
    assert step >= 120
    first, second = json.loads(text.partition("ACTION ")[2].splitlines()[0])
    assert first in range(2)
    assert second in range(3)
    assert read_config(tmp_path / "config.yaml").script == "parallel"
    assert (tmp_path / "ckpt" / "manifest.json").exists()


# Runs a cell as notebooks do: in an asyncio loop, and without a source file.
NOTEBOOK = """
import asyncio, sys

async def run(cell):
    exec(compile(cell, "<cell>", "exec"), globals())

asyncio.run(run(sys.argv[2]))
"""


@pytest.mark.timeout(120)
def test_a_cell_of_a_notebook_trains_in_parallel(tmp_path):
    cell = SCRIPT.replace("train_ratio=2", "train_ratio=2, random_agent=True")
    text = run_program(NOTEBOOK, str(tmp_path), cell)
    assert int(text.partition("STEP ")[2].split()[0]) >= 120
    assert "ACTION [" in text
