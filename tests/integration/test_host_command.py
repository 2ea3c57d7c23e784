"""The command for another host is printed in full, and can be run as printed."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import subprocess
import sys

import numpy as np
import pytest
from parallel_testing import Program, import_path, metrics, small

from dreamerv3.cli.config import load_config, read_blocks, to_arguments
from dreamerv3.cli.factories import image_size
from dreamerv3.cli.host_command import first_free, host_settings
from embodied import rpc
from embodied.rpc import Keys
from embodied.space import Space


def host_command(logdir, *flags):
    """Returns exit code, command and notes of the program that prints the command."""
    argv = ["--script", "host_command", "--logdir", logdir, *flags]
    done = subprocess.run(
        [sys.executable, "-m", "dreamerv3.main", *map(str, argv)],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def printed(logdir, *flags):
    """Returns the arguments of the command that is printed for another host."""
    code, command, notes = host_command(logdir, *flags)
    assert code == 0, notes
    (line,) = command.splitlines()
    name, *argv = shlex.split(line)
    assert name == "dreamerv3"
    return argv, notes


def test_a_host_resizes_images_as_the_run_does():
    mults = ("2", "3", "4")
    coder = ["--agent.enc.simple.mults", *mults, "--agent.dec.simple.mults", *mults]
    run = load_config(["--task", "my_env:MyEnv", *coder])
    host = load_config(to_arguments(host_settings(run)))
    spaces = {"image": Space(np.uint8, (40, 40, 3))}
    assert image_size(host, spaces) == image_size(run, spaces)
    assert image_size(load_config([]), spaces) != image_size(run, spaces)


@pytest.mark.parametrize(
    "flags",
    [
        *(["--configs", name] for name in read_blocks() if name != "defaults"),
        ["--random_agent", "True", "--env.crafter.size", "40", "40"],
    ],
    ids=lambda flags: flags[1],
)
def test_a_host_accepts_the_settings_of_every_run(flags):
    run = load_config([*flags, "--run.envs", "8", "--run.actor_batch", "4"])
    load_config(to_arguments(host_settings(run)))


@pytest.mark.slow
def test_printed_commands_join_a_live_run(tmp_path):
    """Two hosts run the printed commands; the second gets ids after the first."""
    Keys.generate().save(tmp_path / "run.keys")
    port = rpc.free_port()
    argv = small(
        tmp_path / "run",
        *("--run.remote_envs", "True", "--run.envs", 3, "--run.eval_envs", 1),
        *("--run.actor_addr", f"0.0.0.0:{port}"),
        *("--run.logger_addr", f"localhost:{rpc.free_port()}"),
        *("--run.keyfile", tmp_path / "run.keys", "--run.env_timeout", 77),
        steps=10**9,
    )
    with Program(*argv) as train:
        train.wait_for("waits for environments")
        first, notes = printed(tmp_path / "run", "--run.envs", 2)
        assert str(tmp_path / "run.keys") in notes
        flags = dict(zip(first[::2], first[1::2]))
        assert flags["--task"] == "tiny_testing:Task"
        assert flags["--run.env_timeout"] == "77.0"
        assert flags["--run.env_offset"] == "0" and flags["--run.eval_envs"] == "1"
        # An address of this machine; which one depends on the machine.
        assert flags["--run.actor_addr"].endswith(f":{port}")
        flags["--run.actor_addr"] = f"localhost:{port}"
        with Program(*[word for pair in flags.items() for word in pair]) as host:
            train.wait_for_envs(tmp_path / "run", 3)
            second, _ = printed(tmp_path / "run", "--run.envs", 1)
            flags = dict(zip(second[::2], second[1::2]))
            assert flags["--run.env_offset"] == "3" and flags["--run.eval_envs"] == "0"
            flags["--run.actor_addr"] = f"localhost:{port}"
            with Program(*[word for pair in flags.items() for word in pair]) as other:
                train.wait_for_envs(tmp_path / "run", 4)
                train.interrupt()
                assert train.wait() == 0, train.output()
                assert host.wait() == 0 and other.wait() == 0, host.output()


@pytest.mark.slow
def test_environments_beside_those_of_the_run(tmp_path):
    """A run with its own environments and ports takes more by the printed command."""
    with Program(*small(tmp_path, steps=10**9)) as train:  # Three envs: one evaluates.
        train.wait_for_envs(tmp_path, 3)
        argv, notes = printed(tmp_path, "--run.envs", 1)
        assert "loopback" in notes
        live = json.loads(pathlib.Path(tmp_path, "addresses.json").read_text())
        assert live["actor_addr"] in argv
        with Program(*argv) as host:
            host.wait_until(lambda: 4 in metrics(tmp_path)["parallel/envs"])
    code, _, notes = host_command(tmp_path)
    assert code == 2 and "logdir of a live run" in notes


def test_a_folder_without_a_run_is_an_error(tmp_path):
    code, command, notes = host_command(tmp_path)
    assert code == 2 and not command
    assert "expected the logdir of a run" in notes


@pytest.mark.parametrize(
    ("taken", "count", "expected"),
    [
        ([], 4, 0),
        ([0, 1, 2], 4, 3),
        ([4, 5], 4, 0),
        ([3, 4], 4, 5),
        ([0, 8, 9, 5], 2, 1),
        ([0, 2, 4], 2, 5),
    ],
)
def test_first_free_ids(taken, count, expected):
    assert first_free(taken, count) == expected
