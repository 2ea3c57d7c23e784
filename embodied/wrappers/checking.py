"""The base class of wrappers, and checks of values; where the env is stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from embodied.base import Array, Env, Spaces, TaskError
from embodied.space import Space

Step = dict[str, Array]
_FLAGS = ("is_first", "is_last", "is_terminal")


class SpaceError(TaskError, ValueError):
    """A value of an environment does not fit its space, or the space is not usable."""

    @classmethod
    def of(
        cls, kind: str, key: str, env: Any, expected: Any, value: Any, advice: str
    ) -> SpaceError:
        """Returns the error for one key.

        Args:
          kind: 'observation' or 'action'.
          key: the key.
          env: the environment, wrapped or not.
          expected: the space, or a description of what was expected.
          value: the array that was found, or a description of it.
          advice: how to correct it, as a sentence.
        """
        got = value if isinstance(value, str) else brief(value)
        return cls(
            f"{kind.capitalize()} {key!r} of env {env_name(env)}: "
            f"expected {expected}, got {got}. {advice}"
        )


class Wrapper(Env):
    """Base class of wrappers; forwards everything to `env`, including attributes."""

    def __init__(self, env: Env):
        self.env = env

    @property
    def obs_space(self) -> Spaces:
        """Spaces of the wrapped environment, as `embodied.Space`."""
        return {key: Space.of(space) for key, space in self.env.obs_space.items()}

    @property
    def act_space(self) -> Spaces:
        """Spaces of the wrapped environment, as `embodied.Space`."""
        return {key: Space.of(space) for key, space in self.env.act_space.items()}

    def step(self, action: Step) -> Step:
        """Steps the wrapped environment."""
        return self.env.step(action)

    def close(self) -> None:
        """Closes the wrapped environment, if it can be closed."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def __getattr__(self, name: str) -> Any:
        # Underscored names are this object's own; `env` is missing while unpickling.
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.env, name)


def env_name(env: Any) -> str:
    """Returns the attribute `name` of an environment, else the name of its class."""
    while isinstance(env, Wrapper):
        env = env.env
    name = getattr(env, "name", None)
    return name if isinstance(name, str) else type(env).__name__


def brief(value: Any) -> str:
    """Describes an array, or any other value, in one line."""
    if not isinstance(value, np.ndarray | np.generic):
        text = repr(value)
        return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
    head = ", ".join(str(element) for element in value.ravel()[:8])
    more = ", ..." if value.size > 8 else ""
    return f"{value.dtype} of shape {value.shape} with values [{head}{more}]"


class CheckSpaces(Wrapper):
    """Raises SpaceError when an observation or action is not in its space.

    The markers of a missing value, -inf for floats and -1 for signed integers, are
    allowed in observations whatever the bounds. Plain Python numbers are converted to
    the declared dtype. Keys that start with `log/` may exceed their bounds. The actions
    of a step that resets are not checked, since the environment ignores them.

    Args:
      env: the environment.
      nonfinite: 'raise' or 'pass', for NaN and infinity in observations.
    """

    def __init__(self, env: Env, nonfinite: str = "raise"):
        super().__init__(env)
        if nonfinite not in ("raise", "pass"):
            raise ValueError(
                f"Expected nonfinite to be 'raise' or 'pass', got {nonfinite!r}."
            )
        obs_space = check_numeric(super().obs_space, "observation", env)
        act_space = check_numeric(super().act_space, "action", env)
        for key in ("reward", *_FLAGS):
            kind = "f" if key == "reward" else "b"
            _check_required("observation", key, obs_space.get(key), kind, env)
        _check_required("action", "reset", act_space.get("reset"), "b", env)
        self._obs_space = obs_space
        self._act_space = act_space
        self._obs_checks = {
            key: ValueCheck("observation", key, space, env, nonfinite == "pass")
            for key, space in obs_space.items()
        }
        self._act_checks = {
            key: ValueCheck("action", key, space, env, passes=False)
            for key, space in act_space.items()
        }

    def step(self, action: Step) -> Step:
        """Checks the action, steps, and checks the observation."""
        if "reset" not in action or not action["reset"]:
            check_keys("action", action, self._act_space, self)
            action = {
                key: check(action[key]) for key, check in self._act_checks.items()
            }
        obs = self.env.step(action)
        check_keys("observation", obs, self._obs_space, self)
        return {key: check(obs[key]) for key, check in self._obs_checks.items()}


def check_keys(kind: str, values: Any, spaces: Spaces, env: Any) -> None:
    """Raises SpaceError unless a step has exactly the declared keys.

    Args:
      kind: 'observation' or 'action'.
      values: the observation or action.
      spaces: the declared spaces.
      env: the environment, for the message.
    """
    if isinstance(values, dict) and values.keys() == spaces.keys():
        return
    if not isinstance(values, dict):
        raise SpaceError(
            f"Env {env_name(env)}: expected a dict of arrays as {kind}, got "
            f"{type(values).__name__}."
        )
    missing = sorted(spaces.keys() - values.keys())
    extra = sorted(values.keys() - spaces.keys())
    if missing:
        raise SpaceError.of(
            kind,
            missing[0],
            env,
            spaces[missing[0]],
            f"no such key among {sorted(values)}",
            f"Every {kind} must hold all declared keys.",
        )
    raise SpaceError.of(
        kind,
        extra[0],
        env,
        f"only the declared keys {sorted(spaces)}",
        values[extra[0]],
        "Declare its space or leave it out.",
    )


class ValueCheck:
    """Checks the values of one key, with limits that are computed only once.

    Args:
      kind: 'observation' or 'action'.
      key: the key of the values.
      space: the space of one value, or of a batch of them.
      env: the environment, for messages.
      passes: whether NaN and infinity are allowed.
    """

    def __init__(self, kind: str, key: str, space: Space, env: Any, passes: bool):
        self._kind = kind
        self._key = key
        self._space = space
        self._env = env
        self._passes = passes
        self._markers = kind == "observation" and key != "reward"
        self._low, self._high = space.limits
        lowest, highest = Space(space.dtype, space.shape).limits
        bounded = np.any(self._low != lowest) or np.any(self._high != highest)
        if space.dtype.kind == "f":
            limit = np.finfo(space.dtype).max
            self._low, self._high = np.clip((self._low, self._high), -limit, limit)
        # Most keys need no check of their values, or only a cheap one.
        self._fits: Callable[[np.ndarray], bool] = self._inside
        if key.startswith("log/") or (not bounded and space.discrete):
            self._fits = _always
        elif not bounded:
            self._fits = _finite
        # A scalar takes a tenth of the time when it is compared as a plain number.
        self._scalar = space.dtype.type if space.shape == () else None
        self._dtype, self._shape = space.dtype, space.shape
        self._scalar_bounds = self._low.min().item(), self._high.max().item()

    def __call__(self, value: Any) -> Array:
        """Returns the value as a NumPy array or scalar, or raises SpaceError."""
        if type(value) is self._scalar:
            low, high = self._scalar_bounds
            if low <= value.item() <= high:
                return value
        elif type(value) in (bool, int, float):
            value = _from_python(value, self._dtype)
        array = np.asarray(value)
        if array.dtype != self._dtype:
            raise self._error(value, f"Convert it to {self._dtype}.")
        if array.shape != self._shape:
            raise self._error(value, f"Give it the shape {self._shape}.")
        if not self._fits(array):
            self._check_exceptions(array)
        return value if isinstance(value, np.generic) else array

    def _inside(self, array: np.ndarray) -> bool:
        # Bounds are finite and NaN compares false, so infinity and NaN are outside.
        return bool((array >= self._low).all() and (array <= self._high).all())

    def _check_exceptions(self, array: np.ndarray) -> None:
        """Raises unless all values outside the bounds are allowed exceptions."""
        allowed = np.zeros(array.shape, bool)
        if array.dtype.kind == "f":
            if self._markers:
                allowed = np.isneginf(array)
            if self._passes:
                allowed = ~np.isfinite(array)
            if not np.all(np.isfinite(array) | allowed):
                hint = " -inf marks a missing observation." if self._markers else ""
                raise self._error(array, f"Values must be finite.{hint}")
        elif self._markers and array.dtype.kind == "i":
            allowed = array == -1
        if not self._inside(np.where(allowed, self._low, array)):
            advice = "Keep it within the bounds"
            if self._kind == "observation":
                advice += " or declare wider ones"
            raise self._error(array, f"{advice}.")

    def _error(self, value: Any, advice: str) -> SpaceError:
        return SpaceError.of(
            self._kind, self._key, self._env, self._space, value, advice
        )


def _always(array: np.ndarray) -> bool:
    return True


def _finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array).all())


def _from_python(value: bool | int | float, dtype: np.dtype) -> Any:
    """Converts a plain number that fits the dtype, else returns it unchanged.

    Integers must fit the dtype; floats are rounded and may become infinite.
    """
    kind = dtype.kind
    if kind == "b" and isinstance(value, bool):
        return np.bool_(value)
    if kind in "iu" and type(value) is int:
        info = np.iinfo(dtype)
        return dtype.type(value) if info.min <= value <= info.max else value
    if kind == "f" and not isinstance(value, bool):
        with np.errstate(over="ignore"):
            return dtype.type(value)
    return value


def _check_required(
    kind: str, key: str, space: Space | None, dtype_kind: str, env: Env
) -> None:
    if space is None or space.dtype.kind != dtype_kind or space.shape != ():
        expected = "float32" if dtype_kind == "f" else "bool"
        raise SpaceError.of(
            kind,
            key,
            env,
            f"a declared scalar of {expected}",
            "no such key" if space is None else str(space),
            f"Declare it in {'obs' if kind == 'observation' else 'act'}_space.",
        )


def check_numeric(spaces: Spaces, kind: str, env: Any) -> Spaces:
    """Returns the spaces unchanged; raises SpaceError if one is of strings."""
    for key, space in spaces.items():
        if space.dtype.kind == "U":
            raise SpaceError.of(
                kind,
                key,
                env,
                "a space of numbers",
                str(space),
                "Encode strings as integers, or leave the key out.",
            )
    return spaces
