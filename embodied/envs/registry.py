"""Turns the name of a task into an environment, in the process that steps it."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from embodied.base import Env
from embodied.envs.keys import UnusableEnv
from embodied.envs.suites import SUITES, Suite
from embodied.errors import TaskError

PACKAGE = "dreamerv3-parallel"
PACKAGE_MODULE = __name__.split(".")[0]


class UnknownTask(TaskError, ValueError):
    """No suite, or no task of a suite, has this name."""

    @classmethod
    def named(cls, what: str, name: str, known: Iterable[str]) -> UnknownTask:
        """Makes the error of a `what` (such as 'dummy task') that is not `known`."""
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        return cls(
            f"Expected the name of a {what} ({', '.join(known)}), got {name!r}.{hint}"
        )


class MissingExtra(TaskError, ImportError):
    """A package that a task needs is not installed."""

    @classmethod
    def named(
        cls, task: str, package: str | None, extra: str, install: str = ""
    ) -> MissingExtra:
        """Makes the error of `task`, whose `package` comes with `extra`.

        Args:
          task: its name.
          package: what is missing.
          extra: the extra of this package that has it.
          install: what to do where no extra can, as a sentence.
        """
        requirement = f"{PACKAGE}[{extra}]" if extra else PACKAGE
        return cls(
            f"Task {task!r} needs the package {package!r}, which is not installed. "
            + (install or f"Run: pip install '{requirement}'"),
            name=package,
        )


# Gymnasium's ids may hold a colon too, but end in a version: gym_module:Name-v0.
_OWN_TASK = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


def make(task: str, *, index: int = 0, seed: int = 0, **kwargs: Any) -> Env:
    """Makes the environment of a task.

    Args:
      task: `SUITE_NAME`, such as `dummy_disc`, `grid_reach`, `gym_CartPole-v1` or
        `atari_pong`; or your own environment as `package.module:Name`, where the name
        is a class or function that returns an Env, a Gymnasium or a dm_env one. It is
        called with the options and, if it has a parameter of that name, `seed`.
      index: number of this environment within the run.
      seed: seed of the run. Runs of the same seed and actions see the same episodes,
        environments of different index see different ones.
      **kwargs: options of the suite.
    """
    derived = env_seed(seed, index)
    own = _OWN_TASK.fullmatch(task)
    if own and not _is_dm_task(own[1]):
        return _make_own(task, own[1], own[2], derived, kwargs)
    name, underscore, rest = task.partition("_")
    if name not in SUITES:
        raise UnknownTask.named(
            "suite before the first underscore", name, SUITES
        ) from None
    if not underscore or not rest:
        raise UnknownTask(
            f"Expected a task of the form {name}_NAME, got {task!r}. "
            f"The suite {name!r} has: {SUITES[name].doc}"
        )
    return _make_of_suite(task, SUITES[name], rest, derived, kwargs)


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
    """Returns the class or function `name` of a module, on behalf of a task."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A package that the module itself imports is another matter.
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UnknownTask(
            f"Expected an importable module before the colon of task {task!r}, but "
            f"{error.name!r} was not found. Install it, or run from its folder."
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UnknownTask.named(
            f"class or function in {module_name}",
            name,
            [
                key
                for key, value in vars(module).items()
                if callable(value) and not key.startswith("_")
            ],
        )
    return factory


def _make_of_suite(
    task: str, suite: Suite, name: str, seed: int, kwargs: dict[str, Any]
) -> Env:
    try:
        factory = getattr(importlib.import_module(suite.module), suite.factory)
        return factory(name, seed=seed, **kwargs)
    except ModuleNotFoundError as error:
        # Missing parts of this package, or of the user's, are another matter.
        package = (error.name or "").split(".")[0]
        foreign = bool(package) and package != PACKAGE_MODULE
        if not foreign or not (suite.extra or suite.install):
            raise
        raise MissingExtra.named(
            task, error.name, suite.extra, suite.install
        ) from error


def _make_own(
    task: str, module_name: str, name: str, seed: int, kwargs: dict[str, Any]
) -> Env:
    factory = find_factory(task, module_name, name)
    # Some that are written in C have no signature.
    with contextlib.suppress(ValueError):
        signature = inspect.signature(factory)
        if "seed" in signature.parameters:
            kwargs = {**kwargs, "seed": seed}
        _check_call(task, signature, kwargs)
    env = factory(**kwargs)
    if all(hasattr(env, key) for key in ("obs_space", "act_space", "step")):
        return env
    from_gym = importlib.import_module("embodied.envs.from_gym")
    if from_gym.is_gym_env(env):
        return from_gym.FromGym(env, seed=seed)
    from_dm = importlib.import_module("embodied.envs.from_dm")
    if from_dm.is_dm_env(env):
        return from_dm.FromDM(env)
    raise UnusableEnv(
        f"Expected {task} to return an embodied.Env (obs_space, act_space, step), a "
        f"gymnasium.Env or a dm_env.Environment, got {type(env).__name__}. Return one "
        "of these."
    )


def _is_dm_task(module_name: str) -> bool:
    """Whether a name before a colon is `dm_` and a module, not a module `dm_...`."""
    if not module_name.startswith("dm_"):
        return False
    return importlib.util.find_spec(module_name.partition(".")[0]) is None


def _check_call(
    task: str, signature: inspect.Signature, kwargs: dict[str, Any]
) -> None:
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise UnusableEnv(
            f"Expected {task} to be called with {', '.join(kwargs) or 'no arguments'}, "
            f"but it takes {signature}: {error}. Give its parameters defaults, or name "
            "a function that returns the environment."
        ) from None
