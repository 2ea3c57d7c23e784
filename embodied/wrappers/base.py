"""The base of all wrappers and the error they raise; where the env is stepped."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.base import Array, Env, Spaces, TaskError
from embodied.space import Space

Step = dict[str, Array]


class SpaceError(TaskError, ValueError):
    """A value or a space of an environment is not what was declared, or not usable."""

    @classmethod
    def of(
        cls, kind: str, key: str, env: Any, expected: Any, value: Any, advice: str
    ) -> SpaceError:
        """Makes the error of one key.

        Args:
          kind: 'observation' or 'action'.
          key: the key.
          env: the environment, wrapped or not.
          expected: the space, or words.
          value: what came: words, or an array.
          advice: what to do, as a sentence.
        """
        got = value if isinstance(value, str) else brief(value)
        return cls(
            f"{kind.capitalize()} {key!r} of env {env_name(env)}: "
            f"expected {expected}, got {got}. {advice}"
        )


class Wrapper(Env):
    """Passes everything on to `env`, attributes included; made to be subclassed."""

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
    """Returns what an environment calls itself, else the name of its class."""
    while isinstance(env, Wrapper):
        env = env.env
    name = getattr(env, "name", None)
    return name if isinstance(name, str) else type(env).__name__


def brief(value: Any) -> str:
    """Describes an array, or what should have been one, within one line."""
    if not isinstance(value, np.ndarray | np.generic):
        text = repr(value)
        return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
    head = ", ".join(str(element) for element in value.ravel()[:8])
    more = ", ..." if value.size > 8 else ""
    return f"{value.dtype} of shape {value.shape} with values [{head}{more}]"


def bounds(space: Space) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest and the highest value of a space, in its dtype."""
    low, high = space.low, space.high
    assert low is not None
    assert high is not None
    if space.dtype.kind in "iu":
        # A high at the dtype's end admits that end, see Space.
        info = np.iinfo(space.dtype)
        high = np.where(high >= info.max, info.max, high - 1)
        low = np.maximum(low, info.min)
    return low.astype(space.dtype), high.astype(space.dtype)


def refuse_strings(spaces: Spaces, kind: str, env: Env) -> Spaces:
    """Returns the spaces, if all of them are of numbers."""
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
