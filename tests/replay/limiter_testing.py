"""What the tests of limiters share."""

from __future__ import annotations

import threading
import time

from hypothesis import strategies as st

from embodied.replay import limiters

PATIENCE = 60.0  # Seconds after which a thread that waits counts as stuck.


def started(ratio=0.5, tolerance=64, min_size=16):
    """Returns a limiter with the first batch stored."""
    limiter = limiters.SamplesPerInsert(ratio, tolerance, min_size)
    limiter.available(min_size)
    return limiter


def insert_until_held(limiter, amount=1):
    count = 0
    while limiter.insert(amount, timeout=0):
        count += amount
    return count


def sample_until_held(limiter, amount=16):
    count = 0
    while limiter.sample(amount, timeout=0):
        count += amount
    return count


class Call:
    """A call in a thread of its own."""

    def __init__(self, function, *args):
        self.result = None
        self.function, self.args = function, args
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        self.result = self.function(*self.args)

    def wait(self):
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "The call still waits."
        return self.result


def wait_until(condition):
    """Waits for what other threads are about to bring about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "Other threads are stuck."
        threading.Event().wait(0.001)


def wait_until_in_line(limiter, amount):
    """Waits until so many calls of the limiter wait in other threads."""

    def in_line():
        stats = limiter.stats()
        return stats["inserts_waiting"] + stats["samples_waiting"] >= amount

    wait_until(in_line)


def counts(limiter):
    """Returns inserts, samples, and how far samples are ahead."""
    return tuple(limiter.stats()[key] for key in ("inserts", "samples", "ahead"))


@st.composite
def settings_of_a_run(draw):
    batch = draw(st.integers(1, 20))
    return {
        "ratio": draw(st.sampled_from([1 / 64, 0.1, 1 / 3, 0.5, 1.0, 7.3, 16.0])),
        "tolerance": batch * draw(st.integers(1, 5)),
        "batch": batch,
        "groups": draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        "prefill": draw(st.integers(0, 60)),
    }


def check_bounds(limiter, run, started):
    """Checks how far samples are ahead.

    Args:
      started: an upper bound of the steps that were stored when sampling could begin.
    """
    largest = run["ratio"] * max(*run["groups"], started)
    ahead = limiter.stats()["ahead"]
    assert -max(run["tolerance"], largest) - 1e-6 <= ahead <= run["batch"]
