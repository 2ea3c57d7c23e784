"""Trains the agent on batches from the replay, and reports. The training process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

from embodied.base import Agent, Array, Stream, Tree
from embodied.replay import Replay
from embodied.run.metrics import Means

MakeStream = Callable[[Replay, str], Stream]


class Trainer:
    """Makes updates, one batch after the other, and reports.

    The stream of training batches is opened at the first update, so that there is
    data then. After a resume it begins with a new sample, for which the agent needs
    no carry. A context manager, which closes the stream.

    Args:
      agent: to train.
      replay: to train on; it gets `outputs['replay']` of every update.
      make_stream: makes the stream of a replay and a mode.
      args: the `run` block and the sizes of batches.
    """

    def __init__(
        self, agent: Agent, replay: Replay, make_stream: MakeStream, args: Any
    ):
        self.updates = 0
        self._agent = agent
        self._replay = replay
        self._make_stream = make_stream
        self._args = args
        self._means = Means()
        self._carry: Tree = None
        self._batches: Iterator[dict[str, Array]] | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def train(self) -> None:
        """Makes one update."""
        if self._batches is None:
            self._carry = self._agent.init_train(self._args.batch_size)
            self._batches = self._open.enter_context(
                self._stream(self._replay, "train")
            )
        batch = next(self._batches)
        self._carry, outputs, metrics = self._agent.train(self._carry, batch)
        if "replay" in outputs:
            self._replay.update(outputs["replay"])
        self._means.add(metrics)
        self.updates += 1

    def result(self) -> dict[str, Any]:
        """Returns the metrics of training, averaged since the last call."""
        return self._means.result()

    def report(self, replay: Replay, mode: str) -> dict[str, Any]:
        """Returns the agent's report on fresh samples, averaged over batches.

        It is empty as long as fewer sequences are stored than a batch has.

        Args:
          replay: to sample from.
          mode: 'report' for the replay of training, 'eval' for that of evaluation.
        """
        args = self._args
        if len(replay) < args.batch_size:
            return {}
        means = Means()
        carry = self._agent.init_report(args.batch_size)
        # A new stream every time, so that no batch was sampled long ago.
        with self._stream(replay, mode) as batches:
            for _ in range(args.consec_report * args.report_batches):
                carry, metrics = self._agent.report(carry, next(batches))
                means.add(metrics)
        return means.result()

    @contextlib.contextmanager
    def _stream(
        self, replay: Replay, mode: str
    ) -> Iterator[Iterator[dict[str, Array]]]:
        source = self._make_stream(replay, mode)
        batches = self._agent.stream(source)
        try:
            yield iter(batches)
        finally:
            for stream in (batches, source):
                if hasattr(stream, "close"):  # Plain iterators have none.
                    stream.close()
