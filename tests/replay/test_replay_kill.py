"""A replay keeps all committed steps if its process is killed during a save.

The test runs this file as its child process.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from replay_testing import check_batch, fill, make_update, write_save

from embodied.checkpoint import Checkpoint, Manifest
from embodied.replay import Replay, selectors

LENGTH, CAPACITY = 5, 240
WORKERS = (0, 1, 2)


def make(root):
    return Replay(
        LENGTH,
        CAPACITY,
        Path(root, "replay"),
        chunksize=16,
        context=2,
        selector=selectors.Fifo(),
    )


def load(root):
    """Returns the Checkpoint, and the replay and meta of its newest intact save."""
    checkpoint = Checkpoint(root, keep=2)
    checkpoint.clean()
    replay, loaded = make(root), checkpoint.load()
    if loaded is None:
        return checkpoint, replay, {"spans": []}
    parts, meta = loaded
    replay.load(parts["replay"])
    replay.clean(checkpoint.listed(), root)
    return checkpoint, replay, meta


def save_until_killed(root):
    """Adds steps, refreshes some and commits, in a loop. Runs in the child process."""
    checkpoint, replay, meta = load(root)
    spans = meta["spans"]
    start = spans[-1][1] + 1000 if spans else 0
    spans.append([start, start])
    while True:
        count = spans[-1][1]
        fill(replay, WORKERS, range(count, count + 7))
        spans[-1][1] += 7
        replay.update(make_update(replay.sample(4), count))
        tag = checkpoint.new_tag()
        data, cut = write_save(replay)
        records = checkpoint.write_part(tag, "replay", data)
        records += cut.records(root)
        checkpoint.commit(tag, records, {"spans": spans})
        print(spans[-1][1], flush=True)


def check_newest(root):
    """Raises unless replay matches the newest checkpoint; returns its last count."""
    _, replay, meta = load(root)
    expected = [
        (worker, count)
        for start, stop in meta["spans"]
        for count in range(start, stop - LENGTH + 1)
        for worker in WORKERS
    ][-CAPACITY:]
    batch = replay.sample(len(replay), "report")
    check_batch(batch)
    starts = zip(batch["worker"][:, 0].tolist(), batch["count"][:, 0].tolist())
    assert sorted(starts) == sorted(expected)
    return meta["spans"][-1][1]


def check_files(root):
    """Raises unless the folder holds exactly the files that kept checkpoints list."""
    manifests = [root / "ckpt/manifest.json", *(root / "ckpt/manifests").iterdir()]
    listed = {
        record.path
        for path in manifests
        for record in Manifest.from_bytes(str(path), path.read_bytes()).files
    }
    found = {x.relative_to(root).as_posix() for x in (root / "replay").iterdir()}
    assert found == {path for path in listed if path.startswith("replay/")}


def check_previous(root, copy):
    """Raises unless the checkpoint before the newest can be loaded too."""
    shutil.copytree(root, copy)
    tag = Checkpoint(copy, keep=2).newest().tag
    (copy / "ckpt/replay" / f"{tag}.json").write_text("torn")
    count = check_newest(copy)
    shutil.rmtree(copy)
    return count


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_kill_during_a_save_loses_nothing_that_was_committed(tmp_path, rounds):
    moments, root = random.Random(0), tmp_path / "root"
    path = os.pathsep.join(sys.path)
    for _ in range(rounds):
        with subprocess.Popen(
            [sys.executable, __file__, str(root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        ) as child:
            try:
                acknowledged = []
                for _ in range(2):
                    assert select.select([child.stdout], [], [], 60)[0], "no save"
                    acknowledged.append(child.stdout.readline())
                    assert acknowledged[-1], child.stderr.read().decode()
                with pytest.raises(subprocess.TimeoutExpired):
                    child.wait(timeout=moments.uniform(0, 0.3))
            finally:
                child.kill()
            lines = b"".join(acknowledged) + child.stdout.read()
        last = int(lines.decode().split("\n")[-2])
        found = check_newest(root)
        assert found in (last, last + 7)
        assert check_previous(root, tmp_path / "copy") == found - 7
        check_files(root)


if __name__ == "__main__":
    save_until_killed(sys.argv[1])
