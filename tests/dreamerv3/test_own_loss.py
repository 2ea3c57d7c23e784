"""The example of a user's own loss trains, and losses without a scale are errors."""

from __future__ import annotations

import json
import pathlib

import agent_testing as testing
import jax.numpy as jnp
import pytest
from dreamer_testing import make_config, train_rounds
from program_testing import run_example

import dreamerv3
from dreamerv3.cli.config import ConfigError, load_config
from dreamerv3.main import main

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "own_loss.py"
TINY = [
    *("--configs", "debug", "--run.steps", "100", "--run.report_every", "0"),
    *("--batch_size", "4", "--agent.imag_length", "3", "--logger.outputs", "jsonl"),
    *("--task", "gym_CartPole-v1"),
]


@pytest.mark.slow
@pytest.mark.timeout(400)  # Most of it for the first compilation.
def test_example_trains(tmp_path):
    run_example(EXAMPLE, tmp_path, "--logdir", tmp_path / "run", *TINY)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line).get("train/loss/smooth") for line in lines]
    assert any(loss and loss > 0 for loss in losses)
    policy = dreamerv3.load(tmp_path / "run", platform="cpu")
    assert policy.step >= 100, "its policy can be used without the loss"


def agent_with(losses, *flags):
    class Own(dreamerv3.Agent):
        extra_losses = staticmethod(losses)

    config = make_config("--batch_size", "2", *flags)
    return Own(testing.OBS_SPACE, testing.ACT_SPACE, config, compiler=testing.QUICK)


def zeros(params, states, data):
    return {"mine": jnp.zeros(data["is_first"].shape)}


@pytest.mark.parametrize(
    ("losses", "flags", "message"),
    [
        (zeros, (), "Loss 'mine' expected a scale in agent.loss_scales"),
        (lambda *_: {"rew": 0}, (), "expected new names, got 'rew' again"),
        (lambda *_: {"mine": jnp.zeros(3)}, (), r"'mine' of shape \(2, 4\)"),
    ],
)
def test_a_loss_that_does_not_fit_is_an_error(losses, flags, message):
    agent = agent_with(losses, *flags)
    with pytest.raises(ValueError, match=message.replace("agent.loss", r"agent\.loss")):
        train_rounds(agent, 1, 2)


def test_a_scale_without_a_loss_is_an_error(tmp_path, capsys):
    flags = ["--agent.loss_scales.mine", "2", "--task", "gym_CartPole-v1"]
    assert load_config(flags, {}).agent.loss_scales.mine == 2.0
    code = main([*TINY, *flags, "--logdir", str(tmp_path)])
    assert code == 2
    assert "agent.loss_scales: expected the names of losses" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="expected a number of at least 0, got '-1'"):
        load_config(["--agent.loss_scales.mine", "-1"], {})
