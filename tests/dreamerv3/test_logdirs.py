"""One program writes to a logdir, whose configuration is that of its checkpoint."""

import subprocess
import sys
import time

import pytest

from dreamerv3.cli.logdir import (
    FILENAME,
    LOCK,
    MANIFEST,
    LogdirInUse,
    claim,
    kept_config,
)
from dreamerv3.main import main

FLAGS = ["--task", "dummy_disc", "--script", "rollout", "--random_agent", "True"]
FLAGS += ["--logger.outputs", "jsonl"]
WAIT = 60.0


@pytest.fixture
def logdir(tmp_path):
    """The logdir of a run with a checkpoint."""
    (tmp_path / MANIFEST).parent.mkdir()
    (tmp_path / MANIFEST).write_text("first")
    (tmp_path / FILENAME).write_text("old")
    return tmp_path


def test_a_program_without_a_checkpoint_leaves_the_configuration(logdir):
    with pytest.raises(ZeroDivisionError), kept_config(str(logdir)):
        (logdir / FILENAME).write_text("new")
        raise ZeroDivisionError
    assert (logdir / FILENAME).read_text() == "old"
    with kept_config(str(logdir)):
        (logdir / FILENAME).write_text("new")
    assert (logdir / FILENAME).read_text() == "old"


def test_a_checkpoint_brings_its_configuration(logdir):
    with pytest.raises(ZeroDivisionError), kept_config(str(logdir)):
        (logdir / FILENAME).write_text("new")
        (logdir / MANIFEST).write_text("second")
        raise ZeroDivisionError
    assert (logdir / FILENAME).read_text() == "new"


def test_a_new_run_keeps_what_it_wrote(tmp_path):
    with kept_config(str(tmp_path)):
        (tmp_path / FILENAME).write_text("new")
    assert (tmp_path / FILENAME).read_text() == "new"


def test_a_claim_ends_with_the_program(tmp_path):
    with kept_config(str(tmp_path)):
        claim(tmp_path)
        claim(tmp_path)  # By the same program.
    with kept_config(str(tmp_path)):
        claim(tmp_path)


def test_two_programs_do_not_share_a_logdir(tmp_path, capsys):
    logdir = tmp_path / "run"
    flags = [*FLAGS, "--logdir", str(logdir)]
    command = [sys.executable, "-m", "dreamerv3.main", *flags, "--run.steps", "1e9"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        try:
            deadline = time.monotonic() + WAIT
            while not (logdir / FILENAME).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            with pytest.raises(LogdirInUse, match=f"process {first.pid} of "):
                claim(logdir)
            assert main([*flags, "--run.steps", "10"]) == 2
            assert f"{logdir} is in use by process {first.pid} of" in (
                capsys.readouterr().err
            )
        finally:
            first.kill()
    assert (logdir / LOCK).exists()  # But nobody holds it.
    assert main([*flags, "--run.steps", "10"]) == 0
