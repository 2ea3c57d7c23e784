"""Scripts in the reference's style run, and their logdirs are like those of any run."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest

import dreamerv3
from dreamerv3.cli.config import read_config
from dreamerv3.main import main

SCRIPT = pathlib.Path(__file__).with_name("reference_manner.py")


def run_script(script, logdir):
    subprocess.run(
        [sys.executable, SCRIPT, script, logdir],
        check=True,
        timeout=280,
        capture_output=True,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "script", [pytest.param("train", marks=pytest.mark.slow), "parallel"]
)
def test_the_script_trains_and_its_policy_can_be_used(script, tmp_path, capsys):
    logdir = tmp_path / "run"
    run_script(script, logdir)
    config = read_config(logdir / "config.yaml")
    assert config.agent.dyn.rssm.deter == 8
    policy = dreamerv3.load(logdir, platform="cpu")
    assert policy.step >= 200
    obs = {k: np.zeros(x.shape, x.dtype) for k, x in policy.obs_space.items()}
    assert policy.act(obs)["action"] in policy.act_space["action"]
    # Agents do not know their task, so the logdir does not name it.
    arguments = ["--script", "eval_only", "--logdir", str(logdir), "--run.envs", "1"]
    assert main(arguments) == 2
    assert "task: expected SUITE_NAME" in capsys.readouterr().err
    assert main([*arguments, "--task", "gym_CartPole-v1"]) == 0
    assert "mean score" in capsys.readouterr().out


def test_names_of_the_reference_are_there():
    import embodied.jax

    assert issubclass(dreamerv3.Agent, embodied.jax.Agent)
    assert embodied.selectors is embodied.replay.selectors
    assert embodied.limiters.SamplesPerInsert
    with pytest.raises(AttributeError, match="'Agnet'"):
        _ = embodied.jax.Agnet
