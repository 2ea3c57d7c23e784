"""The replay role: stores transitions and samples batches. Replay process.

Threads of the server: one each to store, to sample for training, for reports and for
evaluation, to refresh latents, to take back updates, and to save. Another thread sends
statistics.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from embodied.base import Array, Tree
from embodied.clock import LocalClock
from embodied.replay import Replay, ReplayCut
from embodied.rpc import Unanswered
from embodied.run.console import show_messages, stop_on_signals
from embodied.run.live import record_events
from embodied.run.parallel import wiring
from embodied.run.parallel.conductor import RoleCheckpoint
from embodied.run.parallel.reports import metrics_clock, tell_logger
from embodied.run.saving import load_files
from embodied.run.settings import RunSettings
from embodied.run.trainer import MakeStream
from embodied.run.training_run import EVAL_REPLAY, LIMITER, TRAIN_REPLAY, make_limiter
from embodied.run.usage import Usage

OPEN_CALLS = 16  # Maximum calls for batches that a learner has open, and may lose.
SMALLEST_FILLING = 10.0  # Seconds between notes on how full the replay is.

logger = logging.getLogger("embodied.run")

MakeReplay = Callable[[], Replay]


class ReplayRole:
    """The replay role without its server.

    Each method of the server belongs to one thread at a time. There are two locks:
    `_storing` keeps the replays consistent with the limiter's inserts, and `_drawing`
    the limiter's samples with the batches that were drawn. A save takes both, in this
    order, and no thread holds one of them while it waits for the limiter.

    Args:
      train: stores the steps of training envs.
      evaluation: stores the steps of evaluation envs.
      make_stream: makes the stream of a replay and a mode.
      settings: `train_ratio` and the sizes of batches.
    """

    def __init__(
        self,
        train: Replay,
        evaluation: Replay,
        make_stream: MakeStream,
        settings: RunSettings,
    ):
        self.replays = {TRAIN_REPLAY: train, EVAL_REPLAY: evaluation}
        self._train, self._eval = train, evaluation
        for replay in self.replays.values():
            replay.use_context(settings.replay_context)
        self._batch = settings.batch_size
        self.limiter = make_limiter(settings)
        self._make_stream = make_stream
        self._sources = {"train": train, "report": train, "eval": evaluation}
        self._streams = {
            mode: make_stream(replay, mode) for mode, replay in self._sources.items()
        }
        self._storing = threading.Lock()
        self._drawing = threading.Lock()
        self._drawn = 0  # Training batches that the learner has been given.
        # Samples that the learner's weights contained when it started; None if it
        # started before this role.
        self._base: int | None = None
        self._limited = wiring.TimeShare()
        self._sampling = wiring.TimeShare()
        self._inserting = wiring.TimeShare()
        self._start = settings.batch_size * settings.batch_length
        self._told = False  # Whether the start of training was logged.
        self._note = LocalClock(SMALLEST_FILLING)

    def add_batch(self, transitions: dict[str, Array]) -> None:
        """Stores transitions [B, ...] of envs `envid`, of which some may evaluate."""
        steps = dict(transitions)
        envids = np.asarray(steps.pop("envid"))
        is_eval = np.asarray(steps.pop("is_eval"), bool)
        rows = np.flatnonzero(is_eval)
        if len(rows):
            with self._inserting, self._storing:
                self._store(self._eval, steps, envids, rows)
        rows = np.flatnonzero(~is_eval)
        if not len(rows):
            return
        if not self.limiter.wait_insert(len(rows)):
            raise Unanswered("The replay is closing.")
        with self._inserting, self._storing:
            self._store(self._train, steps, envids, rows)
            self.limiter.insert(len(rows))
            self.limiter.available(len(self._train), self._train.full)
        if not self._told:
            self._tell_filling()

    def sample_batch_train(self, number: int | None = None) -> dict[str, Array]:
        """Returns a batch to train on, as soon as the limiter allows it.

        Args:
          number: how many batches the learner had asked for before.
        """
        with self._limited:
            if not self.limiter.wait_sample():
                raise Unanswered("The replay is closing.")
        with self._drawing:
            self._count_drawn(number)
        return self._sample("train", number)

    def sample_batch_report(self, number: int | None = None) -> dict[str, Array]:
        """Returns a batch of training steps for a report; empty if there are none."""
        return self._sample("report", number) if len(self._train) else {}

    def sample_batch_eval(self, number: int | None = None) -> dict[str, Array]:
        """Returns a batch of evaluation steps; empty if there are none."""
        return self._sample("eval", number) if len(self._eval) else {}

    def update(self, data: dict[str, Array]) -> None:
        """Refreshes latents and priorities in the train replay."""
        self._train.update(data)

    def begin_training(self, saved: str) -> None:
        """Uncounts samples whose updates a newly started learner does not have.

        A restarted learner continues from its checkpoint, without the updates made
        since then: as many are made again.

        Args:
          saved: state of the limiter in the learner's checkpoint, as JSON.
        """
        with self._drawing:
            samples = int(self.limiter.stats()["samples"])
            self._base = min(samples, self.limiter.saved_samples(json.loads(saved)))
            self._drawn = 0
            self.limiter.set_samples(self._base)
        if self._base < samples:
            logger.info(
                "The learner is back, without the updates since its checkpoint: %d "
                "samples are drawn again.",
                samples - self._base,
            )

    def load(self, parts: dict[str, Any]) -> None:
        """Restores the parts of a checkpoint; call it also if there is none."""
        for name, replay in self.replays.items():
            if name in parts:
                replay.load(parts[name])
        if LIMITER in parts:
            self.limiter.load(parts[LIMITER])
        self.limiter.available(len(self._train), self._train.full)
        if len(self._train):
            logger.info("The replay has %d sequences from before.", len(self._train))

    def cut(self, trained: int) -> dict[str, Tree | ReplayCut]:
        """Returns the state of one moment, by part; `PartWriter` writes it.

        Args:
          trained: batches that the learner has trained on.
        """
        with self._storing, self._drawing:
            pending = max(0, self._drawn - int(trained)) * self._batch
            cuts: dict[str, Tree | ReplayCut] = {LIMITER: self.limiter.save(pending)}
            for name, replay in self.replays.items():
                cuts[name] = replay.cut()
            return cuts

    def stats(self) -> dict[str, float]:
        """Returns what is stored, rates, and shares of time since the last call."""
        return {
            **wiring.prefixed(TRAIN_REPLAY, self._train.stats()),
            **wiring.prefixed(EVAL_REPLAY, self._eval.stats()),
            **wiring.prefixed("replay/limiter", self.limiter.stats()),
            "timer/replay/limited": self._limited.share(),
            "timer/replay/sample": self._sampling.share(),
            "timer/replay/insert": self._inserting.share(),
        }

    def close(self) -> None:
        """Ends all waits, and closes the streams."""
        self.limiter.close()
        for stream in self._streams.values():
            stream.close()

    def _count_drawn(self, number: int | None) -> None:
        """Counts a training batch. `_drawing` is held.

        Raises:
          Unanswered: the call was left open by a learner that was killed.
        """
        number = self._drawn if number is None else int(number)
        if self._base is not None and number > self._drawn + OPEN_CALLS:
            raise Unanswered("Another learner has asked for this batch.")
        self.limiter.sample(self._batch)
        self._drawn = number + 1
        if self._base is not None:
            # So calls of the old learner with numbers like the new one's do not count.
            self.limiter.set_samples(self._base + self._drawn * self._batch)

    def _store(
        self,
        replay: Replay,
        steps: dict[str, Array],
        envids: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Stores some rows of a batch; if they are refused, new episodes follow them.

        Batches that the actor has sent before it hears of the refusal continue the
        episodes of this one, and no sequence may reach across the gap.
        """
        try:
            replay.add_batch(_take(steps, rows, len(envids)), envids[rows])
        except Exception:
            for envid in envids[rows].tolist():
                replay.abandon(envid)
            raise

    def _sample(self, mode: str, number: int | None) -> dict[str, Array]:
        with self._sampling:
            if number == 0:
                # A new learner, or report, begins with the first chunk of a sequence,
                # wherever the one before it has stopped.
                self._streams[mode].close()
                self._streams[mode] = self._make_stream(self._sources[mode], mode)
            return next(self._streams[mode])

    def _tell_filling(self) -> None:
        have = len(self._train)
        if self.limiter.begun:
            self._told = True
            logger.info("The replay has %d sequences: training begins.", have)
        elif self._note():
            logger.info("Filling the replay: %d of %d sequences.", have, self._start)


def parallel_replay(
    make_replay_train: bytes | MakeReplay,
    make_replay_eval: bytes | MakeReplay,
    make_stream: bytes | MakeStream,
    args: Any,
) -> None:
    """Serves the replay until SIGTERM or Ctrl-C.

    Args:
      make_replay_train: makes the replay of training envs; may be cloudpickled.
      make_replay_eval: makes that of evaluation envs.
      make_stream: makes the stream of batches of a replay and a mode.
      args: the `run` block of the configuration and what belongs to it.
    """
    settings = RunSettings.from_args(args)
    wiring.check_addresses(settings, "replay_addr", "logger_addr")
    with (
        show_messages(),
        record_events(settings.logdir),
        stop_on_signals() as stop,
    ):
        role = ReplayRole(
            wiring.load_factory(make_replay_train)(),
            wiring.load_factory(make_replay_eval)(),
            wiring.load_factory(make_stream),
            settings,
        )
        serve(role, settings, stop)


def serve(role: ReplayRole, settings: RunSettings, stop: threading.Event) -> None:
    """Connects a role and serves it until `stop` is set."""
    checkpoint = RoleCheckpoint(settings)
    # First, since it raises if a folder cannot be used.
    folders = {name: checkpoint.folder(name) for name in role.replays}
    parts = checkpoint.load((*folders, LIMITER))
    if checkpoint.is_new:
        for name, folder in folders.items():
            load_files(role.replays[name], folder)
    role.load(parts)
    listed = checkpoint.listed()
    for name in parts.keys() & folders:
        role.replays[name].clean(listed, checkpoint.root)
    server = wiring.make_server(
        *("Server", settings.replay_addr, "replay", settings),
        on_failure=lambda error: stop.set(),
    )

    def save(tag: str, trained: int) -> str:
        checkpoint.begin()
        return checkpoint.write(tag, role.cut(trained), {})

    for name in (
        "add_batch",
        "sample_batch_train",
        "sample_batch_report",
        "sample_batch_eval",
        "update",
        "begin_training",
    ):
        server.bind(name, getattr(role, name), workers=1)
    # One save at a time, in a thread of its own, since it may take minutes.
    server.bind("save", save, workers=1)
    server.bind("discard", checkpoint.discard)
    usage = Usage(settings.usage, accelerator=False)
    should_log = metrics_clock(settings)

    def tell(log: Any) -> Iterator[Any]:
        if should_log():
            metrics = {
                **role.stats(),
                **wiring.prefixed("server/replay", server.stats()),
                **wiring.prefixed("client/replay_logger", log.stats()),
                **wiring.prefixed("usage/replay", usage.result()),
            }
            yield log.add(metrics)

    with server, tell_logger(settings, "replay-logger", tell):
        stop.wait()
        role.close()


def _take(steps: dict[str, Array], rows: np.ndarray, count: int) -> dict[str, Array]:
    if len(rows) == count:
        return steps
    return {key: np.asarray(value)[rows] for key, value in steps.items()}
