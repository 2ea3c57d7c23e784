"""`dreamerv3 --script suite` from end to end, with tiny tasks."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest
from waiting_testing import wait_until

from dreamerv3.cli.config import ConfigError, load_config
from dreamerv3.main import main
from dreamerv3.suite import runner
from embodied.checkpoint import Checkpoint

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--script", "suite", "--configs", "debug", "--random_agent", "True"]
SMALL += ["--suite.script", "train", "--logger.outputs", "jsonl", "--run.envs", "2"]
SMALL += ["--run.eval_envs", "0", "--run.report_every", "0"]
STEPS = 600  # Of the runs in a suite that is interrupted.
RESULTS = ("scores.csv", "table.json", "table.md", "curves.png")

# Takes long enough to be interrupted: two environments make some 200 steps a second.
SLOW_ENV = """
import time
from embodied.envs.dummy import Dummy

class Slow(Dummy):
    def __init__(self, **kwargs):
        super().__init__("disc", size=(8, 8), length=20)

    def step(self, action):
        time.sleep(0.005)
        return super().step(action)
"""


def arguments(folder, *argv, tasks=("dummy_disc",), steps=200):
    steps = ["--run.steps", str(steps)]
    return [*SMALL, "--logdir", str(folder), "--suite.tasks", *tasks, *steps, *argv]


def read_json(path):
    return json.loads(path.read_text())


# Plans.


def plan(*argv):
    argv = ["--script", "suite", "--logdir", "/tmp/suite", *argv]
    return runner.plan_runs(load_config(argv, {}), argv)


def test_a_preset_and_the_flags_of_the_user_make_the_runs():
    runs, config = plan(
        *("--suite.preset", "atari100k", "--configs", "size12m", "--seed", "3"),
        *("--suite.seeds", "2", "--run.envs", "16"),
        *("--suite.tasks", "atari100k_alien", "atari100k_pong"),
    )
    assert [run.seed for run in runs] == [3, 3, 4, 4]
    assert config.run.envs == 16 and config.run.train_ratio == 256
    assert config.agent.dyn.rssm.deter == 2048
    assert config.script == "parallel"
    run = runs[0]
    assert (run.task, run.steps, run.repeat) == ("atari100k_alien", 100_000, 4)
    assert run.logdir == pathlib.Path("/tmp/suite/atari100k_alien/seed3")
    own = load_config(run.argv, {})
    assert (own.task, own.seed, own.logdir) == (run.task, 3, str(run.logdir))
    assert own.suite.preset == "none", "a run is not a suite"


def test_a_preset_brings_its_tasks():
    runs, _ = plan("--suite.preset", "crafter", "--configs", "size12m")
    assert [run.task for run in runs] == ["crafter_reward"]
    assert runs[0].steps == 1_000_000


def test_flags_of_the_user_come_after_those_of_the_preset():
    argv = ("--suite.preset", "dmc_proprio", "--suite.tasks", "dmc_walker_walk")
    (run,), config = plan(*argv, "--configs", "size1m", "--run.steps=1000")
    assert run.steps == 1000 and run.repeat == 2
    assert config.agent.dyn.rssm.deter == 512


def test_without_a_preset_the_task_is_that_of_the_flags():
    runs, _ = plan("--configs", "cartpole", "--suite.seeds", "3")
    assert {run.task for run in runs} == {"gym_CartPole-v1"}
    assert [run.seed for run in runs] == [0, 1, 2]


def test_tasks_with_slashes_have_folders_without():
    runs, _ = plan("--suite.tasks", "bsuite_mnist/0", "some.module:Env")
    assert [run.logdir.parts[-2] for run in runs] == [
        "bsuite_mnist-0",
        "some.module-Env",
    ]
    with pytest.raises(ConfigError, match="differ in more than punctuation"):
        plan("--suite.tasks", "bsuite_mnist/0", "bsuite_mnist-0")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--suite.tasks", "dummy_disc", "nosuite_x"], "got 'nosuite_x'"),
        (["--logger.outputs", "terminal"], "expected jsonl among them"),
        (["--replicas", "2"], "replicas: expected 1"),
        (
            ["--suite.preset", "atari100k", "--task", "atari100k_pong"],
            "Choose among them with --suite.tasks",
        ),
        (["--suite.preset", "atari"], "Did you mean atari100k?"),
        (
            ["--suite.at_once", "0"],
            "suite.at_once: expected auto, or a whole number",
        ),
        (["--suite.table_only", "True"], "expected a folder with runs"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(
    tmp_path, capsys, argv, message
):
    folder = tmp_path / "suite"
    assert main(["--script", "suite", "--logdir", str(folder), *argv]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_the_folder_of_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("task: dummy_disc\n")
    assert main(arguments(tmp_path)) == 2
    assert "which is that of a run" in capsys.readouterr().err


# Suites.


def test_a_task_that_fails_does_not_end_the_others(tmp_path, capsys):
    folder = tmp_path / "suite"
    tasks = ("gym_NoSuchTask-v0", "dummy_disc", "dummy_cont")
    argv = arguments(folder, "--suite.at_once", "2", tasks=tasks, steps=300)
    assert main(argv) == 1
    shown = capsys.readouterr()
    assert "1 of 3 runs have failed: gym_NoSuchTask-v0 seed 0." in shown.err
    assert "3 runs: 2 done, 1 failed." in shown.out
    failed = read_json(folder / "gym_NoSuchTask-v0/seed0/failed.json")
    assert failed["exit"] == 2 and "NoSuchTask" in failed["output"][-1]
    for task in tasks[1:]:
        assert read_json(folder / task / "seed0/done.json")["step"] >= 300
    for name in RESULTS:
        assert (folder / name).stat().st_size > 0
    table = read_json(folder / "table.json")
    assert [row["task"] for row in table["tasks"]] == ["dummy_cont", "dummy_disc"]
    assert [row["mean"]["value"] for row in table["tasks"]] == [1, 1]
    assert "gym_NoSuchTask-v0 seed 0 has failed" in (folder / "table.md").read_text()
    assert read_json(folder / "suite.json")["command"].startswith("dreamerv3 --script")

    # Tables can be written later, or for folders from elsewhere, without any run.
    for name in RESULTS:
        (folder / name).unlink()
    only = ["--script", "suite", "--suite.table_only", "True", "--logdir", str(folder)]
    assert main(only) == 0
    assert all((folder / name).exists() for name in RESULTS)


@pytest.fixture
def slow_suite(tmp_path):
    """Returns a function that starts a suite of a quick task and a slow one."""
    (tmp_path / "slow_env.py").write_text(SLOW_ENV)
    argv = arguments(
        *(tmp_path / "suite", "--run.save_every", "0.5", "--run.log_every", "0.5"),
        *("--suite.script", "parallel", "--run.envs_per_worker", "2"),
        tasks=("dummy_disc", "slow_env:Slow"),
        steps=STEPS,
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    started = []

    def start():
        command = [sys.executable, "-m", "dreamerv3.main", *argv]
        output = (tmp_path / "suite.txt").open("w")
        program = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=output, stderr=output
        )
        output.close()
        started.append(program)
        return program

    yield start
    for program in started:
        program.kill()
        program.wait()


def begun(folder):
    """Returns whether the slow run has saved a step."""
    logdir = folder / "slow_env-Slow/seed0"
    saved = Checkpoint(logdir).last() if logdir.is_dir() else None
    return saved is not None and saved.meta["step"] > 0


def finish(start, tmp_path):
    """Runs the same command again to its end; nothing is done twice."""
    folder = tmp_path / "suite"
    quick = folder / "dummy_disc/seed0/done.json"
    before = quick.stat().st_mtime_ns
    program = start()
    shown = tmp_path / "suite.txt"
    assert program.wait(timeout=120) == 0, shown.read_text()
    assert quick.stat().st_mtime_ns == before
    assert "slow_env:Slow seed 0: begins at step" in shown.read_text()
    output = (folder / "slow_env-Slow/seed0/output.txt").read_text()
    assert "Continuing at step" in output
    assert read_json(folder / "slow_env-Slow/seed0/done.json")["step"] >= STEPS
    assert len(read_json(folder / "table.json")["tasks"]) == 2
    assert (folder / "curves.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_suite_that_was_killed_leaves_nothing_running_and_goes_on(
    slow_suite, tmp_path
):
    program = slow_suite()
    folder = tmp_path / "suite"
    wait_until(lambda: begun(folder))
    children = psutil.Process(program.pid).children(recursive=True)
    assert children
    assert main(arguments(folder)) == 2, "two suites do not share a folder"
    program.send_signal(signal.SIGKILL)
    program.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert not (folder / "slow_env-Slow/seed0/done.json").exists()
    finish(slow_suite, tmp_path)


@pytest.mark.timeout(300)
def test_an_interrupt_saves_the_runs_and_writes_the_table(slow_suite, tmp_path):
    program = slow_suite()
    folder = tmp_path / "suite"
    wait_until(lambda: begun(folder))
    program.send_signal(signal.SIGINT)
    shown = tmp_path / "suite.txt"
    assert program.wait(timeout=60) == 0, shown.read_text()
    text = shown.read_text()
    assert "Interrupted: the runs save" in text
    assert "slow_env:Slow seed 0: stopped at step" in text
    assert "2 runs: 1 done, 1 stopped." in text
    for name in RESULTS:
        assert (folder / name).exists()
    output = (folder / "slow_env-Slow/seed0/output.txt").read_text()
    assert "Interrupted: saving" in output and "Done in" in output
