"""A logdir of an earlier version resumes.

`tests/golden/old_logdir` was written by commit 2f63a83, before transport, replay and
saving were redesigned: a parallel run of a random agent, 330 steps.
"""

import pathlib
import shutil

from parallel_testing import LEAN, Program, Saved, read_lines

OLD = pathlib.Path(__file__).parents[1] / "golden" / "old_logdir"
STEPS = 330
FLAGS = ["--configs", "debug", "--script", "parallel", "--task", "gym_CartPole-v1"]
FLAGS += ["--random_agent", "True", "--run.envs", "2", *LEAN]
FLAGS += ["--run.train_ratio", "1", "--logger.outputs", "jsonl"]


def test_a_run_goes_on_from_a_logdir_of_before_the_redesign(tmp_path):
    logdir = tmp_path / "run"
    shutil.copytree(OLD, logdir)
    with Program(*FLAGS, "--run.steps", "600", "--logdir", logdir) as program:
        assert program.wait() == 0, program.output()
        told = program.output()
    assert f"Continuing at step {STEPS}" in told
    assert "The replay has 312 sequences from before." in told
    assert Saved(logdir).step >= 600
    before, after = (read_lines(x / "scores.jsonl") for x in (OLD, logdir))
    kept = [line for line in before if line["step"] <= STEPS]
    assert after[: len(kept)] == kept and len(after) > len(before) > len(kept) > 0
