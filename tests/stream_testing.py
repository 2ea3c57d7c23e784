"""A counting stream and a check for leftover threads, for the tests of streams."""

from __future__ import annotations

import threading

import pytest

from embodied.base import Stream

# Other work on the machine must not decide whether a test passes.


class Count(Stream):
    """Yields start, start + 1, ... and ends before `limit`."""

    def __init__(self, start=0, limit=10**9):
        self.value = start
        self.limit = limit
        self.closed = 0

    def __next__(self):
        if self.value >= self.limit:
            raise StopIteration
        self.value += 1
        return self.value - 1

    def save(self):
        return {"value": self.value}

    def load(self, data):
        self.value = data["value"]

    def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Fails a test that leaves the thread of a Prefetch running."""
    yield
    assert [x for x in threading.enumerate() if x.name == "prefetch"] == []


def take(stream, amount):
    """Returns the next items, padded with None after the end of the stream."""
    return [next(stream, None) for _ in range(amount)]
