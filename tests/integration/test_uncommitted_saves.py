"""Nothing is left of saves whose conductor, or whose role, was killed."""

import os
import pathlib
import signal

import numpy as np
import pytest
from fault_testing import check_files
from parallel_testing import WAIT
from roles_testing import Roles, transitions
from waiting_testing import wait_until

from embodied.checkpoint import Checkpoint
from embodied.run.parallel import parallel_logger, parallel_replay
from embodied.run.parallel.conductor import unpack_reply


@pytest.fixture
def roles(tmp_path):
    with Roles(tmp_path, "--run.train_ratio", "0") as roles:
        roles.start(parallel_logger, roles.parts.make_logger)
        # The logger removes leftovers of its own before it answers.
        roles.client("logger")
        yield roles


def start_replay(roles):
    factories = (roles.parts.make_replay, roles.parts.make_replay_eval)
    roles.start(parallel_replay, *factories, roles.parts.make_stream)
    return roles.client("replay")


def save(checkpoint, client, number):
    """Makes the replay save, as a conductor does; returns tag and records."""
    batch = client.sample_batch_train(number).result(WAIT)
    stepids = batch["stepid"]
    latents = np.full((*stepids.shape[:2], 2), number, np.float32)
    client.update({"stepid": stepids, "dyn/deter": latents}).result(WAIT)
    tag = checkpoint.new_tag()
    reply = client.save(tag, number + 1).result(WAIT)
    return tag, unpack_reply(reply)[0]


def test_a_save_whose_conductor_has_died_leaves_no_files(roles):
    logdir = pathlib.Path(roles.args.logdir)
    client, checkpoint = start_replay(roles), Checkpoint(logdir)
    for batch in transitions([0, 1], 100):
        client.add_batch(batch).result(WAIT)
    for number in range(6):
        tag, records = save(checkpoint, client, number)
        if number % 3 != 1:  # Else as if the agent was killed before the commit.
            checkpoint.commit(tag, records)
    kinds = {path.suffix for path in (logdir / "replay").iterdir()}
    assert kinds == {".steps", ".latents"}
    check_files(logdir)


def test_a_role_removes_what_it_was_writing_when_it_was_killed(roles):
    logdir = pathlib.Path(roles.args.logdir)
    client, checkpoint = start_replay(roles), Checkpoint(logdir)
    for batch in transitions([0, 1], 50):
        client.add_batch(batch).result(WAIT)
    tag, records = save(checkpoint, client, 0)
    checkpoint.commit(tag, records)
    process = roles.processes[-1]
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT)
    folders = ("replay", "replay_eval", "ckpt/replay", "ckpt/limiter", "ckpt/logger")
    left = [logdir / folder / f".{7:016x}.partial-save" for folder in folders]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    start_replay(roles)
    wait_until(lambda: not any(path.exists() for path in left[:-1]))
    assert left[-1].exists(), "the logger may be at it"
    check_files(logdir)
