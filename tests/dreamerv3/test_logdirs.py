"""A logdir has one writer, and the configuration of its checkpoint."""

import stat
import subprocess
import sys

import pytest
from waiting_testing import WAIT, wait_until

from dreamerv3.cli import scripts
from dreamerv3.cli.config import ConfigError, load_config
from dreamerv3.cli.logdir import (
    FILENAME,
    LOCK,
    MANIFEST,
    LogdirInUse,
    check_logdir,
    claim,
    preserve_config,
)
from dreamerv3.main import main

FLAGS = ["--task", "dummy_disc", "--script", "rollout", "--random_agent", "True"]
FLAGS += ["--logger.outputs", "jsonl"]


@pytest.fixture
def logdir(tmp_path):
    """The logdir of a run with a checkpoint."""
    (tmp_path / MANIFEST).parent.mkdir()
    (tmp_path / MANIFEST).write_text("first")
    (tmp_path / FILENAME).write_text("old")
    return tmp_path


def test_a_program_without_a_checkpoint_leaves_the_configuration(logdir):
    with pytest.raises(ZeroDivisionError), preserve_config(str(logdir)):
        (logdir / FILENAME).write_text("new")
        raise ZeroDivisionError
    assert (logdir / FILENAME).read_text() == "old"
    with preserve_config(str(logdir)):
        (logdir / FILENAME).write_text("new")
    assert (logdir / FILENAME).read_text() == "old"


def test_a_checkpoint_brings_its_configuration(logdir):
    with pytest.raises(ZeroDivisionError), preserve_config(str(logdir)):
        (logdir / FILENAME).write_text("new")
        (logdir / MANIFEST).write_text("second")
        raise ZeroDivisionError
    assert (logdir / FILENAME).read_text() == "new"


def test_a_new_run_keeps_what_it_wrote(tmp_path):
    with preserve_config(str(tmp_path)):
        (tmp_path / FILENAME).write_text("new")
    assert (tmp_path / FILENAME).read_text() == "new"


def test_a_claim_ends_with_the_program(tmp_path):
    with preserve_config(str(tmp_path)):
        claim(tmp_path)
        claim(tmp_path)  # The same program may claim it again.
    with preserve_config(str(tmp_path)):
        claim(tmp_path)


def test_two_programs_do_not_share_a_logdir(tmp_path, capsys):
    logdir = tmp_path / "run"
    flags = [*FLAGS, "--logdir", str(logdir)]
    command = [sys.executable, "-m", "dreamerv3.main", *flags, "--run.steps", "1e9"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        try:
            wait_until((logdir / FILENAME).exists)
            with pytest.raises(LogdirInUse, match=f"process {first.pid} of "):
                claim(logdir)
            assert main([*flags, "--run.steps", "10"]) == 2
            assert f"{logdir} is in use by process {first.pid} of" in (
                capsys.readouterr().err
            )
        finally:
            first.kill()
    assert (logdir / LOCK).exists()  # But no process holds the lock.
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


class TestBeforeWeightsAreMade:
    """Mistakes are reported before anything slow, and leave nothing behind."""

    @pytest.fixture(autouse=True)
    def no_weights(self, monkeypatch):
        def fail(*args):
            raise AssertionError("The agent was made.")

        for name in ("make_agent", "make_acting_agent"):
            monkeypatch.setattr(scripts, name, fail)
        monkeypatch.setattr("embodied.run.parallel.combined", fail)

    @pytest.mark.parametrize("script", ["train", "parallel"])
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--logger.outputs", "jsonl", "wandb"], "dreamerv3-parallel[wandb]"),
            (["--task", "crafter_reward"], "dreamerv3-parallel[crafter]"),
            (["--task", "dummy_dics"], "Did you mean dummy_disc?"),
        ],
    )
    def test_extras_and_tasks(
        self, tmp_path, capsys, monkeypatch, script, flags, words
    ):
        for package in ("wandb", "crafter"):
            monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, "embodied.envs.crafter", raising=False)
        logdir = tmp_path / "run"
        argv = ["--configs", "debug", "--script", script, "--logdir", str(logdir)]
        assert main([*argv, *flags]) == 2
        assert words in capsys.readouterr().err
        assert not logdir.exists()

    @pytest.mark.parametrize("script", ["train", "parallel"])
    def test_logdirs(self, tmp_path, capsys, script):
        (tmp_path / "file").touch()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / FILENAME).write_text("task: dummy_cont\n")
        for name, words in (
            ("file/run", f"{tmp_path / 'file'} is a file"),
            ("other", "belongs to a run of task 'dummy_cont'"),
            ("s3://bucket/run", "expected a folder of this machine"),
        ):
            logdir = name if ":" in name else str(tmp_path / name)
            argv = ["--configs", "debug", "--script", script, "--logdir", logdir]
            assert main(argv) == 2
            assert words in capsys.readouterr().err

    def test_a_folder_that_another_user_owns(self, tmp_path, monkeypatch):
        monkeypatch.setattr("os.access", lambda path, mode: False)
        config = load_config(["--logdir", str(tmp_path / "a" / "b")], {})
        with pytest.raises(ConfigError, match="does not let this user write"):
            check_logdir(config)
        assert list(tmp_path.iterdir()) == []
