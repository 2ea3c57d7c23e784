"""Bounds the stop of a run: it may last only while it makes progress. Any role.

The agent watches its own stop, and the launcher that of all roles:

    with StopDeadline(stop, logdir, settings.stop_timeout, give_up):
      ...                       # Trains, and saves once `stop` is set.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.run.saving import FOLDER
from embodied.run.training_run import EVAL_REPLAY, TRAIN_REPLAY

LOOKS = 10  # Checks within the time that may pass without progress.
END_SECONDS = 1.0  # Until the thread notices the end of a block without a stop.


class StopTimeout(CheckpointError):
    """A run that is to stop makes no progress, so its end is not saved."""

    @classmethod
    def after(cls, seconds: float, logdir: str | Path, awaited: str) -> StopTimeout:
        """Makes the error of a run that has waited so many seconds for `awaited`."""
        stands = Checkpoint(logdir, FOLDER).describe_last()
        return cls(
            f"The run was asked to stop, but nothing was written for {seconds:g} s "
            f"while it waited for {awaited}, so it was ended without saving. {stands} "
            "If it was slow, raise --run.stop_timeout."
        )


def note_compiling(agent: Any, progress: Callable[[], None]) -> Callable[[], float]:
    """Returns a function whose result changes while the agent compiles.

    Compiling takes minutes and cannot be interrupted. The launcher is told by
    `progress`, since it sees no compilation of another process.
    """

    def changing() -> float:
        if not getattr(agent, "compiling", False):
            return 0.0
        progress()
        return time.monotonic()

    return changing


class StopDeadline:
    """Calls a function if a stop has begun and makes no progress for some time.

    Progress is whatever any role writes to checkpoints and replays, every call of
    `step`, and any change of `progress`. A thread of its own watches from `stop` to the
    end of the block.

    Args:
      stop: set when the stop begins.
      logdir: of the run.
      seconds: without progress, after which the stop has failed.
      give_up: called then, once.
      progress: returns another number whenever there was progress that no file shows.
    """

    def __init__(
        self,
        stop: threading.Event,
        logdir: str | Path,
        seconds: float,
        give_up: Callable[[], None],
        progress: Callable[[], float] = lambda: 0.0,
    ):
        self._stop = stop
        self._folders = [Path(logdir, x) for x in (FOLDER, TRAIN_REPLAY, EVAL_REPLAY)]
        self._seconds = seconds
        self._give_up = give_up
        self._other = progress
        self._steps = 0
        self._left = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="stop watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()

    def step(self) -> None:
        """Records progress that no file shows."""
        self._steps += 1

    def _run(self) -> None:
        while not self._stop.wait(END_SECONDS):
            if self._left.is_set():
                return
        seen, since = self._progress(), time.monotonic()
        while not self._left.wait(self._seconds / LOOKS):
            found = self._progress()
            if found != seen:
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > self._seconds:
                self._give_up()
                return

    def _progress(self) -> tuple[float, ...]:
        """Returns counters that change with any progress."""
        sizes = [size for folder in self._folders for size in _file_sizes(folder)]
        return self._steps, self._other(), len(sizes), sum(sizes)


def _file_sizes(folder: Path) -> list[int]:
    sizes = []
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(base, name)).st_size)
            except OSError:  # It was temporary, and is gone.
                continue
    return sizes
