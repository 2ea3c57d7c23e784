"""Learning on a CPU with the named configurations, each run in its own process."""

import json
import math
import resource
import subprocess
import sys

import pytest

CORES, MINUTES = 2, 5  # Budget of a run, compilation included.


def run(logdir, *argv):
    """Runs the program; returns all scores and the seconds of CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start(logdir, *argv)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return read_scores(logdir / "scores.jsonl", "episode/score"), seconds


def start(logdir, *argv):
    command = [sys.executable, "-m", "dreamerv3.main", "--logdir", str(logdir), *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def read_scores(path, name):
    lines = map(json.loads, path.read_text().splitlines())
    return [line[name] for line in lines if name in line]


def mean(scores):
    return sum(scores) / len(scores)


@pytest.mark.slow
@pytest.mark.timeout(3000)  # Seconds; allows for a busy machine.
@pytest.mark.parametrize("script", ["train", "parallel"])
@pytest.mark.parametrize(
    ("name", "random", "learned", "recent"),
    [("grid", 0.15, 0.8, 100), ("cartpole", 30, 100, 20), ("pendulum", -900, -400, 10)],
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


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_programs_give_an_agent_the_same_score(tmp_path):
    flags = ["--configs", "grid", "--logger.outputs", "jsonl"]
    start(tmp_path / "trained", *flags, "--run.steps", "5e3")
    # The agent does not change from here on: its learning rate is negligible.
    flags += ["--run.from_checkpoint", str(tmp_path / "trained" / "ckpt")]
    flags += [
        "--agent.opt.lr",
        "1e-12",
        "--run.train_ratio",
        "0.1",
        "--run.eval_envs",
        "4",
    ]
    flags += ["--run.steps", "6e3", "--run.report_every", "1"]
    found = {}
    for script, episodes in [("eval_only", 400), ("train_eval", 40), ("parallel", 1)]:
        logdir = tmp_path / script
        more = ["--script", script, "--run.eval_eps", str(episodes)]
        start(logdir, *flags, *more)
        found[script] = read_scores(logdir / "metrics.jsonl", "eval_episode/score")
        assert len(found[script]) >= 200
    rate = mean([score for scores in found.values() for score in scores])
    assert 0.2 < rate < 0.98, "it has learned, and is not beyond doubt"
    for scores in found.values():
        error = math.sqrt(rate * (1 - rate) / len(scores))
        assert abs(mean(scores) - rate) < 4 * error, {
            k: mean(v) for k, v in found.items()
        }
