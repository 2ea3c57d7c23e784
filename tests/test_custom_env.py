"""The example of a custom environment runs, trains and learns."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from program_testing import run_example

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "custom_env.py"
TINY = [
    *("--configs", "debug", "--run.steps", "100", "--run.report_every", "0"),
    *("--batch_size", "4", "--agent.imag_length", "3", "--logger.outputs", "jsonl"),
]


@pytest.mark.slow
@pytest.mark.timeout(400)  # Most of it for the first compilation.
def test_example_trains(tmp_path):
    shown = run_example(EXAMPLE, tmp_path, "--logdir", tmp_path / "run", *TINY)
    assert "environments of custom_env:Lights" in shown
    assert "100 steps and 5 updates" in shown
    metrics = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert any("train/loss/policy" in line for line in metrics)


def test_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60


@pytest.mark.slow
@pytest.mark.timeout(1200)  # A minute or two on a machine without other work.
def test_example_learns(tmp_path):
    command = [sys.executable, EXAMPLE, "--logdir", tmp_path, "--logger.outputs"]
    subprocess.run([*command, "jsonl"], capture_output=True, check=True)
    lines = (tmp_path / "scores.jsonl").read_text().splitlines()
    scores = [json.loads(line)["episode/score"] for line in lines]
    assert sum(scores[:100]) / 100 < 0.3
    assert sum(scores[-100:]) / 100 > 0.9
