"""Any Gymnasium environment as an Env, in the process that steps it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from embodied.base import Array, Env
from embodied.envs.gym_spaces import GymAdapter
from embodied.envs.keys import UnusableEnv
from embodied.envs.registry import MissingExtra, UnknownTask

# Packages that register ids when they are imported: prefix, package, extra.
_PROVIDERS = (
    ("ALE/", "ale_py", "atari"),
    ("MiniGrid-", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid"),
)


# Values that `reset` and `step` of Gymnasium return.
_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")


class FromGym(GymAdapter, Env):
    """A Gymnasium environment.

    Spaces are flattened: the elements of a Dict or Tuple, at any depth, become keys
    that are joined with slashes, such as `hand/0/joints`. Discrete, MultiDiscrete and
    MultiBinary become int32 that start at 0, with a number of classes per element; so
    do integer Boxes that do not start at 0 (of observations, only signed ones) and
    whose range fits int32. Images become [H, W, C] uint8, see
    `gym_spaces.image_layout`; other observations of more than two dimensions become
    vectors, and texts become the classes of their first 16 words. Other Boxes keep
    their dtype. Float observations are declared without bounds, since agents do not
    need them and many environments exceed theirs. At the end of an episode,
    `terminated` sets `is_last` and `is_terminal`, `truncated` sets only `is_last`.

    Args:
      env: a registered id, or an environment.
      obs_key: key of an observation that is not a Dict. Default: 'image' for an image,
        else 'obs'.
      act_key: key of an action that is not a Dict.
      seed: seed of the first reset. Later resets continue from there.
      info_keys: names of numbers in `info` to return as `log/NAME`, 0 where absent; the
        name `none` is ignored.
      size: height and width to resize images to; zeros to keep their own.
      vector: ignored here; `gym_vector.make_vector` takes the same options.
      kwargs: arguments of `gymnasium.make`.
      **more: further arguments of `gymnasium.make`.
    """

    def __init__(
        self,
        env: str | gymnasium.Env,
        obs_key: str | None = None,
        act_key: str = "action",
        seed: int = 0,
        info_keys: Sequence[str] = (),
        size: Sequence[int] = (0, 0),
        vector: str = "none",
        kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ):
        kwargs = {**(kwargs or {}), **more}
        if isinstance(env, str):
            env = _make(env, kwargs)
        elif kwargs:
            raise TypeError(
                f"Expected options {sorted(kwargs)} only with an environment's "
                "id, got an existing environment."
            )
        self.gym_env = env
        for key in ("observation_space", "action_space"):
            space = getattr(env, key, None)
            if not isinstance(space, spaces.Space):
                raise UnusableEnv(
                    f"Env {self.name}: expected {key} to be a gymnasium.Space, got "
                    f"{'nothing' if space is None else repr(space)}. Set it in the "
                    "class or in __init__."
                )
        _check_reset(self.name, env)
        super().__init__(
            env,
            self.name,
            env.observation_space,
            env.action_space,
            obs_key=obs_key,
            act_key=act_key,
            info_keys=info_keys,
            size=size,
        )
        self._seed: int | None = seed
        self._done = True

    @property
    def name(self) -> str:
        """The task's name."""
        spec = self.gym_env.spec
        return f"gym_{spec.id}" if spec else type(self.gym_env.unwrapped).__name__

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Steps, or resets."""
        if self._done or action["reset"]:
            obs, info = self._check(_RESET, self.gym_env.reset(seed=self._seed))
            self._seed = None
            self._done = False
            return self._observe(obs, info, 0.0, True, False, False)
        obs, reward, terminated, truncated, info = self._check(
            _STEP, self.gym_env.step(self._decode(action))
        )
        self._done = bool(terminated or truncated)
        return self._observe(obs, info, reward, False, self._done, bool(terminated))

    def render(self) -> Any:
        """Draws the scene in the environment's render mode."""
        return self.gym_env.render()

    def _check(self, names: tuple[str, ...], result: Any) -> Any:
        if isinstance(result, tuple) and len(result) == len(names):
            return result
        method = "step" if names == _STEP else "reset"
        got, hint = type(result).__name__, ""
        if isinstance(result, tuple):
            got = f"{len(result)} values"
        if method == "step" and got == "4 values":
            hint = " The older API had one flag `done` in place of the two."
        raise UnusableEnv(
            f"Env {self.name}: expected {method} to return a tuple of {len(names)} "
            f"values ({', '.join(names)}), as Gymnasium's API has it, got {got}.{hint}"
        )


def _check_reset(name: str, env: gymnasium.Env) -> None:
    """Raises an error if `reset` does not take a seed."""
    for method in (env.reset, env.unwrapped.reset):
        try:
            signature = inspect.signature(method)
        except ValueError:  # Methods written in C may have none.
            continue
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        if "seed" not in signature.parameters and not takes_any:
            raise UnusableEnv(
                f"Env {name}: expected reset to take a seed, as Gymnasium's API has "
                f"it, got reset{signature}. Write: def reset(self, *, seed=None, "
                "options=None)"
            )


def without_factory_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of `FromGym` without those on how to make the environment."""
    return {k: v for k, v in options.items() if k not in ("vector", "kwargs")}


def is_gym_env(env: Any) -> bool:
    """Returns whether `FromGym` can take this object."""
    return isinstance(env, gymnasium.Env)


def _make(task: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    with make_registered(task):
        # Gymnasium's checker only warns; CheckSpaces raises errors.
        return gymnasium.make(task, disable_env_checker=True, **kwargs)


@contextlib.contextmanager
def make_registered(task: str) -> Iterator[None]:
    """Imports the package that registers an id; explains errors of making it."""
    for prefix, package, extra in _PROVIDERS:
        if task.startswith(prefix) and task not in gymnasium.registry:
            try:
                importlib.import_module(package)
            except ModuleNotFoundError as error:
                missing = error.name or package
                raise MissingExtra.named(f"gym_{task}", missing, extra) from error
    try:
        yield
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownTask(
            f"Expected an id that is registered with Gymnasium, got {task!r}. {error} "
            "The package that registers it can be named: gym_package:Name-v0."
        ) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UnusableEnv(
            f"Expected arguments that gym_{task} takes in env.gym.kwargs: {error}."
        ) from error
    except gymnasium.error.DependencyNotInstalled as error:
        if "mujoco" not in str(error).lower():
            raise MissingExtra(f"Task 'gym_{task}': {error}") from error
        raise MissingExtra.named(f"gym_{task}", "mujoco", "mujoco") from error
    except ImportError as error:
        name, _, version = task.rpartition("-v")
        newest = f"{name}-v5"
        if version not in ("2", "3") or newest not in gymnasium.registry:
            raise
        raise UnknownTask(
            f"Expected an id that Gymnasium still has, got {task!r}. Use gym_{newest}."
        ) from error
