"""A whole parallel run from a script: what it writes, and how it goes on."""

import re
import shutil

import numpy as np
import pytest
from parallel_testing import Program, Saved, metrics, read_lines, small
from tiny_testing import EVAL_SCORE, LENGTH, TRAIN_SCORE, Parts

# As users write it: no `__main__` guard, and no import of the parallel package.
SCRIPT = """
import sys
import embodied
from tiny_testing import Parts
parts = Parts(sys.argv[1:])
embodied.run.parallel.combined(*parts.seven(), parts.args)
print("The script goes on.")
"""

NAMES = [
    *("fps/env", "fps/policy", "fps/train", "train/updates"),
    *("report/batch_length", "eval/reward_max", "replay/limiter/ahead"),
    *("replay/total_inserts", "replay_eval/total_inserts"),
    *("parallel/ep_starts", "parallel/ep_states", "parallel/envs"),
    *("timer/learner/train", "timer/actor/policy", "timer/replay/sample"),
    *("usage/logger/psutil/proc_ram_gb", "usage/replay/psutil/proc_ram_gb"),
    *("episode/score", "eval_episode/score", "epstats/log/count/max"),
    "parallel/updates_per_second",
]

LINKS = [
    *("server/actor", "server/replay", "server/logger"),
    *("client/actor_replay", "client/actor_logger", "client/replay_logger"),
    *("client/learner_samples", "client/learner_replay", "client/learner_logger"),
]
CALLS = [f"{link}/calls" for link in LINKS]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def finished(script, tmp_path_factory):
    """The logdir of a run that has ended, and what it printed."""
    logdir = tmp_path_factory.mktemp("run")
    with Program(*small(logdir, steps=10**9), script=script) as program:
        program.wait_for_step(logdir, 600)
        program.wait_for_metrics(logdir, is_complete)
        program.interrupt()
        assert program.wait() == 0, program.output()
        return logdir, program.output()


def is_complete(found):
    """Whether all metrics are there; the first counts of calls may be zero."""
    return set(NAMES) <= set(found) and all(sum(found.get(x, [])) for x in CALLS)


class TestFirstRun:
    def test_it_says_what_it_does(self, finished):
        shown = finished[1]
        assert "Starting: logger, replay, agent, 3 env workers." in shown
        assert re.search(r"Addresses: actor localhost:\d+, replay localhost:", shown)
        assert re.search(r"The replay has 3\d sequences: training begins\.", shown)
        assert re.search(r"Step \d+, \d+ steps/s\. (Now|Bottleneck): ", shown)
        assert shown.endswith("The script goes on.\n")
        assert "WARNING" not in shown and "Traceback" not in shown

    def test_scores_of_training_and_evaluation_are_apart(self, finished):
        found = metrics(finished[0])
        assert set(found["episode/score"]) == {TRAIN_SCORE}
        assert set(found["eval_episode/score"]) == {EVAL_SCORE}
        assert set(found["episode/length"]) == {LENGTH}
        assert set(found["epstats/log/count/max"]) == {LENGTH}
        scores = read_lines(finished[0] / "scores.jsonl")
        assert {tuple(line) for line in scores} == {("step", "episode/score")}
        assert {line["episode/score"] for line in scores} == {TRAIN_SCORE}

    def test_steps_are_those_of_training_envs(self, finished):
        found = metrics(finished[0])
        trained = len(found["episode/score"]) * (LENGTH + 1)
        assert trained <= found["step"][-1] <= trained + 3 * (LENGTH + 1)
        assert found["step"] == sorted(found["step"])
        assert Saved(finished[0]).step >= 600

    @pytest.mark.parametrize("name", NAMES)
    def test_it_logs(self, finished, name):
        assert np.isfinite(metrics(finished[0])[name]).all()

    @pytest.mark.parametrize("name", CALLS)
    def test_it_logs_what_goes_over_connections(self, finished, name):
        assert sum(metrics(finished[0])[name]) > 0

    def test_reports_are_of_their_own_samples(self, finished):
        found = metrics(finished[0])
        assert set(found["report/batch_length"]) == {4 + 1}
        assert set(found["train/batch_length"]) == {8 + 1}
        assert set(found["report/reward_max"]) == {1.0}
        assert set(found["eval/reward_max"]) == {3.0}

    def test_the_parts_of_the_checkpoint_are_of_one_moment(self, finished):
        check_consistency(finished[0])

    def test_the_ratio_holds(self, finished):
        limiter = Saved(finished[0])["limiter"]
        # 8 trained steps per step, in sequences of 8, make one sample per insert. The
        # limiter tolerates 4 batches of 4 samples.
        assert abs(limiter["samples"] - limiter["inserts"]) <= 4 * 4 + 3


def check_consistency(logdir):
    """Checks that the counts of the newest checkpoint agree; returns it."""
    saved = Saved(logdir)
    limiter, updates = saved["limiter"], saved["agent"]["updates"]
    assert limiter["samples"] == 4 * updates, "what was drawn is what was trained on"
    assert saved["logger"]["step"] == saved.step
    # Batches of the actor may be on their way to the replay or the logger, and a busy
    # machine tells these two of a save some milliseconds apart.
    inserts = saved["replay"]["counters"]["inserts"]
    assert abs(inserts - saved.step) <= 60
    # Training begins with 4 · 8 sequences of 9 steps, from both envs or from one if
    # the other starts late.
    assert 4 * 8 + 8 <= inserts - limiter["inserts"] <= 4 * 8 + 2 * 8 + 2
    return saved


def test_the_same_logdir_continues(finished, script, tmp_path):
    logdir = tmp_path / "run"
    shutil.copytree(finished[0], logdir)
    before, first_lines = check_consistency(logdir), len(metrics(logdir)["step"])
    steps = before.step + 200
    with Program(*small(logdir, steps=steps), script=script) as program:
        assert program.wait() == 0, program.output()
        shown = program.output()
    saved = check_consistency(logdir)
    assert f"Continuing at step {before.step}, from checkpoint {before.tag}" in shown
    assert "The replay has" in shown and "from before" in shown
    assert before.step >= 200 and saved.step >= steps
    found = metrics(logdir)
    assert found["step"][first_lines] >= before.step
    assert found["step"][first_lines] < before.step + 200
    assert saved["agent"]["updates"] > before["agent"]["updates"]
    assert min(found["train/updates"]) < before["agent"]["updates"]
    # No sequence of the replay spans a restart of the run or of an env.
    parts = Parts(small(logdir))
    replay = parts.make_replay()
    replay.load(saved["replay"])
    where = replay.sample(400, "report")["where"].astype(int)
    position = where[..., 1] * (LENGTH + 1) + where[..., 2]
    assert (np.diff(position, axis=1) == 1).all()
