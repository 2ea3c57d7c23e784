from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limiter_testing import (
    PATIENCE,
    Call,
    check_bounds,
    counts,
    insert_until_held,
    sample_until_held,
    settings_of_a_run,
    started,
    wait_until,
    wait_until_in_line,
)

from embodied.replay import limiters


def test_a_waiting_sampler_goes_on_when_the_first_batch_is_stored():
    limiter = limiters.SamplesPerInsert(0.5, 64, 16)
    call = Call(limiter.sample, 16)
    wait_until_in_line(limiter, 1)
    limiter.available(16)
    assert call.wait() is True


def test_inserts_are_free_again_when_the_buffer_was_cleared():
    limiter = started()
    insert_until_held(limiter)
    call = Call(limiter.insert, 1)
    wait_until_in_line(limiter, 1)
    limiter.available(0)
    assert call.wait() is True
    assert not limiter.want_sample(1)
    assert limiter.insert(10**6, timeout=0)


class Counter:
    """The replay buffer of the tests: threads add to its size."""

    def __init__(self, prefill):
        self.lock = threading.Lock()
        self.size = -prefill

    def add(self, amount):
        with self.lock:
            self.size += amount
            return max(0, self.size)


def run_threads(run, inserters, samplers, rounds):
    """Runs threads on both sides until the inserters are done; returns the limiter."""
    limiter = limiters.SamplesPerInsert(run["ratio"], run["tolerance"], run["batch"])
    counter = Counter(run["prefill"])
    failures = []
    # All inserters may be past the limiter before the size is known.
    started = run["prefill"] + run["batch"] + 2 * inserters * max(run["groups"])

    def insert(group):
        for _ in range(rounds):
            if not limiter.insert(group, timeout=PATIENCE):
                failures.append("An insert was stuck.")
            limiter.available(counter.add(group))
            observe()

    def sample():
        while limiter.sample(run["batch"]):
            observe()

    def observe():
        try:
            check_bounds(limiter, run, started)
        except AssertionError as error:
            failures.append(error)

    groups = [run["groups"][i % len(run["groups"])] for i in range(inserters)]
    inserting = [Call(insert, group) for group in groups]
    sampling = [Call(sample) for _ in range(samplers)]
    for call in inserting:
        call.wait()
    limiter.available(counter.add(0))
    filled = counter.add(0) >= run["batch"]
    if filled:  # The samplers draw all that is left to draw.
        wait_until(lambda: limiter.stats()["ahead"] > 0)
    state = limiter.stats()
    limiter.close()
    for call in sampling:
        call.wait()
    assert failures == []
    return filled, state


@given(run=settings_of_a_run(), inserters=st.integers(1, 5), samplers=st.integers(1, 3))
@settings(max_examples=15)
def test_threads_on_both_sides_never_get_stuck(run, inserters, samplers):
    filled, state = run_threads(run, inserters, samplers, rounds=30)
    if filled:
        assert 0 < state["ahead"] <= run["batch"]


@pytest.mark.slow
@given(run=settings_of_a_run(), inserters=st.integers(1, 8), samplers=st.integers(1, 4))
@settings(max_examples=100)
def test_threads_on_both_sides_never_get_stuck_long(run, inserters, samplers):
    filled, state = run_threads(run, inserters, samplers, rounds=100)
    if filled:
        assert 0 < state["ahead"] <= run["batch"]


def test_the_number_of_samples_is_exact_to_within_one_batch_over_a_long_run():
    run = {"ratio": 0.5, "tolerance": 64, "batch": 16, "groups": [8], "prefill": 0}
    filled, state = run_threads(run, inserters=4, samplers=2, rounds=500)
    assert filled
    assert state["inserts"] >= 4 * 8 * 500 - 16 - 4 * 8  # Without the first batch.
    assert 0 < state["samples"] - 0.5 * state["inserts"] <= 16


def test_a_timeout_is_kept_and_counts_nothing():
    limiter = started()
    insert_until_held(limiter)
    before = counts(limiter)
    start = time.monotonic()
    assert not limiter.insert(1, timeout=0.05)
    assert time.monotonic() - start >= 0.05
    assert counts(limiter) == before
    sample_until_held(limiter)
    before = counts(limiter)
    assert not limiter.sample(16, timeout=0.05)
    assert counts(limiter) == before


def test_a_waiting_insert_goes_on_when_samples_are_drawn():
    limiter = started()
    insert_until_held(limiter)
    call = Call(limiter.insert, 30)
    wait_until_in_line(limiter, 1)
    assert limiter.sample(16, timeout=0)
    assert call.wait() is True
    assert limiter.stats()["inserts"] == 128 + 30


def test_a_waiting_sample_goes_on_when_steps_are_inserted():
    limiter = started()
    sample_until_held(limiter)
    call = Call(limiter.sample, 16)
    wait_until_in_line(limiter, 1)
    assert limiter.insert(31, timeout=0)
    assert not limiter.want_sample(16)
    assert limiter.insert(1, timeout=0)
    assert call.wait() is True
    assert limiter.stats()["samples"] == 32


def test_a_large_group_does_not_starve_among_small_ones():
    limiter = started(ratio=1.0, tolerance=16, min_size=16)
    insert_until_held(limiter)
    large = Call(limiter.insert, 12)
    wait_until_in_line(limiter, 1)
    for _ in range(11):
        assert limiter.sample(1, timeout=0)
        assert not limiter.want_insert(1)
        assert not limiter.insert(1, timeout=0)
    assert limiter.sample(1, timeout=0)
    assert large.wait() is True
    assert limiter.stats()["ahead"] == -16


def test_those_behind_go_on_when_the_first_in_line_gives_up():
    limiter = started(ratio=1.0, tolerance=16, min_size=16)
    insert_until_held(limiter)
    limiter.sample(1)
    impatient = Call(limiter.insert, 12, 0.2)
    wait_until_in_line(limiter, 1)
    behind = Call(limiter.insert, 1)
    assert impatient.wait() is False
    assert behind.wait() is True


def test_closing_releases_all_who_wait_and_lets_nobody_in():
    limiter = started()
    insert_until_held(limiter)
    calls = [Call(limiter.insert, 1) for _ in range(3)]
    empty = limiters.Unlimited(16)
    calls += [Call(empty.sample, 16) for _ in range(3)]
    wait_until_in_line(limiter, 3)
    wait_until_in_line(empty, 3)
    before = counts(limiter)
    for each in (limiter, empty):
        each.close()
        each.close()
    assert [call.wait() for call in calls] == [False] * 6
    assert not limiter.sample(16)
    assert not limiter.want_sample(16)
    assert not empty.insert(1)
    assert not empty.want_insert(1)
    assert counts(limiter) == before


def test_leaving_the_context_closes():
    with started() as limiter:
        assert limiter.sample(16)
    assert not limiter.insert(1)


def test_a_refund_lets_waiting_samplers_go_on():
    limiter = started()
    sample_until_held(limiter)
    call = Call(limiter.sample, 16)
    wait_until_in_line(limiter, 1)
    limiter.refund(16)
    assert call.wait() is True
    assert limiter.stats()["samples"] == 16


def test_loading_wakes_those_who_wait():
    limiter = started()
    data = limiter.save()
    insert_until_held(limiter)
    call = Call(limiter.insert, 1)
    wait_until_in_line(limiter, 1)
    limiter.load(data)
    assert call.wait() is True
