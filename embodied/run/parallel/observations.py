"""Checks the observations of workers before the policy sees them. Agent process.

Errors that are found here are sent to the worker; whatever the policy raises after that
is the agent's own failure.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from embodied.base import Array
from embodied.envs.keys import SIGNALS
from embodied.space import Space

MARKS = {"envid": Space(np.int32), "is_eval": Space(bool)}

SAME_TASK = "Do the worker and the agent have the same --task?"
MAX_KNOWN = 1024  # Remembered layouts of batches that were found to fit.
_LOOKS = operator.attrgetter("dtype", "shape")

Expected = dict[str, tuple[np.dtype, tuple[int, ...]]]


class ObservationError(ValueError):
    """Observations do not fit the agent, or its actions do not fit the worker."""


class ObservationCheck:
    """Compares observations with the agent's spaces. Any thread.

    For an agent without the attribute `obs_space`, the first observations that its
    policy accepts define what is expected.

    Args:
      agent: whose policy will get them.
    """

    def __init__(self, agent: Any):
        spaces = getattr(agent, "obs_space", None)
        self._expected = _fields({**SIGNALS, **MARKS})
        self._complete = spaces is not None
        self._known: set[tuple] = set()  # Layouts of batches that fit.
        if spaces is not None:
            self._expected |= _fields(spaces)

    def check(self, obs: dict[str, Array]) -> None:
        """Raises ObservationError unless all observations [B, ...] are as expected."""
        looks = (*obs, *map(_LOOKS, obs.values()))
        if looks in self._known:
            return
        complete = self._complete
        self._compare(obs)
        if complete:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known.add(looks)

    def accepted(self, obs: dict[str, Array]) -> None:
        """Records observations that the policy has accepted."""
        if not self._complete:
            given = {k: v for k, v in obs.items() if not k.startswith("log/")}
            fields = {k: (v.dtype, v.shape[1:]) for k, v in given.items()}
            self._expected = {**fields, **self._expected}
            self._complete = True

    def _compare(self, obs: dict[str, Array]) -> None:
        expected = self._expected
        for key, (dtype, shape) in expected.items():
            value = obs.get(key)
            if value is None:
                raise ObservationError(
                    f"act expected the key {', '.join(sorted(expected.keys() - obs))} "
                    f"as well. {SAME_TASK}"
                )
            if value.shape[1:] != shape or not (
                value.dtype == dtype or np.can_cast(value.dtype, dtype, "same_kind")
            ):
                raise ObservationError(
                    f"act expected {key!r} of env {_name(obs)} as {dtype} of shape "
                    f"{shape}, got {value.dtype} of shape {value.shape[1:]}. "
                    f"{SAME_TASK}"
                )
        if self._complete and len(obs) > len(expected):
            extra = [x for x in obs if x not in expected and not x.startswith("log/")]
            if extra:
                raise ObservationError(
                    f"act expected the keys {', '.join(sorted(expected))} and log/..., "
                    f"got {', '.join(sorted(extra))} of env {_name(obs)} in addition. "
                    f"{SAME_TASK}"
                )


def _fields(spaces: dict[str, Any]) -> Expected:
    return {
        key: (np.dtype(space.dtype), tuple(space.shape))
        for key, space in spaces.items()
        if not key.startswith("log/")
    }


def _name(obs: dict[str, Array]) -> str:
    return str(np.asarray(obs.get("envid", "?")).ravel()[:1].tolist()).strip("[]")
