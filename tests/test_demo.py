"""`make demo`, with fewer steps."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FEW = "--run.steps 400 --run.train_ratio 16 --agent.imag_length 3"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_ends_by_saying_where_everything_is(tmp_path):
    logdir = tmp_path / "demo"
    command = [
        "make",
        "--no-print-directory",
        "demo",
        f"LOGDIR={logdir}",
        f"FLAGS={FEW}",
    ]
    # Skip the installation: this Python has all dependencies.
    command += [f"BIN={pathlib.Path(sys.executable).parent}", "-o", ".venv/.installed"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "mean score of the last" in done.stdout
    told = done.stdout[done.stdout.index("Written to") :]
    assert "the policy" in told
    assert f"--script eval_only --logdir {logdir} plays" in told
    for name in ("config.yaml", "metrics.jsonl", "scores.jsonl", "ckpt", "replay"):
        assert name in told
        assert (logdir / name).exists()
    assert told.splitlines()[-1] == f"Written: {logdir / 'scores.png'}"
    assert (logdir / "scores.png").read_bytes().startswith(b"\x89PNG")
