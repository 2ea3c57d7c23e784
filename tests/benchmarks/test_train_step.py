"""The figures that the benchmark of an update prints."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import train_step

FIGURES = {
    *("ms_per_update", "ms_per_policy", "model_tflop", "utilisation", "peak_bytes"),
    *("compile_seconds", "parameters", "size", "dtype"),
}

ON_CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def figures(*flags):
    command = [sys.executable, "-m", "benchmarks.train_step", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(250)
@pytest.mark.slow
def test_the_last_line_has_all_figures(tmp_path):
    flags = ["--batch", "2", "--length", "4", "--updates", "2", "--envs", "3"]
    flags += ["--turn", str(tmp_path / "turn")]
    found = figures("--size", "debug", *flags, "--platform", "cpu", "--repeats", "1")
    assert set(found) == FIGURES
    for name in ("ms_per_update", "ms_per_policy", "compile_seconds", "model_tflop"):
        assert found[name] >= 0
    assert found["utilisation"] is None  # The peak speed of a CPU is unknown.


def test_parameters_are_counted_without_making_them():
    found = figures("--size", "size12m", "--count-only")
    assert found["parameters"] == 10_498_259
    assert set(found) == {"size", "dtype", "parameters"}


def test_settings_of_devices_are_still_read_after_the_state_is_counted(tmp_path):
    program = """if True:
        import os, sys, jax
        from benchmarks import train_step
        from dreamerv3.cli.config import load_config

        config = load_config(["--configs", "debug", "--logdir", sys.argv[1]])
        train_step.state_shapes(config)
        os.environ["XLA_FLAGS"] = "--xla_dump_to=" + sys.argv[1]
        jax.jit(lambda x: x * 2)(1.0)
        """
    command = [sys.executable, "-c", program, str(tmp_path / "dump")]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, **ON_CPU})
    assert any((tmp_path / "dump").iterdir())


def test_processes_measure_in_turns(tmp_path):
    path, inside = str(tmp_path / "turn"), []

    def measure(name):
        with train_step.turn(path):
            inside.append(name)
            time.sleep(0.05)
            inside.append(name)

    threads = [threading.Thread(target=measure, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert inside[::2] == inside[1::2] and len(inside) == 8
