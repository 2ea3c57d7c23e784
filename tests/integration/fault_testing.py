"""Runs that faults disturb, and checks of what must hold after any of them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import re
import signal
import subprocess
from collections import Counter

import numpy as np
from fault_envs import LENGTH
from parallel_testing import WAIT, Program, last_step, metrics, read_lines
from waiting_testing import wait_until

from embodied.checkpoint import Checkpoint
from embodied.checkpoint.store import Manifest
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
WINDOW = 1000  # Steps over which training and collecting are compared.
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
    """A run with the environments of `fault_envs`, which trains until it is ended.

    Args:
      logdir: folder of the run.
      *flags: more flags.
      task: class of the environments.
      options: more arguments of `Program`.
    """

    def __init__(self, logdir, *flags, task="Counting", **options):
        self.logdir = pathlib.Path(logdir)
        task = ["--task", f"fault_envs:{task}", "--logdir", str(logdir)]
        super().__init__(*FLAGS, *task, *flags, **options)

    def pid_of(self, role):
        """Waits until a role has a process, and returns its id."""
        self.wait_until(lambda: role in self.roles())
        return self.roles()[role].pid

    def kill(self, *roles):
        """Kills roles, and waits until they are back."""
        before = {role: self.pid_of(role) for role in roles}
        seen = {role: self.restarts(role) for role in roles}
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        for role, pid in before.items():
            self.wait_until(lambda role=role: self.restarts(role) > seen[role])
            assert self.pid_of(role) != pid

    def restarts(self, role):
        """Returns how often the launcher has logged a restart of a role."""
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

        self.wait_until(is_on, seconds)

    def stays(self, seconds):
        """Lets the run continue for some seconds; fails if it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        assert self.running, self.output()

    def saves(self):
        """Waits for two more checkpoints, the second of which began after this call."""
        seen = len(manifest_paths(self.logdir))
        self.wait_until(lambda: len(manifest_paths(self.logdir)) >= seen + 2)

    def addresses(self):
        """Waits for the ports of actor, replay and logger, and returns them."""
        self.wait_for("Addresses: ")
        (line,) = re.findall(r"^Addresses: .*$", self.output(), re.MULTILINE)
        return [int(port) for port in re.findall(r"localhost:(\d+)", line)]

    def leave(self):
        """Ends the run with SIGTERM; fails if its exit code is not 0."""
        self.terminate()
        assert self.wait() == 0, self.output()

    def crash(self):
        """Kills the launcher; its children must not outlive it for long."""
        children = self.children()
        os.kill(self.pid, signal.SIGKILL)
        self.wait()
        wait_until(lambda: not any(map(is_alive, children)), seconds=10)


def is_alive(process):
    with contextlib.suppress(Exception):
        return process.is_running() and process.status() != "zombie"
    return False


def manifest_paths(logdir):
    """Returns the manifest files of all checkpoints, the oldest first."""
    return sorted(pathlib.Path(logdir, "ckpt", "manifests").glob("*.json"))


def manifests(logdir):
    """Returns the manifests of all checkpoints, the oldest first."""
    return [read_manifest(path) for path in manifest_paths(logdir)]


def read_manifest(path):
    return Manifest.from_bytes(path.name, path.read_bytes())


def sequences(logdir, manifest, length):
    """Returns all sequences of a length in the replay of a checkpoint."""
    data = Checkpoint(pathlib.Path(logdir)).read_part(manifest, "replay")
    folder = pathlib.Path(logdir, "replay")
    replay = Replay(length, directory=folder, selector=Fifo(), context=CONTEXT)
    replay.load(data)
    return replay.sample(len(replay), "report") if len(replay) else {}


def steps_of(logdir, manifest):
    """Returns (incarnation, episode, step) of every step in a checkpoint."""
    batch = sequences(logdir, manifest, length=1)
    return [tuple(row) for row in batch["where"][:, 0].tolist()] if batch else []


def steps_in(batch):
    """Returns (incarnation, episode, step) of every step in some sequences."""
    rows = np.unique(batch["where"].reshape(-1, 3), axis=0)
    return {tuple(row) for row in rows.tolist()}


def check_consecutive(batch):
    """Checks that steps in sequences are consecutive, or marked with `is_first`."""
    before, after = batch["where"][:, :-1], batch["where"][:, 1:]
    starts = batch["is_first"][:, 1:]
    follows = np.all(after - before == (0, 0, 1), -1)
    np.testing.assert_array_equal(follows | starts, True)
    # An episode ends where another begins, whether the environment said so or not.
    np.testing.assert_array_equal(batch["is_last"][:, :-1] >= starts, True)
    assert batch["is_first"][:, 0].all()


def gaps(steps):
    """Returns how many steps of an incarnation lack the step before them."""
    known = set(steps)
    count = 0
    for incarnation, episode, step in known:
        before = (episode, step - 1) if step else (episode - 1, LENGTH)
        count += before[0] >= 0 and (incarnation, *before) not in known
    return count


def check_replay(logdir, max_gaps=0):
    """Checks the replay of all checkpoints of a run; returns the steps of the last.

    Args:
      logdir: folder of the run.
      max_gaps: number of places where steps may be missing. For each env, a loss of the
        actor makes one, and a loss of the replay two: after the last save, and where a
        new episode begins because a batch was in doubt.
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
            # Streams that end before their first sequence are useless, and dropped.
            before = steps_in(batch)
    return set(steps)


def check_files(logdir):
    """Fails if there are files of replays that no checkpoint lists."""
    found = {
        path.relative_to(logdir).as_posix()
        for folder in ("replay", "replay_eval")
        for path in pathlib.Path(logdir, folder).rglob("*")
    }
    assert found and found <= Checkpoint(logdir).listed()


def updates_of(logdir, manifest):
    """Returns the number of updates that the agent of a checkpoint has counted."""
    data = Checkpoint(pathlib.Path(logdir)).read_part(manifest, "agent")
    return data["counters"]["updates"]


def check_ratio(run, lost=False, waits=True, resumes=0):
    """Checks that a run makes as many updates as the ratio requires for its steps.

    Compares the updates that the agent counts with the steps that the logger counts,
    which are independent of the limiter. Updates that an agent has lost in a restart
    do not count.

    Args:
      run: run that trains, after any fault.
      lost: whether the replay or the logger was restarted without the others. If so,
        only what comes from now on is compared.
      waits: whether the learner waits for steps. If the run saves all the time, the
        learner may be behind.
      resumes: how often the run was continued after a crash. The roles are saved a
        moment apart, which stays as a difference, of either sign, after each of them.
    """
    run.saves()
    seen = len(manifests(run.logdir))
    last = manifests(run.logdir)[-1].meta["step"] + (WINDOW if waits else SLOW_WINDOW)

    def is_enough():
        found = manifest_paths(run.logdir)
        return len(found) >= seen + 3 and read_manifest(found[-1]).meta["step"] >= last

    run.wait_until(is_enough)
    saved = manifests(run.logdir)
    updates = [updates_of(run.logdir, manifest) for manifest in saved]
    assert updates == sorted(updates)
    ahead = [
        BATCH * count - RATIO * max(0, manifest.meta["step"] - START)
        for count, manifest in zip(updates, saved)
    ]
    since = [x - ahead[seen - 1] for x in ahead[seen:]]
    # The logger saves a moment after the agent, and later on a busy machine, so single
    # checkpoints may be off. A wrong ratio shows in all of them.
    assert min(since) <= 2 * IN_BETWEEN, ahead
    assert max(since) >= -2 * IN_BETWEEN or not waits, ahead
    most = IN_BETWEEN * math.sqrt(1 + resumes)
    assert min(map(abs, ahead[seen:])) <= most or lost or not waits, ahead


def check_metrics(logdir):
    """Checks that every line is complete and that steps never decrease.

    This holds even if a role was killed while writing, and if a resume or a restarted
    logger went back to an earlier step.
    """
    for name in ("metrics.jsonl", "scores.jsonl"):
        lines = pathlib.Path(logdir, name).read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps and steps == sorted(steps)
