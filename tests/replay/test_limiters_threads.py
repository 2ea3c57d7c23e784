from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from limiter_testing import (
    Call,
    check_bounds,
    counts,
    insert,
    insert_until_held,
    make_limiter,
    may_insert,
    may_sample,
    sample,
    sample_until_held,
    settings_of_a_run,
    started,
    wait_until_in_line,
)
from waiting_testing import wait_until

from embodied.replay.limiters import SamplesPerInsert


def test_a_waiting_sampler_goes_on_when_enough_is_stored():
    limiter = SamplesPerInsert(0.5, 64, 16)
    call = Call(sample, limiter)
    wait_until_in_line(limiter, 1)
    limiter.insert(16)
    limiter.available(16, full=False)
    assert call.wait() is True


def test_inserts_are_free_again_when_the_buffer_was_cleared():
    limiter = started()
    insert_until_held(limiter)
    call = Call(insert, limiter)
    wait_until_in_line(limiter, 1)
    limiter.available(0, full=False)
    assert call.wait() is True
    assert not may_sample(limiter)
    assert may_insert(limiter, 10**6)


def run_threads(run, rounds):
    """Runs a thread on each side until all is inserted; returns `begun` and stats."""
    limiter = make_limiter(run)
    failures = []

    def observe():
        try:
            check_bounds(limiter, run)
        except AssertionError as error:
            failures.append(error)

    def insert_all():
        size = -run["prefill"]
        for index in range(rounds):
            group = run["groups"][index % len(run["groups"])]
            if not insert(limiter, group):
                failures.append("An insert was stuck.")
            size += group
            limiter.available(max(0, size), full=False)
            observe()

    def sample_all():
        while limiter.wait_sample():
            limiter.sample(run["batch"])
            observe()

    inserting, sampling = Call(insert_all), Call(sample_all)
    inserting.wait()
    if limiter.begun:  # Wait until the sampler has drawn all that is due.
        wait_until(lambda: limiter.stats()["ahead"] > 0)
    state = limiter.stats()
    limiter.close()
    sampling.wait()
    assert failures == []
    return limiter.begun, state


@given(run=settings_of_a_run())
@settings(max_examples=15)
def test_threads_on_both_sides_never_get_stuck(run):
    begun, state = run_threads(run, rounds=100)
    if begun:
        assert 0 < state["ahead"] <= run["batch"]


@pytest.mark.slow
@given(run=settings_of_a_run())
@settings(max_examples=100)
def test_threads_on_both_sides_never_get_stuck_long(run):
    begun, state = run_threads(run, rounds=1000)
    if begun:
        assert 0 < state["ahead"] <= run["batch"]


def test_the_number_of_samples_is_exact_to_within_one_batch_over_a_long_run():
    run = {"ratio": 0.5, "tolerance": 64, "batch": 16, "groups": [8], "prefill": 0}
    begun, state = run_threads({**run, "min_size": 16}, rounds=2000)
    assert begun
    assert state["inserts"] == 8 * 2000 - 16, "without those of the start"
    assert 0 < state["samples"] - 0.5 * state["inserts"] <= 16


def test_a_timeout_is_kept_and_counts_nothing():
    limiter = started()
    insert_until_held(limiter)
    before = counts(limiter)
    start = time.monotonic()
    assert not limiter.wait_insert(1, timeout=0.05)
    assert time.monotonic() - start >= 0.05
    sample_until_held(limiter)
    assert not limiter.wait_sample(timeout=0.05)
    assert counts(limiter)[0] == before[0]


def test_a_waiting_insert_goes_on_when_samples_are_drawn():
    limiter = started()
    insert_until_held(limiter)
    call = Call(insert, limiter, 30)
    wait_until_in_line(limiter, 1)
    assert sample(limiter, 16, timeout=0)
    assert call.wait() is True
    assert limiter.stats()["inserts"] == 128 + 30


def test_a_waiting_sample_goes_on_when_steps_are_inserted():
    limiter = started()
    sample_until_held(limiter)
    call = Call(sample, limiter)
    wait_until_in_line(limiter, 1)
    assert insert(limiter, 31, timeout=0)
    assert not may_sample(limiter)
    assert insert(limiter, 1, timeout=0)
    assert call.wait() is True
    assert limiter.stats()["samples"] == 32


def test_closing_releases_all_who_wait_and_lets_nobody_in():
    limiter = started()
    insert_until_held(limiter)
    empty = SamplesPerInsert(0, 64, 16)
    calls = [Call(limiter.wait_insert, 1), Call(empty.wait_sample)]
    wait_until_in_line(limiter, 1)
    wait_until_in_line(empty, 1)
    before = counts(limiter)
    for each in (limiter, empty):
        each.close()
        each.close()
    assert [call.wait() for call in calls] == [False] * 2
    assert not limiter.wait_sample()
    assert not empty.wait_insert(1)
    assert counts(limiter) == before


def test_leaving_the_context_closes():
    with started() as limiter:
        assert limiter.wait_sample()
    assert not limiter.wait_insert(1)


def test_loading_wakes_those_who_wait():
    limiter = started()
    data = limiter.save()
    insert_until_held(limiter)
    call = Call(limiter.wait_insert, 1)
    wait_until_in_line(limiter, 1)
    limiter.load(data)
    assert call.wait() is True


def test_a_wait_uses_no_time():
    limiter = started()
    insert_until_held(limiter)
    call = Call(limiter.wait_insert, 1)
    wait_until_in_line(limiter, 1)
    spent = time.process_time()
    threading.Event().wait(0.2)
    assert time.process_time() - spent < 0.15
    limiter.close()
    assert call.wait() is False
