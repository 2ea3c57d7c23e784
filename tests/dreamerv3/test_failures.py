"""Error messages of the command line for environments that do not work."""

import os
import subprocess
import sys
import textwrap

import pytest

from dreamerv3.cli.texts import trim_traceback
from dreamerv3.main import main
from embodied.wrappers import checking

ROLLOUT = ["--script", "rollout", "--random_agent", "True", "--run.envs", "1"]
ROLLOUT += ["--logger.outputs", "jsonl", "--run.steps", "50"]
MODULE = """
import gymnasium, numpy, sys
from gymnasium.spaces import Box, Discrete

class Good(gymnasium.Env):
    observation_space = Box(0, 1, (3,), numpy.float32)
    action_space = Discrete(2)
    def reset(self, seed=None, options=None):
        return numpy.zeros(3, numpy.float32), {}
    def step(self, action):
        return numpy.ones(3, numpy.float32), 1.0, False, False, {}

class Shape(Good):
    def step(self, action):
        return numpy.ones(4, numpy.float32), 1.0, False, False, {}

class Old(Good):
    def step(self, action):
        return numpy.ones(3, numpy.float32), 1.0, False, {}

class OldReset(Good):
    def reset(self, seed=None, options=None):
        return numpy.zeros(3, numpy.float32)

class Unseeded(Good):
    def reset(self):
        return numpy.zeros(3, numpy.float32), {}

class Raises(Good):
    def step(self, action):
        raise OSError("socket lost")

class Exits(Good):
    def step(self, action):
        sys.exit(0)

class Init(Good):
    def __init__(self):
        raise OSError("no display")

class Needs(Good):
    def __init__(self, size):
        pass

class Bare(gymnasium.Env):
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "faulty_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("faulty_module", None)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("Shape", 1, "got float32 of shape (4,) with values [1.0, 1.0, 1.0, 1.0]. Giv"),
        ("Old", 2, "expected step to return a tuple of 5 values"),
        ("OldReset", 2, "expected reset to return a tuple of 2 values"),
        (
            "Unseeded",
            2,
            "expected reset to take a seed, as Gymnasium's API has it, got ",
        ),
        ("Needs", 2, "missing a required argument: 'size'"),
        ("Bare", 2, "expected observation_space to be a gymnasium.Space, got nothing"),
    ],
)
def test_mistakes_in_an_environment_are_one_line(folder, capsys, name, code, words):
    argv = [*ROLLOUT, "--task", f"faulty_module:{name}", "--logdir", str(folder / "l")]
    assert main(argv) == code
    shown = capsys.readouterr().err
    assert shown.startswith("dreamerv3: ") and shown.count("\n") == 1
    assert words in shown


@pytest.mark.parametrize("debug", ["True", "False"])
@pytest.mark.parametrize(
    ("name", "reason", "line"),
    [
        ("Raises", "OSError: socket lost", 'raise OSError("socket lost")'),
        ("Init", "OSError: no display", 'raise OSError("no display")'),
        ("Exits", "it called sys.exit(0)", "sys.exit(0)"),
    ],
)
def test_its_own_errors_are_shown_from_its_first_line_on(
    folder, capsys, name, reason, line, debug
):
    argv = [*ROLLOUT, "--task", f"faulty_module:{name}", "--logdir", str(folder / "l")]
    assert main([*argv, "--run.debug", debug]) == 1
    shown = capsys.readouterr().err
    first, _, trace = shown.partition("\n\n")
    assert first.startswith("dreamerv3: Env 0 failed with ") and reason in first
    assert trace.startswith(
        f'  Traceback (most recent call last):\n    File "{folder}/faulty_module.py"'
    )
    assert line in trace and checking.__file__ not in trace


@pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("json:JSONDecoder", "got JSONDecoder"),
        ("gym_HalfCheetah-v2", "Use gym_HalfCheetah-v5"),
    ],
)
def test_tasks_that_are_none(tmp_path, capsys, task, words):
    assert main([*ROLLOUT, "--task", task, "--logdir", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("dreamerv3: ") and words in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--replay.bytes", "1e4"],
        ["--replay.size", "5e9", "--replay.bytes", "1e14"],
    ],
    ids=["few", "many"],
)
@pytest.mark.parametrize("script", ["train", "parallel"])
def test_a_replay_that_cannot_be(tmp_path, capsys, script, flags):
    argv = ["--configs", "debug", "--random_agent", "True", "--run.envs", "2"]
    argv += ["--run.eval_envs", "0", "--logger.outputs", "jsonl", *flags]
    assert main([*argv, "--script", script, "--logdir", str(tmp_path)]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "WARN" not in x]
    assert line.startswith("dreamerv3: ") and "--replay.size" in line


def test_the_installed_program_finds_environments_in_the_current_folder(tmp_path):
    (tmp_path / "faulty_module.py").write_text(MODULE)
    program = tmp_path / "bin" / "dreamerv3"
    program.parent.mkdir()
    program.write_text("from dreamerv3.main import main\nraise SystemExit(main())\n")
    argv = [*ROLLOUT, "--task", "faulty_module:Good", "--logdir", str(tmp_path / "l")]
    argv += ["--run.debug", "False"]  # Environments run in other processes.
    for safe, code in (("", 0), ("1", 2)):
        done = subprocess.run(
            [sys.executable, str(program), *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONSAFEPATH": safe},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr


def test_tracebacks_that_are_only_ours_are_whole():
    ours = textwrap.dedent(f'''\
        Traceback (most recent call last):
          File "{checking.__file__}", line 7, in step
            obs = self.env.step(action)
                  ^^^^^^^^^^^^^^^^^^^^^
        KeyError: 'x'
        ''')
    assert trim_traceback(ours) == ours
    theirs = '  File "/home/me/env.py", line 3, in step\n    return self.count["x"]\n'
    both = ours.replace("KeyError", theirs + "KeyError")
    assert trim_traceback(both) == f"{ours.splitlines()[0]}\n{theirs}KeyError: 'x'\n"
