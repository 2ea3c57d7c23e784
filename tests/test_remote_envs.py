"""The example whose environments run in separate programs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "remote_envs.sh"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_example_ends_with_the_run_and_has_steps_of_both_hosts(tmp_path):
    flags = ["--configs", "debug", "--random_agent", "True", "--task", "dummy_disc"]
    flags += ["--run.steps", "20000", "--run.log_every", "0.5"]
    flags += ["--run.report_every", "0", "--logger.outputs", "jsonl"]
    environ = {**os.environ, "PYTHON": sys.executable}
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    result = subprocess.run(
        [str(EXAMPLE), str(tmp_path / "logdir"), *flags],
        cwd=EXAMPLE.parents[1],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Both env hosts have ended with the run." in result.stdout
    lines = (tmp_path / "logdir/run/metrics.jsonl").read_text().splitlines()
    envs = [json.loads(line).get("parallel/envs", 0) for line in lines]
    assert max(envs) == 4
