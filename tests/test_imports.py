"""What importing the framework loads, and which names users can import from it."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import subprocess
import sys

import pytest

HEAVY = ("jax", "zmq", "gymnasium", "tensorboardX", "wandb", "rich")

# Imports that users rely on, as they write them. New public names are added here.
STATEMENTS = (
    "import embodied; embodied.Agent, embodied.Env, embodied.Stream, embodied.Space",
    "import embodied; embodied.Driver, embodied.RandomAgent, embodied.Wrapper",
    "import embodied; embodied.LocalClock, embodied.GlobalClock",
    "import embodied; embodied.clock.LocalClock, embodied.clock.GlobalClock",
    "import embodied; embodied.streams.Stateless, embodied.streams.Prefetch",
    "import embodied; embodied.streams.Consec, embodied.streams.Zip",
    "import embodied; embodied.streams.Map, embodied.streams.Mixer",
    "import embodied; embodied.wrappers.Wrapper, embodied.envs.make",
    "from embodied.envs import dummy, from_gym; dummy.Dummy, from_gym.FromGym",
    "from dreamerv3.main import main, make_agent, make_env, make_logger",
)


def python(code):
    """Runs code in a fresh process, with warnings as errors; returns its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement):
    """The top-level modules that a fresh process has after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    return {name.partition(".")[0] for name in json.loads(python(code))}


def test_importing_embodied_imports_nothing_heavy():
    loaded = loaded_by("import embodied")
    assert "embodied" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_making_an_env_imports_no_agent_and_no_transport():
    # Many processes step environments, so what these import costs the most.
    loaded = loaded_by("import embodied; embodied.envs.make('grid_reach').close()")
    assert loaded.isdisjoint(HEAVY)


def test_the_driver_of_a_cluster_takes_no_accelerator_and_needs_no_ray():
    loaded = loaded_by("import dreamerv3.cluster.ray_driver")
    assert loaded.isdisjoint(("jax", "ray", "gymnasium"))


def test_a_module_of_the_list_is_seen_once_it_is_imported():
    assert "gymnasium" in loaded_by("import embodied.envs.from_gym")


@pytest.mark.parametrize("statement", STATEMENTS)
def test_names_that_users_rely_on_can_be_imported(statement):
    python(statement)


@pytest.mark.parametrize("name", ["make_agent", "make_env", "make_logger"])
def test_factories_take_the_configuration_first(name):
    factory = getattr(importlib.import_module("dreamerv3.main"), name)
    assert next(iter(inspect.signature(factory).parameters)) == "config"


def test_the_console_script_is_the_program():
    (script,) = importlib.metadata.entry_points(
        group="console_scripts", name="dreamerv3"
    )
    assert script.load() is importlib.import_module("dreamerv3.main").main
