"""One program writes to a logdir, whose configuration is that of its checkpoint."""

import stat
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


@pytest.mark.parametrize(
    ("access", "umask", "mode", "script"),
    [
        ("user", 0o022, 0o700, "parallel"),
        ("group", 0o022, 0o750, "train"),
        ("umask", 0o027, 0o750, "train"),
    ],
)
def test_files_are_for_those_who_may_read_them(tmp_path, access, umask, mode, script):
    logdir = tmp_path / "new" / "run"
    flags = ["--configs", "debug", "--script", script, "--random_agent", "True"]
    flags += ["--task", "dummy_disc", "--run.steps", "100", "--logdir", str(logdir)]
    flags += ["--logger.outputs", "jsonl", "--run.envs", "1", "--run.eval_envs", "0"]
    command = [sys.executable, "-m", "dreamerv3.main", *flags]
    done = subprocess.run(
        [*command, "--logdir_access", access],
        capture_output=True,
        text=True,
        timeout=WAIT,
        umask=umask,
    )
    assert done.returncode == 0, done.stderr
    folders = [logdir, logdir / "replay", logdir / "ckpt" / "agent"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [mode] * 3
    for path in logdir.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & ~mode, path
    assert list((logdir / "replay").iterdir())
