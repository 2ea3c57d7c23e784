"""Helpers for the tests of limiters."""

from __future__ import annotations

import threading

from hypothesis import strategies as st
from waiting_testing import WAIT, wait_until

from embodied.replay.limiters import SamplesPerInsert


def started(ratio=0.5, tolerance=64, min_size=16):
    """Returns a limiter at the moment training begins."""
    limiter = SamplesPerInsert(ratio, tolerance, min_size)
    limiter.insert(1)
    limiter.available(min_size, full=False)
    return limiter


def may_insert(limiter, amount=1):
    return limiter.wait_insert(amount, timeout=0)


def may_sample(limiter):
    return limiter.wait_sample(timeout=0)


def insert(limiter, amount=1, timeout=WAIT):
    """Waits until steps may be stored, then counts them; returns whether it did."""
    if not limiter.wait_insert(amount, timeout):
        return False
    limiter.insert(amount)
    return True


def sample(limiter, amount=16, timeout=WAIT):
    """Waits until samples may be drawn, then counts them; returns whether it did."""
    if not limiter.wait_sample(timeout):
        return False
    limiter.sample(amount)
    return True


def insert_until_held(limiter, amount=1):
    count = 0
    while insert(limiter, amount, timeout=0):
        count += amount
    return count


def sample_until_held(limiter, amount=16):
    count = 0
    while sample(limiter, amount, timeout=0):
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
        self.thread.join(WAIT)
        assert not self.thread.is_alive(), "The call still waits."
        return self.result


def wait_until_in_line(limiter, amount):
    """Waits until `amount` calls of the limiter are waiting in other threads."""

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
        "min_size": draw(st.integers(1, 60)),
        "groups": draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        "prefill": draw(st.integers(0, 60)),
    }


def make_limiter(run):
    return SamplesPerInsert(run["ratio"], run["tolerance"], run["min_size"])


def check_bounds(limiter, run):
    """Checks how far samples are ahead, once training has begun."""
    largest = run["ratio"] * max(run["groups"])
    if limiter.begun:
        ahead = limiter.stats()["ahead"]
        assert -max(run["tolerance"], largest) - 1e-6 <= ahead <= run["batch"]
