"""The program that counts the modules of each walk."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_walks_are_counted():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.walks"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["observation"] > 10 and counts["batch"] > 10
    assert counts["save_without_transport"] < counts["save"]
