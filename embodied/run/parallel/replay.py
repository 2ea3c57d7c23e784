"""The replay role: stores transitions and samples batches. Replay process.

Threads of the server: one stores, one samples for training, one for reports, one
refreshes latents, and one saves and tells statistics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from embodied.base import Array, Stream
from embodied.checkpoint import FileRecord
from embodied.clock import LocalClock
from embodied.replay import Replay, limiters
from embodied.rpc import Unanswered
from embodied.run.messages import show_messages
from embodied.run.parallel import wiring
from embodied.run.parallel.saving import RoleCheckpoint, pack_reply
from embodied.run.session import EVAL_REPLAY, TRAIN_REPLAY
from embodied.run.signals import stop_on_signals
from embodied.run.usage import Usage

LIMITER = "limiter"  # Part of checkpoints, beside the replays.
SMALLEST_FILLING = 10.0  # Seconds between notes on how full the replay is.

logger = logging.getLogger("embodied.run")

MakeReplay = Callable[[], Replay]
MakeStream = Callable[[Replay, str], Stream]


class ReplayRole:
    """The replay role without its server.

    Each method of the server belongs to one thread at a time; `_lock` guards the
    counts that they share.

    Args:
      train: stores what training envs do.
      evaluation: stores what evaluation envs do.
      make_stream: makes the stream of a replay and a mode.
      args: `train_ratio` and the sizes of batches.
    """

    def __init__(
        self,
        train: Replay,
        evaluation: Replay,
        make_stream: MakeStream,
        args: Any,
    ):
        self._replays = {TRAIN_REPLAY: train, EVAL_REPLAY: evaluation}
        self._train, self._eval = train, evaluation
        self._batch = args.batch_size
        self._start = args.batch_size * args.batch_length
        self.limiter = limiters.make(
            args.train_ratio / args.batch_length, 4 * args.batch_size, self._start
        )
        self._streams = {
            "train": make_stream(train, "train"),
            "report": make_stream(train, "report"),
            "eval": make_stream(evaluation, "eval"),
        }
        self._lock = threading.Lock()
        self._drawn = 0  # Training batches that the learner has been given.
        self._limited = wiring.Stopwatch()
        self._sampling = wiring.Stopwatch()
        self._inserting = wiring.Stopwatch()
        self._filled = False
        self._note = LocalClock(SMALLEST_FILLING)

    def add_batch(self, transitions: dict[str, Array]) -> None:
        """Stores transitions [B, ...] of envs `envid`, of which some may evaluate."""
        steps = dict(transitions)
        envids = np.asarray(steps.pop("envid"))
        is_eval = np.asarray(steps.pop("is_eval"), bool)
        rows = np.flatnonzero(is_eval)
        if len(rows):
            with self._inserting:
                self._eval.add_batch(_take(steps, rows, len(envids)), envids[rows])
        rows = np.flatnonzero(~is_eval)
        if not len(rows):
            return
        if not self.limiter.insert(len(rows)):
            raise Unanswered("The replay is closing.")
        try:
            with self._inserting:
                self._train.add_batch(_take(steps, rows, len(envids)), envids[rows])
        except BaseException:
            self.limiter.withdraw(len(rows))
            raise
        self.limiter.available(len(self._train), self._train.capacity)
        if not self._filled:
            self._tell_filling()

    def sample_batch_train(self, number: int | None = None) -> dict[str, Array]:
        """Returns a batch to train on, as soon as the limiter lets it.

        Args:
          number: how many batches the learner had asked for before.
        """
        with self._limited:
            if not self.limiter.sample(self._batch):
                raise Unanswered("The replay is closing.")
        with self._lock:
            self._drawn = self._drawn + 1 if number is None else int(number) + 1
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

    def load(self, parts: dict[str, Any]) -> None:
        """Restores what `save` returned."""
        for name, replay in self._replays.items():
            if name in parts:
                replay.load(parts[name])
        if LIMITER in parts:
            self.limiter.load(parts[LIMITER])
        self.limiter.available(len(self._train), self._train.capacity)
        if len(self._train):
            logger.info("The replay has %d sequences from before.", len(self._train))

    def clean(
        self, parts: Collection[str], listed: Collection[str] | None, root: Any
    ) -> None:
        """Removes the files of the replays in `parts` that no checkpoint lists."""
        for name, replay in self._replays.items():
            if name in parts:
                replay.clean(listed, root)

    def save(self, trained: int) -> dict[str, Any]:
        """Returns the state of one moment; files are written after that moment.

        Args:
          trained: batches that the learner has trained on.

        Raises:
          CheckpointError: a replay could not be saved; what the other wrote is removed.
        """
        parts: dict[str, Any] = {}
        try:
            self._save_into(parts, trained)
        except BaseException:
            self.discard(parts)  # Nobody else knows of it.
            raise
        return parts

    def records(self, parts: dict[str, Any], root: Any) -> list[FileRecord]:
        """Returns the files that the replays in `parts` consist of."""
        return [
            record
            for name, replay in self._replays.items()
            for record in replay.records(parts[name], root)
        ]

    def discard(self, parts: dict[str, Any]) -> None:
        """Removes the files of a save that was not committed."""
        for name, replay in self._replays.items():
            if name in parts:
                replay.discard(parts[name])

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

    def _save_into(self, parts: dict[str, Any], trained: int) -> None:
        """Adds each part as soon as it is saved."""
        with self._lock:
            pending = max(0, self._drawn - int(trained))
        counted = int(self.limiter.stats()["samples"])
        parts[LIMITER] = self.limiter.save(min(pending * self._batch, counted))

        def cut_eval() -> None:
            parts[EVAL_REPLAY] = self._eval.save()

        parts[TRAIN_REPLAY] = self._train.save(on_cut=cut_eval)

    def _sample(self, mode: str, replay: Replay) -> dict[str, Array]:
        if not len(replay):
            return {}
        with self._sampling:
            return next(self._streams[mode])

    def _tell_filling(self) -> None:
        have, need = len(self._train), min(self._start, self._train.capacity)
        if have >= need:
            self._filled = True
            logger.info("The replay has %d sequences: training begins.", have)
        elif self._note():
            logger.info("Filling the replay: %d of %d sequences.", have, need)


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
    wiring.check_addresses(args, "replay_addr", "logger_addr")
    with show_messages(), stop_on_signals() as stop:
        role = ReplayRole(
            wiring.load_factory(make_replay_train)(),
            wiring.load_factory(make_replay_eval)(),
            wiring.load_factory(make_stream),
            args,
        )
        serve(role, args, stop)


def serve(role: ReplayRole, args: Any, stop: threading.Event) -> None:
    """Connects a role and serves it until `stop` is set."""
    checkpoint = RoleCheckpoint(args)
    parts = checkpoint.load((TRAIN_REPLAY, EVAL_REPLAY, LIMITER))
    role.load(parts)
    role.clean(parts, checkpoint.listed(), checkpoint.root)
    server = wiring.make_server(
        *("Server", args.replay_addr, "replay", args),
        on_failure=lambda error: stop.set(),
    )
    unsaved: dict[str, dict[str, Any]] = {}  # Saves that may yet be discarded.

    def save(tag: str, trained: int) -> str:
        parts = role.save(trained)
        unsaved.clear()
        unsaved[tag] = parts
        records = checkpoint.write(tag, parts) + role.records(parts, checkpoint.root)
        return pack_reply(records, {})

    def discard(tag: str) -> None:
        role.discard(unsaved.pop(tag, {}))

    for name, options in {
        "add_batch": {"workers": 1},
        "sample_batch_train": {"workers": 1},
        "sample_batch_report": {"workers": 1},
        "sample_batch_eval": {"workers": 1},
        "update": {"workers": 1},
    }.items():
        server.bind(name, getattr(role, name), **options)
    server.bind("save", save)
    server.bind("discard", discard)
    usage = Usage(args.usage, accelerator=False)
    with wiring.make_client(args.logger_addr, "replay-logger", args) as log:
        with server:
            _tell_statistics(role, server, log, usage, args, stop)
            role.close()


def _tell_statistics(
    role: ReplayRole, server: Any, log: Any, usage: Usage, args: Any, stop: Any
) -> None:
    """Sends statistics every `log_every` seconds until the end."""
    results = wiring.Results(
        lambda _, error: logger.warning("The logger took no statistics: %s", error)
    )
    every = max(1.0, args.log_every) if args.log_every else None
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
