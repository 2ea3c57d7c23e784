"""Appends scalars to a file of JSON lines; in the process that logs."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from embodied.logger.output import Output, Summary, rows_by_step

_STEP = re.compile(rb'\{"step": ?(\d+)[,}]')

_log = logging.getLogger(__name__)


class JSONLOutput(Output):
    r"""Appends `{"step": …, name: number, …}` to a file, one line per step and write.

    A name that occurs twice at one step starts another line, so that no value is lost.
    NaN and infinities, which JSON lacks, are written as `null`. Text, vectors, images
    and videos are left out.

    Every line is complete: the last line of a killed process is completed or cut off
    when the file is opened, and a write that fails half-way, as on a full disk, is
    undone. A continued run removes the lines of steps that it repeats.

        JSONLOutput(logdir, 'scores.jsonl', 'episode/score')   # Not eval_episode/score.

    Args:
      logdir: folder of the file, created if needed.
      filename: name of the file in it.
      pattern: regular expression that a metric's whole name must match.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        filename: str = "metrics.jsonl",
        pattern: str = ".*",
    ):
        super().__init__(pattern)
        path = pathlib.Path(str(logdir)) / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair(path)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def __call__(self, summaries: Sequence[Summary]) -> None:
        """Appends the scalars whose name matches the pattern."""
        scalars = [
            (step, name, _number(value))
            for step, name, value in self.selected(summaries)
            if not isinstance(value, str) and not value.ndim
        ]
        if rows := rows_by_step(scalars):
            lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
            self._append("".join(lines).encode())

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps."""
        start, removed, kept = _later_lines(self._path, step)
        if not removed:
            return
        _log.info(
            "%s: removed %d lines of steps after %d, which the run repeats.",
            self._path,
            removed,
            step,
        )
        if not kept:
            # The usual case: the removed lines are the end of the file.
            os.truncate(self._file.fileno(), start)
            return
        # In files of earlier versions, steps go back at every resume.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with self._path.open("rb") as source, temporary.open("wb") as target:
                target.write(source.read(start))
                target.writelines(kept)
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Closes the file; every write has reached it already."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError:
            # Report the error of the write, not one of undoing it.
            with contextlib.suppress(OSError):
                os.truncate(self._file.fileno(), size)
            raise


def _number(value: np.ndarray) -> int | float | None:
    number = value.item()
    return number if math.isfinite(number) else None


def _later_lines(path: pathlib.Path, last: int) -> tuple[int, int, list[bytes]]:
    """Finds the lines of steps after `last`.

    Returns:
      The position of the first of them, their number, and the other lines after the
      first, of earlier steps or without a step.
    """
    start, removed, kept, position = 0, 0, [], 0
    with path.open("rb") as file:
        for line in file:
            match = _STEP.match(line)
            if match and int(match[1]) > last:
                start = start if removed else position
                removed += 1
            elif removed:
                kept.append(line)
            position += len(line)
    return start, removed, kept


def _repair(path: pathlib.Path) -> None:
    """Completes a last line that lacks its newline, or removes it if cut off."""
    if not path.is_file():
        return
    start, tail = 0, b""
    with path.open("r+b") as file:
        for line in file:
            start, tail = start + len(tail), line
        if not tail or tail.endswith(b"\n"):
            return
        try:
            whole = isinstance(json.loads(tail), dict)
        except ValueError:
            whole = False
        if whole:
            file.write(b"\n")
        else:
            file.truncate(start)
