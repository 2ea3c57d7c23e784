"""The package as users install it, without extras, and the first page of the README.

`make wheel` builds it and installs it into `.venv-wheel`; `make test` does that before
the tests start. Everything here runs in another folder, with that environment's Python,
small networks and few steps.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv-wheel" / "bin"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
FIRST_PAGE = README[: README.index("\n## Train\n")]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Settings that compile fast. The command and the call both use them, so that the second
# one finds the compiled program in the cache.
TINY = {
    # Before this many steps, the run waits for updates and so for the compiler.
    "run.steps": 120,
    "run.train_ratio": 8,
    "run.stop_timeout": 300,
    "run.envs": 1,
    "batch_size": 4,
    "batch_length": 4,
    "report_length": 4,
    "agent.imag_length": 2,
    "agent.imag_last": 2,
    ".*layers": 1,
}
# Flags that make a command of the first page small, by the start of the command.
SMALL = {
    "dreamerv3 --help": "",
    "dreamerv3 --configs demo": shlex.join(
        part for key, value in TINY.items() for part in (f"--{key}", str(value))
    ),
    "dreamerv3 --script eval_only": "--run.eval_eps 2 --run.envs 2",
    "dreamerv3 --script plot": "",
    "dreamerv3 --task my_env:MyEnv": "",
}
# Commands that are run by other tests, or before the tests start.
ELSEWHERE = {
    "make demo": "tests/test_demo.py",
    "dreamerv3 --script view --logdir logdir": "tests/view, as it needs an extra",
    "make test": "the Makefile runs this test",
    "pip install .": "`make wheel`",
}
SMALL_CALL = f'steps={TINY["run.steps"]}, configs=["demo"], **{TINY}'
VIEW = {"dreamerv3.view.web_server"}  # Modules that need the extra `view`.
SUITES_WITHOUT_PACKAGES = {"deepmind_lab", "minerl", "procgen"}

pytestmark = pytest.mark.timeout(400)  # Most of it for compilation on a busy machine.


def commands():
    """The commands of the first page, in order, each on one line."""
    blocks = [body for kind, body in FENCE.findall(FIRST_PAGE) if kind == "sh"]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(" +", " ", line.partition("  #")[0]).strip() for line in lines]


def program(name):
    """The Python program on the first page that begins with this comment."""
    blocks = [body for kind, body in FENCE.findall(FIRST_PAGE) if kind == "python"]
    (found,) = [body for body in blocks if body.startswith(f"# {name}\n")]
    return found


def run(folder, *command):
    """Runs a program of the installed package in a folder, as a user would."""
    if not (BIN / "dreamerv3").exists():
        pytest.fail(f"There is no installed package in {BIN}. Run: make wheel")
    keep = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    done = subprocess.run(
        [BIN / command[0], *command[1:]],
        cwd=folder,
        env={
            **{key: os.environ[key] for key in keep if key in os.environ},
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            # Compiles faster; the slower code hardly matters for so few steps.
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        },
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command_that_begins(start):
    (found,) = [command for command in commands() if command.startswith(start)]
    return [*shlex.split(found), *shlex.split(SMALL[start])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the run of the first page's demo, with all roles."""
    folder = tmp_path_factory.mktemp("user")
    told = run(folder, *command_that_begins("dreamerv3 --configs demo"))
    assert "environments of gym_CartPole-v1" in told
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "scores.jsonl",
        "events.out.*",
        "ckpt",
    ):
        assert name in told[told.index("Written to logdir/demo") :]
    return folder


def test_the_package_says_what_it_is():
    """Type checkers see the types; people see Python versions, licence and links."""
    code = (
        "import importlib.metadata as m, importlib.resources as r, json\n"
        "facts = m.metadata('dreamerv3-parallel').json\n"
        "facts['typed'] = [r.files(x).joinpath('py.typed').is_file() "
        "for x in ('embodied', 'dreamerv3')]\n"
        "print(json.dumps(facts))"
    )
    facts = json.loads(run("/", "python", "-c", code))
    assert facts["typed"] == [True, True]
    known = " ".join(facts["classifier"])
    for words in ("Python :: 3.11", "Python :: 3.14", "Typed", "Linux"):
        assert words in known
    assert facts["license_expression"] == "MIT" and facts["summary"]
    assert any("https://" in link for link in facts["project_url"])


def test_every_command_of_the_first_page_is_run():
    found = commands()
    assert len(found) >= 6
    for command in found:
        starts = [start for start in SMALL if command.startswith(start)]
        assert len(starts) == 1 or command in ELSEWHERE, command


def test_it_is_installed_without_extras_and_without_the_repository(tmp_path):
    code = "import dreamerv3, embodied; print(dreamerv3.__file__, embodied.__file__)"
    for path in run(tmp_path, "python", "-c", code).split():
        assert Path(path).is_relative_to(BIN.parent)
    packages = ("ale_py", "crafter", "dm_control", "portal", "pytest", "wandb")
    code = "import importlib.util as u, sys; print(*map(u.find_spec, sys.argv[1:]))"
    found = run(tmp_path, "python", "-c", code, *packages)
    assert set(found.split()) == {"None"}


def test_every_module_can_be_imported_unless_it_needs_an_extra(tmp_path):
    code = (
        "import dreamerv3, embodied, importlib, json, pkgutil\n"
        "missing = {}\n"
        "for package in (embodied, dreamerv3):\n"
        "    names = pkgutil.walk_packages(package.__path__, f'{package.__name__}.')\n"
        "    for module in names:\n"
        "        try:\n"
        "            importlib.import_module(module.name)\n"
        "        except ModuleNotFoundError as error:\n"
        "            missing[module.name] = error.name\n"
        "print(json.dumps(missing))\n"
    )
    missing = json.loads(run(tmp_path, "python", "-c", code))
    groups = PROJECT["optional-dependencies"].values()
    extras = " ".join(requirement for group in groups for requirement in group)
    for module, package in missing.items():
        optional = module.startswith("embodied.envs.") or module in VIEW
        assert optional, f"{module} needs {package}"
        known = package.replace("_", "-") in extras or package in extras
        assert known or package in SUITES_WITHOUT_PACKAGES


def test_version_and_help(tmp_path):
    assert (
        run(tmp_path, "dreamerv3", "--version") == f"dreamerv3 {PROJECT['version']}\n"
    )
    assert "--task" in run(tmp_path, *command_that_begins("dreamerv3 --help"))


def test_a_run_can_be_evaluated(folder):
    told = run(folder, *command_that_begins("dreamerv3 --script eval_only"))
    assert "2 episodes of the agent of step" in told
    (path,) = (folder / "logdir/demo/eval").glob("*.json")
    assert len(json.loads(path.read_text())["scores"]) == 2


def test_a_run_can_be_loaded(folder):
    code = (
        "import dreamerv3\n"
        "policy = dreamerv3.load('logdir/demo')\n"
        "space = policy.obs_space['obs']\n"
        "print(policy.act({'obs': space.sample()})['action'] in (0, 1))\n"
    )
    assert run(folder, "python", "-c", code) == "True\n"


def test_a_run_can_be_drawn(folder):
    run(folder, *command_that_begins("dreamerv3 --script plot"))
    drawn = folder / "logdir/demo/scores.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_the_call_of_the_first_page_trains_and_returns_a_policy(tmp_path):
    source = program("train.py")
    small = source.replace("steps=8000", SMALL_CALL)
    assert small != source
    (tmp_path / "train.py").write_text(f"{small}\nprint('reward', reward)\n")
    assert run(tmp_path, "python", "train.py").endswith("reward 1.0\n")
    assert (tmp_path / "logdir/pole/ckpt/manifest.json").exists()


def test_the_environment_of_the_first_page_runs(tmp_path):
    source = program("my_env.py").partition("\n")[2]
    assert len(source.splitlines()) <= 10
    (tmp_path / "my_env.py").write_text(source)
    run(tmp_path, *command_that_begins("dreamerv3 --task my_env:MyEnv"))
    (scores,) = tmp_path.rglob("scores.jsonl")
    episodes = [json.loads(line) for line in scores.read_text().splitlines()]
    # Twenty steps an episode, each with a reward of 0 or 1.
    assert all(0 <= line["episode/score"] <= 20 for line in episodes)
    assert len({line["episode/score"] for line in episodes}) > 1
