"""The replay role: stores transitions and samples batches. Replay process.

Threads of the server: one stores, one samples for training, one for reports, one
refreshes latents, and one saves. The thread that serves tells statistics.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from embodied.base import Array, Stream, Tree
from embodied.clock import LocalClock
from embodied.replay import Replay, ReplayCut
from embodied.rpc import Unanswered
from embodied.run.console import show_messages, stop_on_signals
from embodied.run.live import record_events
from embodied.run.parallel import wiring
from embodied.run.parallel.conductor import RoleCheckpoint
from embodied.run.settings import RunSettings
from embodied.run.training_run import EVAL_REPLAY, LIMITER, TRAIN_REPLAY, make_limiter
from embodied.run.usage import Usage

OPEN_CALLS = 16  # For batches that a learner has open at once, and may lose.
SMALLEST_FILLING = 10.0  # Seconds between notes on how full the replay is.

logger = logging.getLogger("embodied.run")

MakeReplay = Callable[[], Replay]
MakeStream = Callable[[Replay, str], Stream]


class ReplayRole:
    """The replay role without its server.

    Each method of the server belongs to one thread at a time. Two locks, which a save
    takes both, in this order, and which nobody holds while it waits for the limiter:
    `_storing` keeps the replays and the limiter's inserts at the same step, `_drawing`
    the limiter's samples and the batches that were drawn.

    Args:
      train: stores what training envs do.
      evaluation: stores what evaluation envs do.
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
        self._replays = {TRAIN_REPLAY: train, EVAL_REPLAY: evaluation}
        self._train, self._eval = train, evaluation
        for replay in self._replays.values():
            replay.use_context(settings.replay_context)
        self._batch = settings.batch_size
        self.limiter = make_limiter(settings)
        self._streams = {
            "train": make_stream(train, "train"),
            "report": make_stream(train, "report"),
            "eval": make_stream(evaluation, "eval"),
        }
        self._storing = threading.Lock()
        self._drawing = threading.Lock()
        self._drawn = 0  # Training batches that the learner has been given.
        # Samples in the weights of the learner when it started; None if it was there
        # before this role.
        self._base: int | None = None
        self._limited = wiring.TimeShare()
        self._sampling = wiring.TimeShare()
        self._inserting = wiring.TimeShare()
        self._start = settings.batch_size * settings.batch_length
        self._told = False  # Whether it was said that training begins.
        self._note = LocalClock(SMALLEST_FILLING)

    def add_batch(self, transitions: dict[str, Array]) -> None:
        """Stores transitions [B, ...] of envs `envid`, of which some may evaluate."""
        steps = dict(transitions)
        envids = np.asarray(steps.pop("envid"))
        is_eval = np.asarray(steps.pop("is_eval"), bool)
        rows = np.flatnonzero(is_eval)
        if len(rows):
            with self._inserting, self._storing:
                self._eval.add_batch(_take(steps, rows, len(envids)), envids[rows])
        rows = np.flatnonzero(~is_eval)
        if not len(rows):
            return
        if not self.limiter.wait_insert(len(rows)):
            raise Unanswered("The replay is closing.")
        with self._inserting, self._storing:
            self._train.add_batch(_take(steps, rows, len(envids)), envids[rows])
            self.limiter.insert(len(rows))
            self.limiter.available(len(self._train), self._train.full)
        if not self._told:
            self._tell_filling()

    def sample_batch_train(self, number: int | None = None) -> dict[str, Array]:
        """Returns a batch to train on, as soon as the limiter lets it.

        Args:
          number: how many batches the learner had asked for before.
        """
        with self._limited:
            if not self.limiter.wait_sample():
                raise Unanswered("The replay is closing.")
        with self._drawing:
            self._count_drawn(number)
        with self._sampling:
            return next(self._streams["train"])

    def sample_batch_report(self, number: int | None = None) -> dict[str, Array]:
        """Returns a batch of training steps for a report; empty if there are none."""
        return self._sample("report", self._train)

    def sample_batch_eval(self, number: int | None = None) -> dict[str, Array]:
        """Returns a batch of evaluation steps; empty if there are none."""
        return self._sample("eval", self._eval)

    def update(self, data: dict[str, Array]) -> None:
        """Refreshes latents and priorities in the train replay."""
        self._train.update(data)

    def begin_training(self, saved: str) -> None:
        """Takes back the samples that a learner which has started does not have.

        A learner that was restarted goes on from its checkpoint, without the updates
        that it made since: as many are made again.

        Args:
          saved: of the limiter in the learner's checkpoint, as JSON.
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
        """Restores the parts of a checkpoint."""
        for name, replay in self._replays.items():
            if name in parts:
                replay.load(parts[name])
        if LIMITER in parts:
            self.limiter.load(parts[LIMITER])
        self.limiter.available(len(self._train), self._train.full)
        if len(self._train):
            logger.info("The replay has %d sequences from before.", len(self._train))

    def clean(
        self, parts: Collection[str], listed: Collection[str] | None, root: Any
    ) -> None:
        """Removes the files of the replays in `parts` that no checkpoint lists."""
        for name, replay in self._replays.items():
            if name in parts:
                replay.clean(listed, root)

    def cut(self, trained: int) -> dict[str, Tree | ReplayCut]:
        """Returns the state of one moment, by part; `PartWriter` writes it.

        Args:
          trained: batches that the learner has trained on.
        """
        with self._storing, self._drawing:
            pending = max(0, self._drawn - int(trained)) * self._batch
            cuts: dict[str, Tree | ReplayCut] = {LIMITER: self.limiter.save(pending)}
            for name, replay in self._replays.items():
                cuts[name] = replay.cut()
            return cuts

    def stats(self) -> dict[str, float]:
        """Returns what is stored, rates, and shares of time since the last call."""
        return {
            **dict(wiring.prefixed(TRAIN_REPLAY, self._train.stats())),
            **dict(wiring.prefixed(EVAL_REPLAY, self._eval.stats())),
            **dict(wiring.prefixed("replay/limiter", self.limiter.stats())),
            "timer/replay/limited": self._limited.share(),
            "timer/replay/sample": self._sampling.share(),
            "timer/replay/insert": self._inserting.share(),
        }

    def close(self) -> None:
        """Ends waits."""
        self.limiter.close()
        for stream in self._streams.values():
            stream.close()

    def _count_drawn(self, number: int | None) -> None:
        """Counts a training batch. `_drawing` is held.

        Raises:
          Unanswered: the call is one that a learner which was killed had still open.
        """
        number = self._drawn if number is None else int(number)
        if self._base is not None and number > self._drawn + OPEN_CALLS:
            raise Unanswered("Another learner has asked for this batch.")
        self.limiter.sample(self._batch)
        self._drawn = number + 1
        if self._base is not None:
            # Also without those whose numbers cannot be told from the new learner's.
            self.limiter.set_samples(self._base + self._drawn * self._batch)

    def _sample(self, mode: str, replay: Replay) -> dict[str, Array]:
        if not len(replay):
            return {}
        with self._sampling:
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
    parts = checkpoint.load((TRAIN_REPLAY, EVAL_REPLAY, LIMITER))
    role.load(parts)
    role.clean(parts, checkpoint.listed(), checkpoint.root)
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
    with wiring.make_client(settings.logger_addr, "replay-logger", settings) as log:
        with server:
            _tell_statistics(role, server, log, usage, settings, stop)
            role.close()


def _tell_statistics(
    role: ReplayRole,
    server: Any,
    log: Any,
    usage: Usage,
    settings: RunSettings,
    stop: Any,
) -> None:
    """Sends statistics every `log_every` seconds until the end."""
    results = wiring.Results(
        lambda _, error: logger.warning("The logger took no statistics: %s", error)
    )
    every = max(1.0, settings.log_every) if settings.log_every else None
    while not stop.wait(every):
        results.check()
        if not log.connected:
            continue
        results.add(
            log.add(
                {
                    **role.stats(),
                    **dict(wiring.prefixed("server/replay", server.stats())),
                    **dict(wiring.prefixed("client/replay_logger", log.stats())),
                    **dict(wiring.prefixed("usage/replay", usage.result())),
                }
            )
        )


def _take(steps: dict[str, Array], rows: np.ndarray, count: int) -> dict[str, Array]:
    if len(rows) == count:
        return steps
    return {key: np.asarray(value)[rows] for key, value in steps.items()}
