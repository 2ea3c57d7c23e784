"""Training by one call from Python, in a script or a notebook. The main process.

policy = dreamerv3.train('CartPole-v1', steps=1e4, logdir='logdir/pole', size='1m')
action = policy.act({'obs': obs})
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle

from dreamerv3.cli.config import ConfigError, flatten, load_config, to_arguments
from dreamerv3.cli.factories import Factory, make_spaces
from dreamerv3.cli.logdir import MANIFEST
from dreamerv3.cli.schema import read_keys
from dreamerv3.cli.scripts import SCRIPTS, RunError
from dreamerv3.main import run_script
from dreamerv3.policies.inference import LoadedPolicy, load
from embodied.envs import registry

TRAIN_SCRIPTS = ("parallel", "train", "train_eval")


def train(
    env: Any,
    /,
    steps: float,
    logdir: str | os.PathLike[str] | None = None,
    size: str = "12m",
    *,
    configs: Sequence[str] = (),
    **flags: Any,
) -> LoadedPolicy:
    """Trains an agent, and returns its policy.

    Environments, replay and logger run in processes of their own, and the script needs
    no `__main__` guard for it. Ctrl-C, or interrupting the cell, saves and returns the
    policy so far. The same call with the same logdir continues the run.

    Args:
      env: a task such as `atari_pong`; an id that is registered with Gymnasium, such
        as `CartPole-v1`; a class or function that makes an `embodied.Env`, a
        Gymnasium or a dm_env environment, which gets `seed` if it has such a
        parameter; or an environment, which is copied and not itself used.
      steps: environment steps after which to end, including those of earlier calls.
      logdir: where to write; by default a new folder below `~/logdir`.
      size: of the networks: `1m`, `12m`, `25m`, `50m`, `100m`, `200m`, `400m`.
      configs: blocks of `configs.yaml`, applied after the size.
      **flags: keys of the configuration. The last part of a key is enough if it is
        unique, such as `envs` for `run.envs`; groups are dicts, such as
        `run={'envs': 8}`. `script` may be `parallel`, the default, `train` for one
        process, or `train_eval`.

    Returns:
      The policy of the newest checkpoint, as `dreamerv3.load` returns it. Its actions
      are those of the wrapped environment, within [-1, 1] or classes from 0; those of
      the environment itself are returned by `load(logdir, act_space=...)`.

    Raises:
      ConfigError: a flag, a value or the logdir cannot be used.
      TaskError: the environment cannot be used.
      EnvError: the environment has failed in this process.
      RunError: a role has failed, and the message names it and has its traceback; or
        the run was stopped before its first checkpoint, so that there is no policy.
    """
    task, own, options = _resolve_env(env)
    given = {"script": "parallel", **_full_keys({**options, **flags})}
    if given["script"] not in TRAIN_SCRIPTS:
        raise ConfigError(
            f"script: expected one of {', '.join(TRAIN_SCRIPTS)} for train, got "
            f"{given['script']!r}."
        )
    given |= {"task": task, "run.steps": int(steps)}
    if logdir is not None:
        given["logdir"] = os.fspath(logdir)
    block = size if size.startswith("size") else f"size{size}"
    config = load_config(["--configs", block, *configs, *to_arguments(given)])

    run_script(config, lambda: SCRIPTS[config.script](config, own))
    if not pathlib.Path(config.logdir, MANIFEST).exists():
        raise RunError(
            "The run was stopped before its first checkpoint: there is no policy yet. "
            "The same call begins again."
        )
    spaces = make_spaces(config, own) if config.random_agent else None
    platform, seed = config.jax.platform, config.seed
    return load(config.logdir, platform=platform, seed=seed, spaces=spaces)


def _full_keys(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by full key; unknown names remain as they are."""
    keys = [key for key, found in read_keys().items() if found.default]
    full = {}
    for name, value in flatten(flags).items():
        matches = [key for key in keys if key.rpartition(".")[2] == name]
        if name not in keys and len(matches) > 1:
            raise ConfigError(
                f"{name}: expected one key, but it may be "
                f"{' or '.join(matches)}. Give the group, too, such as "
                f"**{{{matches[0]!r}: {value!r}}}."
            )
        full[matches[0] if name not in keys and matches else name] = value
    return full


# Kinds of environments that `train` accepts.


def _resolve_env(env: Any) -> tuple[str, Factory | None, dict[str, Any]]:
    """Returns the task's name, its factory unless the task tells it, and flags."""
    if isinstance(env, str):
        return _named(env)
    if not isinstance(env, type) and (hasattr(env, "step") or not callable(env)):
        return _from_instance(env)
    _dumps(env, f"{env!r} as a class or function")
    return _name(env), env, {}


def _named(name: str) -> tuple[str, Factory | None, dict[str, Any]]:
    import gymnasium

    suite, underscore, _ = name.partition("_")
    known = underscore and suite in registry.SUITES
    gym_id = name.removeprefix("gym_")
    if gym_id in gymnasium.registry and not (known and suite != "gym"):
        # By its specification, since other processes may not know the id.
        spec = gymnasium.spec(gym_id)
        factory = functools.partial(gymnasium.make, spec, disable_env_checker=True)
        return f"gym_{gym_id}", factory, {}
    versioned = re.search(r"-v\d+$", name)
    own = ":" in name and not versioned
    return name if known or own or not versioned else f"gym_{name}", None, {}


def _from_instance(env: Any) -> tuple[str, Factory | None, dict[str, Any]]:
    """Like `_resolve_env`, for an environment: the function makes copies of it."""
    import gymnasium

    if isinstance(env, gymnasium.vector.VectorEnv):
        raise TypeError(
            "train expected one environment, or what makes it, got a vector "
            "environment. Give a function with a parameter num_envs that makes it, "
            "such as lambda num_envs: gymnasium.make_vec('CartPole-v1', num_envs)."
        )
    spec = env.spec if isinstance(env, gymnasium.Env) else None
    wrapped = spec is not None and any(
        wrapper.kwargs is None for wrapper in spec.additional_wrappers
    )
    if spec is not None and not wrapped:
        factory: Factory = functools.partial(
            gymnasium.make, spec, disable_env_checker=True
        )
        _dumps(factory, f"the specification of {env}")
        if not spec.additional_wrappers:
            return f"gym_{spec.id}", factory, _kwargs_as_flags(spec)
        name = _name(type(env))
    else:
        data = _dumps(env, f"{type(env).__name__}")
        factory = functools.partial(cloudpickle.loads, data)
        name = _name(type(env.unwrapped if isinstance(env, gymnasium.Env) else env))
    return name, factory, {}


def _kwargs_as_flags(spec: Any) -> dict[str, Any]:
    """Returns the plain arguments of a specification as flags, for other programs."""
    return {
        f"env.gym.kwargs.{key}": value
        for key, value in spec.kwargs.items()
        if isinstance(value, bool | int | float | str) and key != "render_mode"
    }


def _dumps(value: Any, name: str) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"train expected an environment that can be sent to other processes, but "
            f"{name} cannot be ({type(error).__name__}: {error}). Give a function that "
            "makes the environment there."
        ) from error


def _name(factory: Any) -> str:
    """Returns `module:Name`, by which programs that can import a factory find it."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    name = getattr(factory, "__qualname__", type(factory).__name__)
    module = getattr(factory, "__module__", None) or "builtins"
    return f"{module}:{re.sub(r'[^A-Za-z0-9_]', '', name.rpartition('.')[2])}"
