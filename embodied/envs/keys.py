"""Which keys environments may use for observations and actions; where they are made."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from embodied.errors import TaskError
from embodied.space import Space

# What every environment tells about its episodes, beside its own observations.
SIGNALS = {
    "reward": Space(np.float32),
    "is_first": Space(bool),
    "is_last": Space(bool),
    "is_terminal": Space(bool),
}
# Keys of a transition that are not observations or actions.
RESERVED = (
    *SIGNALS,
    *("reset", "consec", "stepid", "seed", "envid", "is_eval"),
)
RESERVED_PREFIXES = ("log/", "dyn/")


class UnusableEnv(TaskError, TypeError):
    """What a task names is no environment, or none with an interface that we know."""


class UnsupportedSpace(TaskError, TypeError):
    """A foreign space does not fit arrays of fixed shape under keys of their own."""


def check_keys(
    name: str, obs_keys: Iterable[str], act_keys: Iterable[str], advice: str
) -> None:
    """Raises UnsupportedSpace unless all keys are free and unique.

    Args:
      name: the environment's.
      obs_keys: keys of its observations.
      act_keys: keys of its actions.
      advice: what to do about a key that is not, as a sentence.
    """
    taken: set[str] = set()
    for kind, keys in (("observation", obs_keys), ("action", act_keys)):
        for key in keys:
            if key in RESERVED or key.startswith(RESERVED_PREFIXES):
                problem = "is reserved"
            elif key in taken:
                problem = "is there twice"
            else:
                taken.add(key)
                continue
            raise UnsupportedSpace(
                f"Expected {kind} keys of env {name} that are free and unique, got "
                f"{key!r}, which {problem}. {advice}"
            )
