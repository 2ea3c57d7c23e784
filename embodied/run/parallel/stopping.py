"""The end of a run: what brings it, and how long it may last. Any role.

The agent watches its own stop, and the launcher that of all roles:

    with StopDeadline(stop, logdir, settings.stop_timeout, give_up, awaited):
      ...                       # Trains, and saves once `stop` is set.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.rpc import Disconnected
from embodied.run.parallel.rendezvous import Rendezvous
from embodied.run.parallel.replicas import Replicas
from embodied.run.saving import FOLDER
from embodied.run.training_run import EVAL_REPLAY, TRAIN_REPLAY

LOOKS = 10  # Checks within the time that may pass without progress.
END_SECONDS = 1.0  # Until the thread notices the end of a block without a stop.


class StopTimeout(CheckpointError):
    """A run that is to stop makes no progress, so its end is not saved."""


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
    end of the block, which then raises the error.

    Args:
      stop: set when the stop begins.
      logdir: of the run.
      seconds: without progress, after which the stop has failed.
      give_up: called then, once, with the error.
      awaited: returns what the stop waits for, for the error.
      progress: returns another number whenever there was progress that no file shows.
    """

    def __init__(
        self,
        stop: threading.Event,
        logdir: str | Path,
        seconds: float,
        give_up: Callable[[StopTimeout], None],
        awaited: Callable[[], str],
        progress: Callable[[], float] = lambda: 0.0,
    ):
        self._stop = stop
        self._logdir = logdir
        self._folders = [Path(logdir, x) for x in (FOLDER, TRAIN_REPLAY, EVAL_REPLAY)]
        self._seconds = seconds
        self._give_up = give_up
        self._awaited = awaited
        self._other = progress
        self._steps = 0
        self._left = threading.Event()
        self._error: StopTimeout | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="stop watch", daemon=True).start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._left.set()
        if kind is None and self._error is not None:
            raise self._error

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
                self._error = self._timeout()
                self._give_up(self._error)
                return

    def _timeout(self) -> StopTimeout:
        stands = Checkpoint(self._logdir, FOLDER).describe_last()
        return StopTimeout(
            "The run was asked to stop, but nothing was written for "
            f"{self._seconds:g} s while it waited for {self._awaited()}, so it was "
            f"ended without saving. {stands} If it was slow, raise --run.stop_timeout."
        )

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


class RunEnd:
    """End of the run: its conditions, and the waits that it ends.

    Args:
      stop: set when the run is over.
      rendezvous: a failure of actor or learner ends the run, too.
      duration: seconds; 0 for no limit.
      replicas: which end together, each after the same update.
    """

    def __init__(
        self,
        stop: threading.Event,
        rendezvous: Rendezvous,
        duration: float,
        replicas: Replicas,
    ):
        self._stop = stop
        self._replicas = replicas
        self._duration = duration
        self._lock = threading.Lock()  # Guards the streams.
        self._streams: list[Any] = []
        self._watch = threading.Thread(target=self._run, name="over", daemon=True)
        self._rendezvous = rendezvous
        rendezvous.on_failure(stop.set)

    def __enter__(self) -> RunEnd:
        self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._watch.join()

    def __bool__(self) -> bool:
        return self._replicas.over(self._stop.is_set())

    def when(self, ask: Callable[[], Any]) -> None:
        """Ends the run when a call is answered; asks again if its server restarts."""

        def answered(future: Any) -> None:
            if isinstance(future.exception(0), Disconnected):
                with contextlib.suppress(Disconnected):  # The client is closed.
                    self.when(ask)
                    return
            self._stop.set()

        ask().add_callback(answered)

    def opened(self, stream: Any) -> None:
        """Registers a stream to be closed when the run is over."""
        with self._lock:
            self._streams = [x for x in self._streams if not x.closed] + [stream]
        if self._stop.is_set() and self._ends_at_once:
            stream.close()

    @property
    def _ends_at_once(self) -> bool:
        """Whether no update follows; replicas may make another, which needs batches."""
        return self._replicas.alone or self._rendezvous.broken

    def _run(self) -> None:
        self._stop.wait(self._duration or None)
        self._stop.set()
        if not self._ends_at_once:
            return
        with self._lock:
            for stream in self._streams:
                stream.close()
