"""Trains the agent on batches from the replay, and reports. The training process."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from embodied.base import Agent, Array, Stream, Tree
from embodied.replay import Replay
from embodied.run.metrics import Means
from embodied.run.settings import RunSettings

MakeStream = Callable[[Replay, str], Stream]


class Feed(Stream):
    """Hands batches from the loop's thread to the thread of the agent's stream.

        loop's thread       fetch: replay -> source -> waiting
        agent's thread      next:                      waiting -> device

    An agent reads ahead as far as it can. If it read from a replay that grows
    meanwhile, its samples would depend on how fast it reads. So it can only read
    batches that the loop has fetched for it, at a point that the loop chooses. If the
    agent has no thread of its own, the loop's thread reads; a batch that was not
    fetched before then comes from the source directly.

    `_changed` guards the state that both threads share. The feed has no position to
    save.

    Args:
      source: stream of batches; only the thread that makes the feed uses it.
    """

    def __init__(self, source: Stream):
        self._source = iter(source)
        self._owner = threading.current_thread()
        self._changed = threading.Condition()
        self._waiting: collections.deque[dict[str, Array]] = collections.deque()
        self._closed = False

    def fetch(self) -> None:
        """Takes a batch from the source, for the agent's stream to read."""
        batch = next(self._source)
        with self._changed:
            self._waiting.append(batch)
            self._changed.notify_all()

    def __next__(self) -> dict[str, Array]:
        if threading.current_thread() is self._owner and not self._waiting:
            return next(self._source)
        with self._changed:
            # The loop closes the feed before it joins the reader, so this wait ends.
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                raise StopIteration
            return self._waiting.popleft()

    def save(self) -> None:
        """Returns None: there is no position to keep."""
        return

    def load(self, data: Tree) -> None:
        """Does nothing: there is no position to go to."""

    def close(self) -> None:
        """Ends the stream, and wakes a thread that waits for a batch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Trainer:
    """Makes updates, one batch after the other, and reports.

    The replay is sampled in the caller's thread and in a fixed order; the agent's
    stream moves the batch to the device while the previous update is still running.

    The stream of training batches is opened at the first update, when the replay has
    data. After a resume it begins with a new sample, for which the agent needs no
    saved carry.

    Args:
      agent: agent to train.
      replay: replay to train on; it gets `outputs['replay']` of every update.
      make_stream: makes the stream of a replay and a mode.
      settings: the `run` block and the sizes of batches.
      stack: closes the stream of training batches at the end of the run.
    """

    def __init__(
        self,
        agent: Agent,
        replay: Replay,
        make_stream: MakeStream,
        settings: RunSettings,
        stack: contextlib.ExitStack,
    ):
        self.updates = 0
        self._agent = agent
        self._replay = replay
        self._make_stream = make_stream
        self._settings = settings
        self._means = Means()
        self._carry: Tree = None
        self._batches: tuple[Feed, Iterator[dict[str, Array]]] | None = None
        self._stack = stack

    def train(self, updates: int, pause: Callable[[], bool]) -> int:
        """Makes updates; returns how many.

        Args:
          updates: number of updates to make, unless `pause` ends them earlier.
          pause: called between two updates; returns whether to stop for now.
        """
        if not updates:
            return 0
        if self._batches is None:
            self._carry = self._agent.init_train(self._settings.batch_size)
            self._batches = self._stack.enter_context(
                self._stream(self._replay, "train")
            )
        feed, batches = self._batches
        made = 0
        while made < updates and not (made and pause()):
            feed.fetch()
            results = self._agent.train(self._carry, next(batches))
            self._carry, outputs, metrics = results
            self._add(outputs, metrics)
            self.updates += 1
            made += 1
        return made

    def finish(self) -> None:
        """Collects the last update's results, if the agent returns them a call late."""
        if hasattr(self._agent, "flush"):
            self._add(*self._agent.flush())

    def result(self) -> dict[str, Any]:
        """Returns the metrics of training, averaged since the last call."""
        return self._means.result()

    def report(self, replay: Replay, mode: str) -> dict[str, Any]:
        """Returns the agent's report on fresh samples, averaged over batches.

        The report is empty while the replay has fewer sequences than a batch.

        Args:
          replay: replay to sample from.
          mode: 'report' for the training replay, 'eval' for the evaluation replay.
        """
        settings = self._settings
        if len(replay) < settings.batch_size:
            return {}
        means = Means()
        carry = self._agent.init_report(settings.batch_size)
        # A new stream every time, so that no batch was sampled long ago.
        with self._stream(replay, mode) as (feed, batches):
            for _ in range(settings.consec_report * settings.report_batches):
                feed.fetch()
                carry, metrics = self._agent.report(carry, next(batches))
                means.add(metrics)
        return means.result()

    def _add(self, outputs: dict[str, Any], metrics: dict[str, Any]) -> None:
        if "replay" in outputs:
            self._replay.update(outputs["replay"])
        self._means.add(metrics)

    @contextlib.contextmanager
    def _stream(
        self, replay: Replay, mode: str
    ) -> Iterator[tuple[Feed, Iterator[dict[str, Array]]]]:
        source = self._make_stream(replay, mode)
        feed = Feed(source)
        batches = self._agent.stream(feed)
        try:
            yield feed, iter(batches)
        finally:
            for stream in (feed, batches, source):
                if hasattr(stream, "close"):  # Plain iterators have none.
                    stream.close()
