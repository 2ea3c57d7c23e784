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

REWARD = "reward"
MISSING = -np.inf  # What a float is that an environment could not observe.


class Observations:
    """Checks observations, and makes missing what is not finite.

    May be called from several threads: `_lock` guards the counts, and which keys of
    which environments were told about.

    Args:
      spaces: what the policy reads, by key.
    """

    def __init__(self, spaces: Mapping[str, Space]):
        self._spaces = dict(spaces)
        self._dtypes = {k: values.jax_dtype(space) for k, space in spaces.items()}
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._told: set[tuple[str, int]] = set()

    def __call__(
        self, obs: Mapping[str, Any], envids: Any = None
    ) -> dict[str, np.ndarray]:
        """Returns what the policy reads, [B, ...] by key, in its dtypes.

        Args:
          obs: may have further keys.
          envids: which environment each row is of, [B], for messages; by default
            they are numbered as the rows are.

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
        if REWARD in obs:  # Not read here, but known by environment only here.
            self._clean(REWARD, np.asarray(obs[REWARD]), envids)
        return result

    def zeros(self, rows: int) -> dict[str, np.ndarray]:
        """Returns zeros for so many rows, as the policy reads them."""
        return {
            key: np.zeros((rows, *space.shape), self._dtypes[key])
            for key, space in self._spaces.items()
        }

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
        envs = rows if envids is None else np.asarray(envids).reshape(-1)[rows]
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + len(rows)
            news = [env for env in envs.tolist() if (key, env) not in self._told]
            self._told.update((key, env) for env in news)
        if news:
            logger.warning(
                "Observation %r of environment %s is not finite (%s). It is taken as "
                "missing, a reward as zero; further ones are only counted. Check the "
                "environment.",
                key,
                ", ".join(map(str, news)),
                value[bad][0],
            )
        return np.where(bad, value.dtype.type(MISSING), value)
