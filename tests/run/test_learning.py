"""Learning on a CPU, with the named configurations, in a process of their own."""

import json
import resource
import subprocess
import sys

import pytest

CORES, MINUTES = 2, 5  # What learning may take; compilation is part of it.


def run(logdir, *argv):
    """Runs the program, and returns all scores and the processor's seconds."""
    command = [sys.executable, "-m", "dreamerv3.main", "--logdir", str(logdir), *argv]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    lines = (logdir / "scores.jsonl").read_text().splitlines()
    scores = [json.loads(line)["episode/score"] for line in lines]
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return scores, seconds


def mean(scores):
    return sum(scores) / len(scores)


@pytest.mark.slow
@pytest.mark.timeout(3000)  # On a machine that has other work to do.
@pytest.mark.parametrize("script", ["train", "parallel"])
@pytest.mark.parametrize(
    ("name", "random", "learned", "recent"),
    [("grid", 0.15, 0.8, 100), ("cartpole", 30, 100, 20)],
)
def test_a_small_agent_learns_in_minutes(
    tmp_path, script, name, random, learned, recent
):
    flags = ["--configs", name, "--script", script]
    untrained = ["--random_agent", "True", "--run.train_ratio", "0.1"]
    scores, _ = run(tmp_path / "random", *flags, *untrained)
    assert mean(scores) <= random, "there is something to learn"
    scores, seconds = run(tmp_path / "learned", *flags)
    assert mean(scores[-recent:]) >= learned
    assert seconds <= CORES * MINUTES * 60
