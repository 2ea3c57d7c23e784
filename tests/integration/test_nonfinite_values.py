"""Environments that return NaN and infinity, which must not end a run."""

import json
import os
import re
import subprocess
import sys

import pytest

ENV = """
import gymnasium
import numpy as np

class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
        {"vector": gymnasium.spaces.Box(-1, 1, (3,), np.float32)}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.count = 0
        return {"vector": np.zeros(3, np.float32)}, {}

    def step(self, action):
        self.count += 1
        vector = np.ones(3, np.float32)
        vector[1] = {5: np.nan, 7: np.inf}.get(self.count, 1)
        reward = np.nan if self.count == 9 else 1.0
        return {"vector": vector}, reward, False, self.count == 20, {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train", "parallel"])
def test_they_are_reported_replaced_and_counted(tmp_path, script):
    (tmp_path / "broken_env.py").write_text(ENV)
    logdir = tmp_path / "run"
    command = [sys.executable, "-m", "dreamerv3.main", "--configs", "debug"]
    command += ["--task", "broken_env:Broken", "--script", script]
    command += ["--logdir", str(logdir), "--logger.outputs", "jsonl"]
    command += ["--run.steps", "300", "--run.envs", "2", "--run.eval_envs", "0"]
    command += ["--run.log_every", "1", "--run.report_every", "0"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    for key in ("vector", "reward"):
        warned = re.findall(rf"Observation '{key}' of environment ([\d, ]+) is", told)
        assert sorted(", ".join(warned).split(", ")) == ["0", "1"]
    assert "A reward in the replay is not finite (nan)" in told
    lines = (logdir / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert max(line.get("train/nonfinite/vector", 0) for line in metrics) > 2
    assert max(line.get("train/nonfinite/reward", 0) for line in metrics) >= 1
    key = "train/opt/nonfinite"
    skipped = [line[key] for line in metrics if key in line]
    assert skipped and not any(skipped)
