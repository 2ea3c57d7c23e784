"""The registry makes environments from names, and explains mistakes in them."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys
import tomllib

import gymnasium
import numpy as np
import pytest

from embodied.envs import SUITES, MissingExtra, Suite, UnknownTask, env_seed, make
from embodied.envs import registry as registry_module

RESET = {"reset": True}
ROOT = pathlib.Path(__file__).parents[2]

OWN_MODULE = """
import gymnasium
import numpy as np
import embodied

class Counter(embodied.Env):
    def __init__(self, seed=None, start=0):
        self.seed = seed
        self.start = start

    obs_space = {}
    act_space = {}

    def step(self, action):
        return {}

class Unseeded(Counter):
    def __init__(self):
        super().__init__()

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(2), {}

def make_walk(**kwargs):
    return Walk(**kwargs)

def make_nothing():
    return 42

text = "not callable"
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "grid_envs.py").write_text(OWN_MODULE)
    (folder / "broken.py").write_text("import package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_package.grid_envs"
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        del sys.modules[name]


def rollout(task, steps=60, **kwargs):
    env = make(task, **kwargs)
    rng = np.random.default_rng(0)
    obs = env.step(RESET)
    history = [obs]
    for _ in range(steps):
        action = {key: space.sample(rng) for key, space in env.act_space.items()}
        obs = env.step({**action, "reset": obs["is_last"]})
        history.append(obs)
    env.close()
    return history


def same(one, other):
    return all(np.array_equal(a[key], b[key]) for a, b in zip(one, other) for key in a)


@pytest.mark.parametrize("task", ["dummy_both", "grid_reach", "gym_CartPole-v1"])
def test_seed_and_index_decide_the_episodes(task):
    reference = rollout(task, seed=3, index=1)
    assert same(reference, rollout(task, seed=3, index=1))
    assert not same(reference, rollout(task, seed=3, index=2))
    assert not same(reference, rollout(task, seed=4, index=1))


def test_options_reach_the_environment():
    env = make("dummy_disc", size=(48, 32), length=5)
    assert env.obs_space["image"].shape == (48, 32, 3)
    assert env.obs_space["count"].high == 5


def test_env_seeds_are_distinct_small_and_repeatable():
    seeds = {env_seed(seed, index) for seed in range(20) for index in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert env_seed(5, 7) == env_seed(5, 7)


@pytest.mark.parametrize("arguments", [(-1, 0), (0, -1)])
def test_negative_seeds_are_refused(arguments):
    with pytest.raises(ValueError, match="at least 0, got -1"):
        env_seed(*arguments)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_its_factory(name):
    suite = SUITES[name]
    assert suite.name == name
    try:
        module = importlib.import_module(suite.factory.partition(":")[0])
    except ModuleNotFoundError as error:
        if error.name.startswith("embodied"):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert callable(getattr(module, suite.factory.partition(":")[2]))


def test_the_documentation_lists_all_suites_and_their_extras():
    lines = (ROOT / "docs" / "environments.md").read_text().splitlines()
    cells = [line.split("|") for line in lines if line.startswith("| `")]
    extras = {name.strip(" `"): extra for _, name, extra, *_ in cells}
    assert list(extras) == sorted(SUITES)
    for name, extra in extras.items():
        suite = SUITES[name]
        assert (f"`{suite.extra}`" if suite.extra else "none") in extra


def test_extras_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert {suite.extra for suite in SUITES.values()} - {""} <= extras.keys()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("dumy_disc", r"got 'dumy'\. Did you mean dummy"),
        ("tetris_easy", r"dummy, envpool, grid, gym, .*\), got 'tetris'"),
        ("dummy_dics", r"got 'dics'\. Did you mean dummy_disc\?"),
        ("grid_race", r"grid task \(avoid, reach\), got 'race'"),
        ("grid", r"form grid_NAME, got 'grid'"),
        ("gym_", r"form gym_NAME, got 'gym_'"),
        ("", r"got ''"),
    ],
)
def test_unknown_tasks_name_what_there_is(task, message):
    with pytest.raises(UnknownTask, match=message):
        make(task)


def test_missing_package_names_the_extra(monkeypatch, tmp_path):
    (tmp_path / "suite_module.py").write_text("import package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    suite = Suite("far", "suite_module:Far", "", extra="atari")
    monkeypatch.setattr(registry_module, "SUITES", {"far": suite})
    with pytest.raises(
        MissingExtra,
        match=r"'far_x' needs the package 'package_that_is_not_there'.*"
        r"pip install 'dreamerv3-parallel\[atari\]'",
    ):
        make("far_x")


@pytest.mark.parametrize(
    ("task", "package", "advice"),
    [
        ("dmc_walker_walk", "dm_control", r"\[dmc\]', then: .* --no-deps dm_control"),
        ("loconav_ant_maze_m", "labmaze", "only there for Python 3.11 and 3.12"),
        ("memmaze_9x9", "memory_maze", "only there for Python 3.11 and 3.12"),
        ("atari_pong", "ale_py", r"dreamerv3-parallel\[atari\]'$"),
    ],
)
def test_missing_packages_where_there_is_no_labmaze(monkeypatch, task, package, advice):
    monkeypatch.setattr(registry_module, "HAS_LABMAZE", False)
    extra = registry_module.SUITES[task.split("_")[0]].extra
    error = MissingExtra.named(task, package, extra)
    assert re.search(advice, str(error))


def test_own_environment_by_import_path(own_module):
    env = make(f"{own_module}:Counter", seed=1, index=2, start=9)
    assert env.seed == env_seed(1, 2)
    assert env.start == 9
    assert make(f"{own_module}:Unseeded").seed is None


@pytest.mark.parametrize("name", ["Walk", "make_walk"])
def test_own_gymnasium_environment_by_import_path(own_module, name):
    env = make(f"{own_module}:{name}", seed=1)
    first = env.step(RESET)["obs"]
    again = make(f"{own_module}:{name}", seed=1).step(RESET)["obs"]
    other = make(f"{own_module}:{name}", seed=2).step(RESET)["obs"]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("no_such_package.module:Env", UnknownTask, "'no_such_package' was not found"),
        ("own_package.nothing:Env", UnknownTask, "'own_package.nothing' was not found"),
        (
            "own_package.grid_envs:Wakl",
            UnknownTask,
            r"Did you mean own_package.grid_envs:Walk",
        ),
        ("own_package.grid_envs:text", UnknownTask, "got 'text'"),
        ("own_package.grid_envs:make_nothing", TypeError, "got int"),
        ("own_package.broken:Env", ModuleNotFoundError, "package_that_is_not_there"),
    ],
)
def test_mistakes_in_import_paths(own_module, task, error, message):
    with pytest.raises(error, match=message):
        make(task)


def test_gymnasium_ids_may_name_a_module(own_module):
    gymnasium.register("own-space/Walk-v0", entry_point=f"{own_module}:Walk")
    try:
        env = make("gym_own_package.grid_envs:own-space/Walk-v0")
        assert env.name == "gym_own-space/Walk-v0"
        env.close()
    finally:
        del gymnasium.registry["own-space/Walk-v0"]


def test_importing_the_registry_imports_no_environment():
    code = (
        "import sys, embodied.envs\n"
        "loaded = {'gymnasium', 'PIL', 'jax', 'embodied.envs.dummy',\n"
        "          'embodied.envs.from_gym'} & set(sys.modules)\n"
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_an_environment_of_a_script_is_found_by_its_file():
    with pytest.raises(UnknownTask, match="--task FILE:Nobody, from the folder"):
        registry_module.own_factory("__main__:Nobody")
