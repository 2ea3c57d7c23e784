"""Batches that the replay role samples, asked for ahead of time. Agent process."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from embodied.base import Array, Stream, Tree
from embodied.rpc import Disconnected
from embodied.run.parallel.wiring import Stopwatch


class RemoteStream(Stream):
    """Batches of one kind from the replay role.

    One thread reads; any other may close, which ends the reader's wait.

    Args:
      client: connection to the replay role.
      source: 'train', 'report' or 'eval'.
      ahead: calls that are open beside the one that is waited for.
      count: batches after which the stream ends; None for no end.
    """

    def __init__(
        self, client: Any, source: str, ahead: int = 0, count: int | None = None
    ):
        self.waiting = Stopwatch()
        self._client = client
        self._method = f"sample_batch_{source}"
        self._ahead = ahead
        self._count = count
        self._asked = 0
        self._open: deque[tuple[int, Any]] = deque()  # With their numbers.
        self._wake = threading.Event()
        self.closed = False

    def __next__(self) -> dict[str, Array]:
        while True:
            while len(self._open) <= self._ahead and self._asked != self._count:
                self._ask(self._asked)
                self._asked += 1
            if not self._open or not self._wait(self._open[0][1]):
                raise StopIteration
            try:
                batch = self._open[0][1].result(0)
            except Disconnected:
                self._ask_again()
                continue
            self._open.popleft()
            if not batch:
                raise StopIteration  # There is nothing to sample yet.
            return batch

    def save(self) -> Tree:
        """Returns nothing: batches are drawn at random, and have no position."""

    def load(self, data: Tree) -> None:
        """Goes on as before."""

    def close(self) -> None:
        """Ends the stream."""
        self.closed = True
        self._wake.set()

    def _ask(self, number: int) -> None:
        # The number lets the replay tell what was drawn from what was trained on.
        self._open.append((number, self._client.call(self._method, number)))

    def _ask_again(self) -> None:
        """Replaces calls to a replay that was restarted; in their order."""
        calls, self._open = self._open, deque()
        for number, future in calls:
            failed = future.done() and isinstance(future.exception(0), Disconnected)
            if failed:
                self._ask(number)
            else:
                self._open.append((number, future))

    def _wait(self, future: Any) -> bool:
        """Waits for a call; False if the stream is closed meanwhile."""
        self._wake.clear()
        if self.closed:  # Looked at after the clear, which would undo its wake-up.
            return False
        future.add_callback(lambda _: self._wake.set())
        with self.waiting:
            self._wake.wait()
        return future.done()
