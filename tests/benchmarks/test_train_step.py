"""The figures that the benchmark of an update prints."""

import json
import subprocess
import sys

import pytest

FIGURES = {
    *("ms_per_update", "ms_per_policy", "model_tflop", "utilisation", "peak_bytes"),
    *("compile_seconds", "parameters", "size", "dtype"),
}


def figures(*flags):
    command = [sys.executable, "-m", "benchmarks.train_step", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(250)
@pytest.mark.slow
def test_the_last_line_has_all_figures():
    flags = ["--batch", "2", "--length", "4", "--updates", "2", "--envs", "3"]
    found = figures("--size", "debug", *flags, "--platform", "cpu", "--repeats", "1")
    assert set(found) == FIGURES
    for name in ("ms_per_update", "ms_per_policy", "compile_seconds", "model_tflop"):
        assert found[name] >= 0
    assert found["utilisation"] is None  # The peak speed of a CPU is unknown.


def test_parameters_are_counted_without_making_them():
    found = figures("--size", "size12m", "--count-only")
    assert found["parameters"] == 10_498_259
    assert set(found) == {"size", "dtype", "parameters"}
