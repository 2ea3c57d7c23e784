"""Suites of environments, and how the name of a task becomes an environment.

Runs in the process that steps them; environments are imported when they are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from embodied.base import BatchEnv, Env, TaskError
from embodied.envs.keys import UnusableEnv

PACKAGE = "dreamerv3-parallel"
MOST_LISTED = 20  # Maximum number of names in an error that has suggestions.
PACKAGE_MODULE = __name__.split(".")[0]

# dm_control asks for labmaze, which has no packages for later versions of Python. Only
# mazes use it.
HAS_LABMAZE = sys.version_info < (3, 13)
_NO_LABMAZE = "It needs labmaze, which is only there for Python 3.11 and 3.12."
WITHOUT_LABMAZE = {
    "dm_control": f"Run: pip install '{PACKAGE}[dmc]', then: pip install --no-deps "
    "dm_control",
    "labmaze": _NO_LABMAZE,
    "memory_maze": _NO_LABMAZE,
}

# Tasks of EnvPool whose ids end like those of its Atari games.
_ENVPOOL_MUJOCO = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "Pusher"),
    *("InvertedDoublePendulum", "InvertedPendulum", "Reacher", "Swimmer", "Walker2d"),
)


@dataclasses.dataclass(frozen=True)
class Suite:
    """Where the environments of one suite come from.

    Attributes:
      name: the part of a task before its first underscore.
      factory: `module:attribute`, imported when a task of the suite is made. It is
        called with the rest of the task's name, `seed`, and the suite's options, and
        returns an Env.
      doc: one line for listings.
      extra: the extra of this package to install; empty if none is needed.
      install: how to install the suite's packages if no extra can, as a sentence.
      batch: `module:attribute` of a function that makes several environments that step
        together. It is called with the rest of the task's name, `seeds`, and the
        suite's options, and may return None.
    """

    name: str
    factory: str
    doc: str
    extra: str = ""
    install: str = ""
    batch: str = ""


_SUITES = (
    Suite(
        "atari",
        "embodied.envs.atari:Atari",
        "Atari games, 200M protocol, such as atari_pong.",
        extra="atari",
    ),
    Suite(
        "atari100k",
        "embodied.envs.atari:atari100k",
        "Atari games, 100k protocol, such as atari100k_boxing.",
        extra="atari",
    ),
    Suite(
        "bsuite",
        "embodied.envs.bsuite:make_bsuite",
        "Small experiments of the Behaviour Suite, such as bsuite_catch/0.",
        extra="bsuite",
    ),
    Suite(
        "crafter",
        "embodied.envs.crafter:Crafter",
        "An open world of survival and crafting: reward, noreward.",
        extra="crafter",
    ),
    Suite(
        "dm",
        "embodied.envs.from_dm:FromDM",
        "Any dm_env environment, as dm_package.module:Name.",
    ),
    Suite(
        "dmc",
        "embodied.envs.dmc:DMC",
        "The DeepMind Control Suite, such as dmc_walker_walk.",
        extra="dmc",
    ),
    Suite(
        "dmlab",
        "embodied.envs.dmlab:DMLab",
        "Levels of DeepMind Lab, such as dmlab_explore_goal_locations_small.",
        install="Build it as https://github.com/google-deepmind/lab describes: there "
        "are no packages of it.",
    ),
    Suite(
        "dummy",
        "embodied.envs.dummy:Dummy",
        "Cheap made-up observations of every kind: disc, cont, both.",
    ),
    Suite(
        "envpool",
        "embodied.envs.envpool:make_envpool",
        "Batches of Atari and other games in C++, such as envpool_Pong-v5.",
        extra="envpool",
        batch="embodied.envs.envpool:make_pool",
    ),
    Suite(
        "grid",
        "embodied.envs.grid:Grid",
        "A small arena on images, learnable on a CPU in minutes: reach, avoid.",
    ),
    Suite(
        "gym",
        "embodied.envs.from_gym:FromGym",
        "Any id that is registered with Gymnasium, such as gym_CartPole-v1.",
        batch="embodied.envs.gym_vector:make_vector",
    ),
    Suite(
        "loconav",
        "embodied.envs.loconav:LocoNav",
        "Walkers in mazes, such as loconav_ant_maze_m.",
        extra="dmc",
    ),
    Suite(
        "memmaze",
        "embodied.envs.memmaze:make_memmaze",
        "Objects to find again in a 3D maze: 9x9, 11x11, 13x13, 15x15.",
        extra="memmaze",
    ),
    Suite(
        "minecraft",
        "embodied.envs.minecraft:Minecraft",
        "Minecraft through MineRL: diamond, wood.",
        install="Install Java 8 and MineRL 0.4 as https://minerl.readthedocs.io "
        "describes.",
    ),
    Suite(
        "minigrid",
        "embodied.envs.minigrid:make_minigrid",
        "Grid rooms with doors and keys, such as minigrid_DoorKey-5x5.",
        extra="minigrid",
    ),
    Suite(
        "pinpad",
        "embodied.envs.pinpad:PinPad",
        "Pads to step on in the right order: three, four, ... eight.",
    ),
    Suite(
        "procgen",
        "embodied.envs.procgen:ProcGen",
        "Games with levels that never repeat, such as procgen_coinrun.",
        install="Build it as https://github.com/openai/procgen describes: there are "
        "no packages of it for this Python.",
    ),
)
SUITES: Mapping[str, Suite] = MappingProxyType({suite.name: suite for suite in _SUITES})


class UnknownTask(TaskError, ValueError):
    """No suite, or no task of a suite, has this name.

    Args:
      message: what was expected, and what was given.
      near: suggested names, the most likely first.
    """

    def __init__(self, message: str, near: Iterable[str] = ()):
        self.message, self.near = message, tuple(near)
        hint = f" Did you mean {' or '.join(self.near)}?" if self.near else ""
        super().__init__(f"{message}{hint}")

    @classmethod
    def named(cls, kind: str, name: str, known: Iterable[str]) -> UnknownTask:
        """Returns the error for a `kind`, such as 'dummy task', that is not `known`."""
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=3)
        listed = ""
        if len(known) <= MOST_LISTED or not near:
            listed = f" ({', '.join(known)})"
        return cls(f"Expected the name of a {kind}{listed}, got {name!r}.", near)


class MissingExtra(TaskError, ImportError):
    """A package that a task needs is not installed."""

    @classmethod
    def named(
        cls, task: str, package: str | None, extra: str, install: str = ""
    ) -> MissingExtra:
        """Returns the error for a task whose package is missing.

        Args:
          task: name of the task.
          package: name of the missing package.
          extra: extra of this project that installs the package.
          install: how to install the package if no extra can, as a sentence.
        """
        requirement = f"{PACKAGE}[{extra}]" if extra else PACKAGE
        install = install or f"Run: pip install '{requirement}'"
        if not HAS_LABMAZE:
            install = WITHOUT_LABMAZE.get(package or "", install)
        return cls(
            f"Task {task!r} needs the package {package!r}, which is not installed. "
            f"{install}",
            name=package,
        )


def check_task(kind: str, name: str, known: Iterable[str]) -> None:
    """Raises UnknownTask unless `name` is one of `known`."""
    if name not in known:
        raise UnknownTask.named(kind, name, known)


# Gymnasium's ids may hold a colon too, but end in a version: gym_module:Name-v0.
_OWN_TASK = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


def make(task: str, *, index: int = 0, seed: int = 0, **kwargs: Any) -> Env:
    """Makes the environment of a task.

    Args:
      task: `SUITE_NAME`, such as `dummy_disc`, `grid_reach`, `gym_CartPole-v1` or
        `atari_pong`; or your own environment as `package.module:Name`, where `Name` is
        a class or function that returns an Env, a Gymnasium or a dm_env environment.
        It is called with the options and, if it has a parameter `seed`, with a seed.
      index: number of this environment within the run.
      seed: seed of the run. Runs of the same seed and actions see the same episodes,
        environments of different index see different ones.
      **kwargs: options of the suite.
    """
    derived = env_seed(seed, index)
    own = own_factory(task)
    if own is not None:
        return adapt(task, own, derived, {"kwargs": kwargs})
    name, underscore, rest = task.partition("_")
    check_task("suite before the first underscore", name, SUITES)
    if not underscore or not rest:
        raise UnknownTask(
            f"Expected a task of the form {name}_NAME, got {task!r}. "
            f"The suite {name!r} has: {SUITES[name].doc}"
        )
    suite = SUITES[name]
    return _call_suite(task, suite, suite.factory, rest, {"seed": derived, **kwargs})


def make_batch(
    task: str, *, indices: Sequence[int], seed: int = 0, **kwargs: Any
) -> BatchEnv | None:
    """Makes several environments of a task that step together; None if unsupported.

    Args:
      task: `SUITE_NAME`.
      indices: numbers of the environments within the run.
      seed: seed of the run.
      **kwargs: options of the suite.
    """
    name, _, rest = task.partition("_")
    suite = SUITES.get(name)
    if suite is None or not suite.batch:
        return None
    seeds = [env_seed(seed, index) for index in indices]
    return _call_suite(task, suite, suite.batch, rest, {"seeds": seeds, **kwargs})


def adapt_batch(
    factory: Callable[..., Any], seeds: Sequence[int], options: Mapping[str, Any]
) -> BatchEnv | None:
    """Makes several environments that step together, if the factory can.

    A factory with a parameter `num_envs` must return a `gymnasium.vector.VectorEnv` or
    a BatchEnv. Others make Gymnasium environments that are combined as the option
    `vector` says; returns None if that is `none` or if there is only one seed.

    Args:
      factory: class or function.
      seeds: one per environment.
      options: as for `adapt`.
    """
    vector = options.get("vector", "none")
    several = takes(factory, "num_envs")
    if not several and (vector == "none" or len(seeds) == 1):
        return None
    gym_vector = importlib.import_module("embodied.envs.gym_vector")
    kwargs = [_arguments(factory, seed, options) for seed in seeds]
    if not several:
        each = [functools.partial(factory, **x) for x in kwargs]
        return gym_vector.make_vector_of(each, seeds, vector, options)
    env = factory(**{**kwargs[0], "num_envs": len(seeds)})
    if isinstance(env, BatchEnv):
        return env
    # The first seed is for all, since few vector environments take more.
    return gym_vector.from_vector(env, seeds[:1], options)


def own_factory(task: str) -> Callable[..., Any] | None:
    """Returns the class or function of a task `module:Name`; None for other tasks."""
    own = _OWN_TASK.fullmatch(task)
    if own is None or _is_dm_task(own[1]):
        return None
    return find_factory(task, own[1], own[2])


def is_envpool_atari(task: str) -> bool:
    """Returns whether an id of EnvPool is that of an Atari game; needs no EnvPool."""
    name, _, version = task.rpartition("-")
    return version == "v5" and name not in _ENVPOOL_MUJOCO


def env_seed(seed: int, index: int) -> int:
    """Returns the seed of environment `index` in a run of `seed`, below 2 ** 31."""
    for name, value in (("seed", seed), ("index", index)):
        if value < 0:
            raise ValueError(
                f"Expected a {name} of at least 0, got {value}. "
                "Random generators take no negative seeds."
            )
    sequence = np.random.SeedSequence(seed, spawn_key=(index,))
    return int(sequence.generate_state(1)[0] >> 1)


def find_factory(task: str, module_name: str, name: str) -> Callable[..., Any]:
    """Returns the class or function `name` of a module; errors mention the task."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A package that is missing inside the module is a different error.
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UnknownTask(
            f"Expected an importable module before the colon of task {task!r}, but "
            f"{error.name!r} was not found. Install it, or run from its folder."
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory) and module_name == "__main__":
        raise UnknownTask(
            f"Expected an environment that other programs can import, got {name!r}, "
            "which a script or a notebook has made. Give the name of its file: "
            f"--task FILE:{name}, from the folder of FILE.py."
        )
    if not callable(factory):
        public = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        found = UnknownTask.named(f"class or function in {module_name}", name, public)
        near = [f"{module_name}:{key}" for key in found.near]
        raise UnknownTask(found.message, near)
    return factory


def _call_suite(
    task: str, suite: Suite, factory: str, name: str, kwargs: dict[str, Any]
) -> Any:
    try:
        module, _, attribute = factory.partition(":")
        return getattr(importlib.import_module(module), attribute)(name, **kwargs)
    except UnknownTask as error:
        if not error.near:
            raise
        near = [f"{suite.name}_{other}" for other in error.near]
        raise UnknownTask(error.message, near) from None
    except ModuleNotFoundError as error:
        # Missing modules of this package, or of the user's, are different errors.
        package = (error.name or "").split(".")[0]
        foreign = bool(package) and package != PACKAGE_MODULE
        if not foreign or not (suite.extra or suite.install):
            raise
        raise MissingExtra.named(
            task, error.name, suite.extra, suite.install
        ) from error


def takes(factory: Callable[..., Any], name: str) -> bool:
    """Returns whether a callable has a parameter `name` that no partial has set."""
    with contextlib.suppress(ValueError, TypeError):
        signature = inspect.signature(factory)
        set_already = getattr(factory, "keywords", {})  # Of a partial.
        return name in signature.parameters and name not in set_already
    return False


def adapt(
    task: str,
    factory: Callable[..., Any],
    seed: int,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Env:
    """Makes an environment of a user, and adapts it to the interface.

    Args:
      task: name for messages.
      factory: class or function that returns an Env, a Gymnasium or a dm_env
        environment. It is called with `seed`, if it has a parameter of that name.
      seed: seed of this environment.
      options: options of `FromGym`, for a Gymnasium environment; `kwargs` among them
        are arguments of the factory.
    """
    batch = adapt_batch(factory, [seed], options)
    if batch is not None:
        return importlib.import_module("embodied.envs.gym_vector").SingleEnv(batch)
    kwargs = _arguments(factory, seed, options)
    _check_call(task, factory, kwargs)
    env = factory(**kwargs)
    if all(hasattr(env, key) for key in ("obs_space", "act_space", "step")):
        return env
    from_gym = importlib.import_module("embodied.envs.from_gym")
    if from_gym.is_gym_env(env):
        return from_gym.FromGym(env, seed=seed, **{**options, "kwargs": None})
    from_dm = importlib.import_module("embodied.envs.from_dm")
    if from_dm.is_dm_env(env):
        return from_dm.FromDM(env)
    raise UnusableEnv(
        f"Expected {task} to return an embodied.Env (obs_space, act_space, step), a "
        f"gymnasium.Env or a dm_env.Environment, got {type(env).__name__}. Return one "
        "of these."
    )


def _is_dm_task(module_name: str) -> bool:
    """Returns whether `dm_X` before a colon means suite dm, not a module `dm_X`."""
    if not module_name.startswith("dm_"):
        return False
    return importlib.util.find_spec(module_name.partition(".")[0]) is None


def _arguments(
    factory: Callable[..., Any], seed: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a factory: the option `kwargs`, and a seed if taken."""
    seeded = {"seed": seed} if takes(factory, "seed") else {}
    return {**options.get("kwargs", {}), **seeded}


def _check_call(task: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # Callables written in C may have none.
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise UnusableEnv(
            f"Expected {task} to be called with {', '.join(kwargs) or 'no arguments'}, "
            f"but it takes {signature}: {error}. Give its parameters defaults, or name "
            "a function that returns the environment."
        ) from None
