"""A folder from another user does not decide which code runs here."""

import os
import shutil
import subprocess
import sys

import pytest

import dreamerv3
from dreamerv3.cli.config import ConfigError, load_config
from dreamerv3.cli.task_origin import PROOF, names_code, sign_task, started_by_user
from dreamerv3.main import main

HOSTILE = """
import os, pathlib
from embodied.envs.dummy import Dummy
pathlib.Path(os.environ["HOSTILE_MARK"]).touch()
def go():
    return Dummy("disc", size=(8, 8), length=5)
"""
# One process for all tasks, since starting it takes most of the time.
PROGRAM = """
import sys
from dreamerv3.main import main
logdir, config = sys.argv[1], sys.argv[1] + "/config.yaml"
text = open(config).read()
for task in sys.argv[2:]:
    open(config, "w").write(text.replace("hostile:go", task))
    assert main(["--script", "eval_only", "--logdir", logdir]) == 2, task
    flags = ["--script", "train", "--random_agent", "True"]
    assert main([*flags, "--logdir", logdir]) == 2, task
"""
SMALL = ["--random_agent", "True", "--run.envs", "1", "--run.eval_envs", "0"]
SMALL += ["--run.steps", "20", "--logger.outputs", "jsonl", "--run.train_ratio", "1"]
SMALL += ["--batch_size", "1", "--batch_length", "4", "--report_length", "4"]


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """The run of another user, with code that could be imported here."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/hostile.py").write_text(HOSTILE)
    path = os.pathsep.join([f"{tmp_path}/code", os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("HOSTILE_MARK", str(tmp_path / "imported"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "stranger"))
    logdir = tmp_path / "run"
    done = start("--task", "hostile:go", *SMALL, "--logdir", str(logdir))
    assert done.returncode == 0, done.stderr
    (tmp_path / "imported").unlink()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    return logdir


def start(*argv):
    command = [sys.executable, "-m", "dreamerv3.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_folder_does_not_decide_what_is_imported(stranger, tmp_path):
    tasks = ["hostile:go", "os:abort", "dm_hostile:go", "gym_hostile:Go-v0"]
    command = [sys.executable, "-c", PROGRAM, str(stranger), *tasks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
    for task in tasks:
        assert f"If you trust this code, pass --task {task!r}." in done.stderr


def test_nor_does_its_configuration_for_another_run(stranger, tmp_path, capsys):
    config = stranger / "config.yaml"
    flags = ["--configs", str(config), "--logdir", str(tmp_path / "new")]
    evaluation = ["--script", "eval_only", "--logdir", str(stranger), *flags[:2]]
    for argv in (flags, evaluation):
        assert main(argv) == 2
        assert "names code" in capsys.readouterr().err
    lines = config.read_text().splitlines()
    config.write_text("\n".join(x for x in lines if not x.startswith("replica:")))
    assert main(flags) == 2, "a part of it is treated the same"
    assert "names code" in capsys.readouterr().err
    assert load_config([*flags, "--task", "hostile:go"]).task == "hostile:go"


def test_the_user_may_name_it(stranger, tmp_path):
    argv = ["--script", "eval_only", "--logdir", str(stranger)]
    done = start(*argv, "--task", "hostile:go")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imported").exists()


def test_runs_of_this_user_need_no_word(stranger, tmp_path):
    own = ["--logdir", str(tmp_path / "own")]
    assert start("--task", "hostile:go", *SMALL, *own).returncode == 0
    done = start("--script", "eval_only", *own)
    assert done.returncode == 0, done.stderr
    # The proof is valid for this task only.
    shutil.copy(tmp_path / "own" / PROOF, stranger / PROOF)
    config = stranger / "config.yaml"
    config.write_text(config.read_text().replace("hostile:go", "hostile:other"))
    done = start("--script", "eval_only", "--logdir", str(stranger))
    assert done.returncode == 2 and "names code" in done.stderr


def test_a_policy_without_spaces_imports_nothing_either(stranger, monkeypatch):
    monkeypatch.syspath_prepend(str(stranger.parent / "code"))
    with pytest.raises(ConfigError, match="pass task='hostile:go'"):
        dreamerv3.load(stranger)
    assert "hostile" not in sys.modules
    policy = dreamerv3.load(stranger, task="hostile:go")
    assert "image" in policy.obs_space
    del sys.modules["hostile"]


def test_suites_name_no_code(tmp_path, capsys):
    assert not names_code("atari100k_boxing")
    sign_task(tmp_path, "dummy_disc")
    assert not list(tmp_path.iterdir()), "there is nothing to prove"
    assert not started_by_user(tmp_path, "my_env:MyEnv")
    flags = ["--task", "dummy_disc", *SMALL, "--logdir", str(tmp_path)]
    assert main(flags) == 0
    assert main(["--script", "eval_only", "--logdir", str(tmp_path)]) == 0


def test_without_a_key_there_is_no_proof(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    sign_task(tmp_path, "my_env:MyEnv")
    assert not (tmp_path / PROOF).exists()
    (tmp_path / PROOF).write_bytes(b"")
    assert not started_by_user(tmp_path, "my_env:MyEnv")
