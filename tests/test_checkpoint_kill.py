"""What is left of a checkpoint when the process is killed or the disk fails.

The test runs this file as its child process.
"""

from __future__ import annotations

import errno
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from checkpoint_testing import files_below

from embodied.checkpoint import (
    Checkpoint,
    CheckpointError,
    DiskTooSmallError,
    write_file,
)
from embodied.checkpoint.files import find_room_problem

STEP_CALLS = ("open", "write", "fsync", "close", "replace", "unlink", "mkdir")


def save_step(checkpoint, root, step, size):
    """Saves two parts and one chunk under one tag; each of them contains the step."""
    tag = checkpoint.new_tag()
    records = checkpoint.write_part(tag, "agent", {"w": np.full(size, step)})
    records += checkpoint.write_part(tag, "logger", {"step": step})
    records.append(
        write_file(root, f"replay/{step}", str(step).encode(), required=False)
    )
    checkpoint.commit(tag, records, {"step": step})


def load_step(checkpoint, root):
    """Returns the saved step, after checking that all files agree on it."""
    loaded = checkpoint.load()
    if loaded is None:
        return None
    parts, meta = loaded
    step = meta["step"]
    assert parts["logger"] == {"step": step}
    assert np.all(parts["agent"]["w"] == step)
    assert Path(root, f"replay/{step}").read_text() == str(step)
    return step


def save_until_killed(root):
    """The child: saves one step after the other and reports each."""
    checkpoint = Checkpoint(root, keep=2)
    checkpoint.clean()
    step = load_step(checkpoint, root) or 0
    while True:
        step += 1
        save_step(checkpoint, root, step, size=100_000)
        print(step, flush=True)


def kill_at_call(number):
    """Makes the process kill itself at its n-th call that touches the disk."""
    left = number

    def wrap(name, call):
        def wrapped(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in STEP_CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))


def kill_everywhere(previous_steps):
    """The child: kills a save at each of its calls, and prints what was left."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        base, root = Path(folder, "base"), Path(folder, "root")
        base.mkdir()
        for step in range(1, 1 + previous_steps):
            save_step(Checkpoint(base, keep=1), base, step, size=10)
        killed = True
        while killed:
            shutil.copytree(base, root)
            checkpoint = Checkpoint(root, keep=1)
            child = os.fork()
            if child == 0:
                kill_at_call(len(found))
                save_step(checkpoint, root, previous_steps + 1, size=10)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (0, -signal.SIGKILL), status
            killed = status != 0
            found.append(load_step(checkpoint, root))
            checkpoint.clean()
            assert load_step(checkpoint, root) == found[-1]
            save_step(checkpoint, root, 99, size=10)
            assert load_step(checkpoint, root) == 99
            # A chunk that no manifest has listed may be left: replay removes it.
            left = {path for path in files_below(root) if "replay" not in path}
            assert len(left) == 2 + 4, left
            shutil.rmtree(root)
    print(json.dumps(found))


def start(*args):
    return subprocess.Popen(
        [sys.executable, __file__, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Threads of the numerics library would make forking unsafe.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("previous_steps", [0, 1])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(previous_steps):
    child = start("kill_everywhere", str(previous_steps))
    output, errors = child.communicate(timeout=100)
    assert child.returncode == 0, errors.decode()
    found = json.loads(output)
    old, new = previous_steps or None, previous_steps + 1
    commit = found.index(new)
    assert commit > 20, "the calls of the save were not seen"
    assert found == [old] * commit + [new] * (len(found) - commit)
    assert len(found) - commit > 5, "the calls after the commit were not seen"


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_kill_at_a_random_moment_leaves_the_old_or_the_new(tmp_path, rounds):
    moments = random.Random(0)
    checkpoint = Checkpoint(tmp_path, keep=2)
    for _ in range(rounds):
        with start("save_until_killed", str(tmp_path)) as child:
            try:
                assert select.select([child.stdout], [], [], 60)[0], "no save in 60 s"
                first = child.stdout.readline()
                assert first, child.stderr.read().decode()
                with pytest.raises(subprocess.TimeoutExpired):
                    child.wait(timeout=moments.uniform(0, 0.1))
            finally:
                child.kill()
            lines = (first + child.stdout.read()).decode().split("\n")
        acknowledged = int(lines[-2])
        found = load_step(checkpoint, tmp_path)
        assert found in (acknowledged, acknowledged + 1)
        checkpoint.clean()
        assert load_step(checkpoint, tmp_path) == found
        # A kill right after the commit leaves the newest manifest unarchived.
        tags = {path.stem for path in (tmp_path / "ckpt/manifests").glob("*")}
        tags.add(checkpoint.newest().tag)
        parts = {
            path for path in files_below(tmp_path / "ckpt") if "manifest" not in path
        }
        assert {Path(path).stem for path in parts} == tags
        assert len(parts) == 4 * len(tags)
        assert not [path for path in files_below(tmp_path) if "partial" in path]


def test_a_full_disk_keeps_the_last_checkpoint(small_disk):
    checkpoint = Checkpoint(small_disk)
    checkpoint.save({"agent": np.zeros(1_000_000, np.uint8)}, {"step": 1})
    before = files_below(small_disk)
    tag = checkpoint.new_tag()
    records = checkpoint.write_part(tag, "agent", 2)
    with pytest.raises(CheckpointError, match=r"Too little space .* 3.* MB are free"):
        checkpoint.write_part(tag, "replay", np.zeros(3_000_000, np.uint8))
    with pytest.raises(DiskTooSmallError, match=r"has 4.2 MB in all, .* needs 10 MB"):
        checkpoint.write_part(tag, "replay", np.zeros(10_000_000, np.uint8))
    # The size of a generator is not known in advance, so here the disk fills up.
    with pytest.raises(CheckpointError, match="is full: chunk could not be written"):
        write_file(small_disk, "replay/chunk", (bytes(100_000) for _ in range(100)))
    assert checkpoint.newest().meta == {"step": 1}
    checkpoint.discard(tag)
    assert files_below(small_disk) == before
    assert not (small_disk / records[0].path).exists()
    checkpoint.save({"agent": 3}, {"step": 3})
    assert checkpoint.load() == ({"agent": 3}, {"step": 3})


def test_a_read_only_disk_is_named(small_disk):
    command = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(command, check=True, timeout=30)
    with pytest.raises(CheckpointError, match=f"Cannot write {small_disk}.*Read-only"):
        Checkpoint(small_disk).save({"agent": 1})


def test_what_is_left_on_the_disk_depends_on_what_is_needed(small_disk):
    checkpoint = Checkpoint(small_disk)
    checkpoint.save({"agent": np.zeros(2_000_000, np.uint8)})
    with pytest.raises(
        CheckpointError, match=r"2.* MB are free, .* 1.0 MB must stay free"
    ):
        checkpoint.save({"agent": np.zeros(2_000_000, np.uint8)})
    problem = find_room_problem(small_disk, "ckpt", 2_000_000, keep=3)
    assert "has room for 2 checkpoints" in problem
    assert not find_room_problem(small_disk, "ckpt", 1_000_000, keep=3)
    assert "TAG, is untouched" in checkpoint.describe_last().replace(
        checkpoint.last().tag, "TAG"
    )
    assert "no checkpoint yet" in Checkpoint(small_disk, "other").describe_last()


def test_a_root_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    checkpoint = Checkpoint(tmp_path / "file" / "logdir")
    assert checkpoint.newest() is None
    with pytest.raises(CheckpointError, match=r"Cannot write .*file/logdir"):
        checkpoint.save({"agent": 1})


@pytest.mark.parametrize(
    ("call", "number", "message"),
    [
        ("write", errno.ENOSPC, "is full"),
        ("write", errno.EDQUOT, "is full"),
        ("write", errno.EIO, "Input/output error"),
        ("fsync", errno.EIO, "Input/output error"),
        ("replace", errno.EIO, "Input/output error"),
        ("open", errno.EACCES, "Permission denied"),
    ],
)
def test_a_failing_disk_keeps_the_last_checkpoint(
    tmp_path, monkeypatch, call, number, message
):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save({"agent": 1})
    before = files_below(tmp_path)
    original = getattr(os, call)

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    for working_calls in range(3):
        left = [original] * working_calls

        def work_then_fail(*args, left=left, **kwargs):
            return (left.pop() if left else fail)(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, work_then_fail)
            with pytest.raises(CheckpointError, match=message):
                checkpoint.save({"agent": 2, "logger": 2})
        assert files_below(tmp_path) == before
        assert checkpoint.load() == ({"agent": 1}, {})
    checkpoint.save({"agent": 3})
    assert checkpoint.load() == ({"agent": 3}, {})


def test_a_failure_after_the_commit_is_a_warning(tmp_path, monkeypatch, caplog):
    checkpoint = Checkpoint(tmp_path)
    replace = os.replace

    def fail_in_archive(source, target):
        if "manifests" in str(target):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_in_archive)
        first = checkpoint.save({"agent": 1})
    assert f"After the commit of {first}" in caplog.text
    assert checkpoint.load() == ({"agent": 1}, {})
    second = checkpoint.save({"agent": 2})
    (tmp_path / f"ckpt/agent/{second}.json").unlink()
    assert checkpoint.load() == ({"agent": 1}, {}), "the next commit archived it"


if __name__ == "__main__":
    if sys.argv[1] == "kill_everywhere":
        kill_everywhere(int(sys.argv[2]))
    else:
        save_until_killed(sys.argv[2])
