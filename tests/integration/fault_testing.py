"""Runs that are disturbed, and what must hold of them whatever happened."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
from collections import Counter

import numpy as np
from fault_envs import LENGTH
from parallel_testing import WAIT, Program, last_step, metrics, read_lines, wait_until

from embodied.checkpoint import Checkpoint
from embodied.checkpoint.manifest import Manifest
from embodied.replay import Replay
from embodied.replay.selectors import Fifo

ENVS = 3
BATCH, BATCH_LENGTH, CONTEXT = 4, 8, 1
RATIO = 1.0  # Samples per insert.
TOLERANCE = 4 * BATCH
DRAWN_AHEAD = 5  # Batches that the learner has asked for, or works on.
INFLIGHT = 4  # Batches of steps on their way to the replay, or to the logger.
# Samples by which training and collecting may differ at any moment.
IN_BETWEEN = TOLERANCE + (DRAWN_AHEAD + 1) * BATCH + RATIO * (INFLIGHT + 1) * ENVS
# Steps until there are as many sequences as a batch has steps: training begins.
START = BATCH * BATCH_LENGTH + ENVS * (BATCH_LENGTH + CONTEXT - 1)
WINDOW = 1000  # Steps over which both are compared.
SLOW_WINDOW = 50  # The same in a run that saves all the time.

FLAGS = ["--configs", "debug", "--script", "parallel", "--random_agent", "True"]
FLAGS += ["--logger.outputs", "jsonl", "--run.steps", "1e9", "--run.keep", "1000"]
FLAGS += ["--run.envs", str(ENVS), "--run.eval_envs", "0", "--replay.size", "1e6"]
FLAGS += ["--run.log_every", "0.25", "--run.report_every", "3"]
FLAGS += ["--run.save_every", "0.4"]
FLAGS += ["--batch_size", str(BATCH), "--batch_length", str(BATCH_LENGTH)]
FLAGS += ["--report_length", "4", "--replay_context", str(CONTEXT)]
FLAGS += ["--run.train_ratio", str(RATIO * BATCH_LENGTH)]


class Run(Program):
    """A run in the environments of `fault_envs`, until it is told to end.

    Args:
      logdir: of the run.
      *flags: more flags.
      task: class of the environments.
      options: of the program.
    """

    def __init__(self, logdir, *flags, task="Counting", **options):
        self.logdir = pathlib.Path(logdir)
        task = ["--task", f"fault_envs:{task}", "--logdir", str(logdir)]
        super().__init__(*FLAGS, *task, *flags, **options)

    def pid_of(self, role):
        """Waits until a role has a process, and returns its number."""
        wait_until(lambda: role in self.roles() or not self.running, WAIT, self)
        assert self.running, self.output()
        return self.roles()[role].pid

    def kill(self, *roles):
        """Kills roles, and waits until they are back."""
        before = {role: self.pid_of(role) for role in roles}
        seen = {role: self.restarts(role) for role in roles}
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        for role, pid in before.items():
            wait_until(
                lambda role=role: self.restarts(role) > seen[role] or not self.running,
                WAIT,
                self,
            )
            assert self.pid_of(role) != pid

    def restarts(self, role):
        """How often the launcher has said that it restarts a role."""
        return self.output().count(f"Role {role} is restarted:")

    def goes_on(self, seconds=WAIT):
        """Waits until all environments are stepped and the agent is trained."""
        step = max(metrics(self.logdir).get("step", [0]))
        lines = len(read_lines(self.logdir / "metrics.jsonl"))

        def is_on():
            new = read_lines(self.logdir / "metrics.jsonl")[lines:]
            updates = [line.get("parallel/updates_per_second", 0) > 0 for line in new]
            envs = [line["parallel/envs"] for line in new if "parallel/envs" in line]
            on = sum(updates) >= 2 and last_step(self.logdir) > step
            return on and envs[-1:] == [ENVS]

        wait_until(lambda: is_on() or not self.running, seconds, self)
        assert self.running, self.output()

    def stays(self, seconds):
        """Lets the run be for a while, which it does not end in."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        assert self.running, self.output()

    def saves(self):
        """Waits until two more checkpoints are committed: the second began later."""
        seen = len(manifest_paths(self.logdir))
        wait_until(
            lambda: len(manifest_paths(self.logdir)) >= seen + 2 or not self.running,
            WAIT,
            self,
        )
        assert self.running, self.output()

    def addresses(self):
        """Waits for the ports of actor, replay and logger, and returns them."""
        self.wait_for("Addresses: ")
        (line,) = re.findall(r"^Addresses: .*$", self.output(), re.MULTILINE)
        return [int(port) for port in re.findall(r"localhost:(\d+)", line)]

    def leave(self):
        """Tells the run to end, which it does well."""
        self.terminate()
        assert self.wait() == 0, self.output()

    def crash(self):
        """Kills the launcher; its children must not outlive it for long."""
        children = self.children()
        os.kill(self.pid, signal.SIGKILL)
        self.wait()
        wait_until(lambda: not any(map(is_alive, children)), 10, self)


def is_alive(process):
    with contextlib.suppress(Exception):
        return process.is_running() and process.status() != "zombie"
    return False


def manifest_paths(logdir):
    """The files of all checkpoints, the oldest first."""
    return sorted(pathlib.Path(logdir, "ckpt", "manifests").glob("*.json"))


def manifests(logdir):
    """All checkpoints, the oldest first."""
    return [read_manifest(path) for path in manifest_paths(logdir)]


def read_manifest(path):
    return Manifest.from_bytes(path.name, path.read_bytes())


def sequences(logdir, manifest, length):
    """All sequences of a length in the replay that a checkpoint saved."""
    data = Checkpoint(pathlib.Path(logdir)).read_part(manifest, "replay")
    folder = pathlib.Path(logdir, "replay")
    replay = Replay(length, directory=folder, selector=Fifo(), context=CONTEXT)
    replay.load(data)
    return replay.sample(len(replay), "report") if len(replay) else {}


def steps_of(logdir, manifest):
    """Incarnation, episode and step of all that a checkpoint saved."""
    batch = sequences(logdir, manifest, length=1)
    return [tuple(row) for row in batch["where"][:, 0].tolist()] if batch else []


def steps_in(batch):
    """Incarnation, episode and step of all that is in some sequences."""
    rows = np.unique(batch["where"].reshape(-1, 3), axis=0)
    return {tuple(row) for row in rows.tolist()}


def check_consecutive(batch):
    """Steps of a sequence follow one another, or it is said that they do not."""
    before, after = batch["where"][:, :-1], batch["where"][:, 1:]
    starts = batch["is_first"][:, 1:]
    follows = np.all(after - before == (0, 0, 1), -1)
    np.testing.assert_array_equal(follows | starts, True)
    # An episode ends where another begins, whether the environment said so or not.
    np.testing.assert_array_equal(batch["is_last"][:, :-1] >= starts, True)
    assert batch["is_first"][:, 0].all()


def gaps(steps):
    """How often an incarnation has a step without the one before it."""
    known = set(steps)
    count = 0
    for incarnation, episode, step in known:
        before = (episode, step - 1) if step else (episode - 1, LENGTH)
        count += before[0] >= 0 and (incarnation, *before) not in known
    return count


def check_replay(logdir, max_gaps=0):
    """What holds of all checkpoints of a run; returns the steps of the last.

    Args:
      logdir: of the run.
      max_gaps: places where steps may be missing: each env has one where the actor was
        lost, and two where the replay was: after the last save, and where a new episode
        begins since a batch was in doubt.
    """
    before, steps = set(), []
    for manifest in manifests(logdir):
        steps = steps_of(logdir, manifest)
        doubled = [step for step, count in Counter(steps).items() if count > 1]
        assert not doubled, f"{manifest.tag} has twice: {doubled}"
        missing = before - set(steps)
        assert not missing, f"{manifest.tag} lost what was saved before: {missing}"
        assert gaps(steps) <= max_gaps
        batch = sequences(logdir, manifest, BATCH_LENGTH + CONTEXT)
        if batch:
            check_consecutive(batch)
            # Streams that end before their first sequence are no use, and go.
            before = steps_in(batch)
    return set(steps)


def check_files(logdir):
    """Raises if there are files of replays that no checkpoint lists."""
    found = {
        path.relative_to(logdir).as_posix()
        for folder in ("replay", "replay_eval")
        for path in pathlib.Path(logdir, folder).rglob("*")
    }
    assert found and found <= Checkpoint(logdir).listed()


def updates_of(logdir, manifest):
    """How often the agent of a checkpoint was trained, as it says itself."""
    data = Checkpoint(pathlib.Path(logdir)).read_part(manifest, "agent")
    return data["counters"]["updates"]


def check_ratio(run, lost=False, waits=True):
    """A run that goes on trains as often as was asked for the steps that it makes.

    What the agent counts is compared with what the logger counts; neither asks the
    limiter. Updates of an agent that was restarted, which are not in its weights any
    more, do not count.

    Args:
      run: that has just gone on.
      lost: whether the replay or the logger was restarted without the others. Only
        what comes from now on is compared then.
      waits: whether the learner waits for steps. If the run saves all the time, it may
        be behind.
    """
    run.saves()
    seen = len(manifests(run.logdir))
    last = manifests(run.logdir)[-1].meta["step"] + (WINDOW if waits else SLOW_WINDOW)

    def is_enough():
        found = manifest_paths(run.logdir)
        return len(found) >= seen + 3 and read_manifest(found[-1]).meta["step"] >= last

    wait_until(lambda: is_enough() or not run.running, WAIT, run)
    assert run.running, run.output()
    saved = manifests(run.logdir)
    updates = [updates_of(run.logdir, manifest) for manifest in saved]
    assert updates == sorted(updates)
    ahead = [
        BATCH * count - RATIO * max(0, manifest.meta["step"] - START)
        for count, manifest in zip(updates, saved)
    ]
    since = [x - ahead[seen - 1] for x in ahead[seen:]]
    # The logger saves a moment after the agent, which is longer on a busy machine. What
    # is wrong is wrong in all checkpoints.
    assert min(since) <= 2 * IN_BETWEEN, ahead
    assert max(since) >= -2 * IN_BETWEEN or not waits, ahead
    assert min(map(abs, ahead[seen:])) <= IN_BETWEEN or lost or not waits, ahead


def check_metrics(logdir):
    """Every line is whole, whoever was killed while writing, and steps never go back.

    Not even where a resume, or a logger that was restarted, has gone back.
    """
    for name in ("metrics.jsonl", "scores.jsonl"):
        lines = pathlib.Path(logdir, name).read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps and steps == sorted(steps)
