"""Writes the columns that the Scope dashboard shows; in the process that logs."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import numpy as np

from embodied.logger.output import AsyncOutput, MissingPackageError, Summary


class ScopeOutput(AsyncOutput):
    """Writes scalars, images, videos and text to `logdir/scope`, in a thread.

    Vectors are left out, since Scope has no format for them.

    Args:
      logdir: folder in which the folder `scope` is created.
      fps: frames per second of videos.
      pattern: regular expression that a metric's whole name must match.
    """

    def __init__(
        self, logdir: str | os.PathLike[str], fps: int = 15, pattern: str = ".*"
    ):
        super().__init__(pattern)
        try:
            import scope
        except ImportError as error:
            raise MissingPackageError("scope", "scope") from error
        formats = [
            scope.formats.Text(),
            scope.formats.Float(),
            scope.formats.Image(),
            scope.formats.Video(fps=int(fps)),
        ]
        # Without workers, Scope writes in the calling thread, where errors are seen.
        self._writer: Any = scope.Writer(
            pathlib.Path(str(logdir)), workers=0, formats=formats
        )

    def _write(self, summaries: list[Summary]) -> None:
        for step, name, value in summaries:
            if isinstance(value, np.ndarray):
                if value.ndim == 1:
                    continue
                value = _supported(value)
            self._writer.add(step, {_column(name): value})
        self._writer.flush()


def _column(name: str) -> str:
    # Scope turns slashes into dashes and back, and needs a plain first character.
    name = re.sub(r"[^A-Za-z0-9_./]", "_", name)
    return name if re.match(r"[a-z0-9_]", name) else f"_{name}"


def _supported(value: np.ndarray) -> np.ndarray:
    if value.ndim == 2:
        value = value[..., None]
    if value.ndim == 3:
        return value[..., :3]
    if value.ndim == 4:
        # The video codec requires even sizes.
        odd = [(0, size % 2) for size in value.shape[1:3]]
        return np.pad(value, [(0, 0), *odd, (0, 0)], mode="edge")
    return value
