"""Watches for updates that are not finite. Agent process, in the learner's thread."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from embodied.base import Array
from embodied.jax import devices

logger = logging.getLogger(__name__)

BATCH_FILE = "nonfinite_batch.npz"


class NonfiniteError(RuntimeError):
    """Too many updates in a row were not finite."""


class NonfiniteWatch:
    """Counts updates that were skipped, and ends training after too many in a row.

    Args:
      limit: updates in a row at which to end; 0 for never.
      folder: where to write the batch of the last of them.
    """

    def __init__(self, limit: int, folder: str | os.PathLike[str]):
        self.skipped = 0
        self._limit = limit
        self._folder = pathlib.Path(folder)

    def __call__(self, streak: int, batch: Mapping[str, Array]) -> None:
        """Notes an update.

        Args:
          streak: updates in a row that were skipped, this one included; 0 if it was
            finite.
          batch: what the update was made of.

        Raises:
          NonfiniteError: there were too many.
        """
        if not streak:
            return
        self.skipped += 1
        if self.skipped.bit_count() == 1:  # At 1, 2, 4, 8 and so on.
            logger.warning(
                "Skipped an update that was not finite: %d in a row, %d in all.",
                streak,
                self.skipped,
            )
        if self._limit and streak >= self._limit:
            raise NonfiniteError(
                f"run.max_nonfinite: expected fewer than {self._limit} updates in a "
                f"row without finite loss and gradients, got {streak}. The batch of "
                f"the last one is in {self._write(batch)}. Look there for large "
                "values, lower agent.opt.lr, or go back to a checkpoint."
            )

    def _write(self, batch: Mapping[str, Array]) -> pathlib.Path:
        """Writes a batch in types that NumPy itself has."""
        arrays = devices.fetch(dict(batch))
        for key, value in arrays.items():
            if value.dtype.kind == "V":
                arrays[key] = value.astype(np.float32)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / BATCH_FILE
        np.savez_compressed(path, **arrays)
        return path
