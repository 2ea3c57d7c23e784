"""A replay file cannot unpack to more bytes than its steps can take up."""

import subprocess
import sys

import numpy as np
import pytest
import zstandard
from replay_testing import fill, write_save

from embodied.checkpoint import CheckpointError
from embodied.replay import Replay, chunkfiles

LARGE = 1 << 29
ALLOWED = 1 << 27  # Bytes of growth: a fourth of what would be unpacked.
# Prints by how much the load raises the peak memory, and the number of sequences.
LOAD = r"""
import pathlib, re, sys
from embodied.replay import Replay
replay = Replay(3, directory=sys.argv[1], chunksize=8, context=1)

def peak():  # Of this program; that of `resource` begins with the parent's.
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

before = peak()
replay.load(directory=sys.argv[1])
print(peak() - before, len(replay))
"""


def compressed_zeros(sized):
    """Returns a zstd frame of zeros, which states its unpacked size if `sized`."""
    compressor = zstandard.ZstdCompressor(1, write_content_size=sized)
    job = compressor.compressobj(LARGE if sized else -1)
    block = bytes(1 << 20)
    parts = [job.compress(block) for _ in range(LARGE >> 20)]
    return b"".join([*parts, job.flush()])


@pytest.mark.parametrize("kind", ["sized", "unsized", "sparse"])
def test_a_process_that_loads_it_does_not_grow(tmp_path, kind):
    replay = Replay(3, directory=tmp_path, chunksize=8, context=1)
    fill(replay, [0], range(24))
    write_save(replay)
    path = sorted(tmp_path.glob("*.steps"))[0]
    genuine = path.read_bytes()
    if kind == "sparse":
        with path.open("r+b") as file:
            file.truncate(LARGE)
    else:
        # The zstd frame itself is valid, so that only its contents are wrong.
        data = zstandard.ZstdDecompressor().decompress(genuine)
        frame = compressed_zeros(kind == "sized")
        path.write_bytes(frame)
        assert len(frame) < len(data) + (1 << 20)
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    growth, sequences = map(int, done.stdout.split())
    assert growth < ALLOWED
    assert 0 < sequences < len(replay), "those of other files"
    assert path.name in done.stderr


@pytest.mark.parametrize("sized", [True, False])
def test_the_limit_is_exact(sized):
    data = bytes(1000)
    frame = zstandard.ZstdCompressor(1, write_content_size=sized).compress(data)
    assert chunkfiles.decompress(frame, 1000) == data
    with pytest.raises((ValueError, zstandard.ZstdError)):
        chunkfiles.decompress(frame, 999)


def test_the_list_of_a_save_is_limited_too(tmp_path):
    replay = Replay(3, directory=tmp_path, chunksize=8, context=1)
    fill(replay, [0], range(24))
    data, _ = write_save(replay)
    long = np.zeros(1000, "<i4").tobytes()
    order = np.frombuffer(zstandard.ZstdCompressor(1).compress(long), np.uint8)
    chunks = data["chunks"]
    endless = {**chunks, "steps": np.full_like(chunks["steps"], 2**30)}
    for change in ({"order": order}, {"chunks": endless}):
        other = Replay(3, directory=tmp_path, chunksize=8, context=1)
        with pytest.raises(CheckpointError, match="cannot read the saved replay"):
            other.load({**data, **change})
