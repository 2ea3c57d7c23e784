"""Observations on their way to the policy. Agent process, in the actor's threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied.base import Array
from embodied.jax import values
from embodied.space import Space

logger = logging.getLogger(__name__)

MISSING = -np.inf  # What a float is that an environment could not observe.


class Observations:
    """Checks observations, and makes missing what is not finite.

    May be called from several threads: `_lock` guards the counts.

    Args:
      spaces: what the policy reads, by key.
    """

    def __init__(self, spaces: Mapping[str, Space]):
        self._spaces = dict(spaces)
        self._dtypes = {k: values.jax_dtype(space) for k, space in spaces.items()}
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def __call__(
        self, obs: Mapping[str, Any], envids: Any = None
    ) -> dict[str, np.ndarray]:
        """Returns what the policy reads, [B, ...] by key, in its dtypes.

        Args:
          obs: may have further keys.
          envids: which environment each row is of, [B], for messages.

        Raises:
          ValueError: a key is missing, or has another shape than its space.
        """
        missing = sorted(set(self._spaces) - set(obs))
        if missing:
            raise ValueError(
                f"policy expected observations {', '.join(self._spaces)}, got "
                f"{', '.join(sorted(obs))}: {', '.join(missing)} is missing."
            )
        rows = len(obs["is_first"])
        result = {}
        for key, space in self._spaces.items():
            value = np.asarray(obs[key])
            if value.shape != (rows, *space.shape):
                raise ValueError(
                    f"policy expected observation {key!r} of shape "
                    f"{(rows, *space.shape)}, got {value.shape}. All rows of a batch "
                    "have the shapes of their spaces."
                )
            if value.dtype.kind == "f":
                value = self._clean(key, value, envids)
            result[key] = value.astype(self._dtypes[key], copy=False)
        return result

    def counts(self) -> dict[str, int]:
        """Number of observations that were not finite, by key."""
        with self._lock:
            return dict(self._counts)

    def _clean(self, key: str, value: np.ndarray, envids: Array | None) -> np.ndarray:
        if np.isfinite(value).all():
            return value
        bad = np.isnan(value) | np.isposinf(value)  # Minus infinity means missing.
        rows = np.flatnonzero(bad.reshape((len(bad), -1)).any(-1))
        if not len(rows):
            return value
        with self._lock:
            first = key not in self._counts
            self._counts[key] = self._counts.get(key, 0) + len(rows)
        if first:
            where = f"row {rows[0]}"
            if envids is not None:
                where = f"environment {np.asarray(envids).reshape(-1)[rows[0]]}"
            logger.warning(
                "Observation %r of %s is not finite (%s). It is taken as missing; "
                "further ones of this key are only counted. Check the environment.",
                key,
                where,
                value[bad][0],
            )
        return np.where(bad, value.dtype.type(MISSING), value)
