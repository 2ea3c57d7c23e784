from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limiter_testing import (
    check_bounds,
    counts,
    insert_until_held,
    sample_until_held,
    settings_of_a_run,
    started,
)

from embodied.checkpoint import load_tree, save_tree
from embodied.replay import limiters

# The start.


@pytest.mark.parametrize("ratio", [1 / 64, 0.5, 16.0])
def test_the_first_batch_comes_as_soon_as_one_batch_is_stored(ratio):
    limiter = limiters.SamplesPerInsert(ratio, 64, 16)
    for size in range(16):
        limiter.available(size)
        assert not limiter.want_sample(16)
        assert not limiter.sample(16, timeout=0)
    limiter.available(16)
    assert limiter.want_sample(16)
    assert limiter.sample(16, timeout=0)


@pytest.mark.parametrize("make", [limiters.SamplesPerInsert, limiters.make])
def test_inserts_never_wait_before_the_first_batch_is_stored(make):
    limiter = make(16.0, 64, 16)
    for _ in range(2000):
        assert limiter.want_insert(32)
        assert limiter.insert(32, timeout=0)
    limiter.available(15)
    assert limiter.insert(10**6, timeout=0)


def test_samples_make_up_for_the_steps_of_the_first_batch():
    """The ratio holds for the whole run, its beginning included."""
    limiter = limiters.SamplesPerInsert(1.0, 64, 16)
    for _ in range(100):
        limiter.insert(1, timeout=0)
    limiter.available(16)
    assert counts(limiter) == (100, 0, -100)
    assert insert_until_held(limiter) == 0
    assert sample_until_held(limiter) == 112
    assert insert_until_held(limiter) == 12 + 64


# The band.


def test_inserts_run_ahead_by_the_tolerance_and_samples_by_one_batch():
    limiter = started(ratio=0.5, tolerance=64, min_size=16)
    assert insert_until_held(limiter) == 128
    assert limiter.stats()["ahead"] == -64
    assert sample_until_held(limiter) == 80
    assert limiter.stats()["ahead"] == 16


def test_one_sample_makes_room_for_as_many_inserts_as_the_ratio_says():
    limiter = started(ratio=0.5, tolerance=64, min_size=16)
    insert_until_held(limiter)
    limiter.sample(16, timeout=0)
    assert insert_until_held(limiter) == 32


def test_a_group_larger_than_the_tolerance_waits_only_while_inserts_are_ahead():
    limiter = started(ratio=16.0, tolerance=64, min_size=16)
    assert limiter.insert(128, timeout=0)
    assert limiter.stats()["ahead"] == -2048
    assert not limiter.want_insert(128)
    assert not limiter.want_insert(1)
    assert sample_until_held(limiter) == 2048 + 16
    assert limiter.want_insert(128)


@pytest.mark.parametrize("ratio", [(1, 3), (1, 10), (32, 65), (1023, 64), (1, 10**6)])
def test_nothing_drifts_over_any_number_of_steps(ratio):
    limiter = started(ratio[0] / ratio[1])
    samples, inserts = (10**17 * number for number in ratio)
    exact = {**limiter.save(), "samples": samples, "inserts": inserts}
    limiter.load(exact)
    assert limiter.want_sample(16)
    limiter.load({**exact, "inserts": inserts - 1})
    assert not limiter.want_sample(16)


def test_a_third_is_a_third():
    limiter = started(ratio=1 / 3, tolerance=16, min_size=16)
    for _ in range(1000):
        assert limiter.sample(16, timeout=0)
        assert not limiter.want_sample(16)
        for _ in range(48):
            assert limiter.insert(1, timeout=0)
        assert limiter.stats()["ahead"] == 0


@given(run=settings_of_a_run(), choices=st.lists(st.integers(0, 5), max_size=300))
@settings(max_examples=100)
def test_whoever_comes_one_side_may_go_on_and_the_bounds_hold(run, choices):
    limiter = limiters.SamplesPerInsert(run["ratio"], run["tolerance"], run["batch"])
    stored = started = 0
    for choice in choices:
        group = run["groups"][choice % len(run["groups"])]
        may_insert = limiter.want_insert(group)
        may_sample = limiter.want_sample(run["batch"])
        assert may_insert or may_sample
        filling = stored - run["prefill"] < run["batch"]
        if filling:
            assert may_insert
            assert not may_sample
        if choice < 3:
            assert limiter.insert(group, timeout=0) == may_insert
            stored += group if may_insert else 0
            started = stored if filling else started
            limiter.available(max(0, stored - run["prefill"]))
        else:
            assert limiter.sample(run["batch"], timeout=0) == may_sample
        check_bounds(limiter, run, started)


# Save and load.


def test_a_restored_limiter_goes_on_with_the_exact_ratio(tmp_path):
    limiter = started(ratio=32 / 65)
    for _ in range(50):
        sample_until_held(limiter)
        insert_until_held(limiter, 7)
    save_tree(tmp_path, "limiter", limiter.save())
    restored = limiters.SamplesPerInsert(32 / 65, 64, 16)
    restored.load(load_tree(tmp_path, "limiter"))
    assert not restored.want_sample(16)  # Nothing is stored yet.
    restored.available(16)
    assert restored.stats() == limiter.stats()
    for _ in range(50):
        assert sample_until_held(restored) == sample_until_held(limiter)
        assert insert_until_held(restored, 7) == insert_until_held(limiter, 7)
    stats = restored.stats()
    assert -64 <= stats["samples"] - 32 / 65 * stats["inserts"] <= 16


def test_a_resumed_run_draws_prefetched_batches_again():
    limiter = started(ratio=0.5)
    insert_until_held(limiter)
    for _ in range(4):
        limiter.sample(16)
    data = limiter.save(pending=32)  # Two batches are trained on, two on their way.
    assert limiter.stats()["samples"] == 64
    resumed = started(ratio=0.5)
    resumed.load(data)
    assert counts(resumed) == (128, 32, -32)


def test_no_more_is_taken_back_than_was_drawn():
    limiter = started()
    limiter.sample(16)
    for call in (limiter.refund, limiter.save):
        with pytest.raises(ValueError, match="at most the 16 samples"):
            call(17)
    with pytest.raises(ValueError, match="at most the 16 samples"):
        limiter.save(pending=-1)


def test_inserts_that_were_not_stored_are_taken_back():
    limiter = started()
    inserts, samples, _ = counts(limiter)
    assert limiter.insert(3, timeout=0)
    limiter.withdraw(3)
    assert counts(limiter)[:2] == (inserts, samples)
    with pytest.raises(ValueError, match=f"at most the {inserts} inserts"):
        limiter.withdraw(inserts + 1)


def test_with_another_ratio_counting_begins_anew():
    limiter = started(ratio=0.5)
    for _ in range(100):
        insert_until_held(limiter)
        sample_until_held(limiter)
    for other in (started(ratio=0.25), limiters.Unlimited(16)):
        other.load(limiter.save())
        assert counts(other) == (0, 0, 0)


def test_what_was_not_saved_by_a_limiter_is_refused():
    for data in (None, {}, {"inserts": 3, "samples": 4}):
        with pytest.raises(ValueError, match="expected saved state with"):
            started().load(data)


# Settings.


@pytest.mark.parametrize("ratio", [0, 0.0, -1])
def test_a_ratio_of_zero_or_less_means_no_limit(ratio):
    limiter = limiters.make(ratio, 64, 16)
    assert isinstance(limiter, limiters.Unlimited)
    assert limiter.insert(10**6, timeout=0)
    assert not limiter.sample(16, timeout=0)
    limiter.available(16)
    for _ in range(1000):
        assert limiter.sample(16, timeout=0)
    for _ in range(1000):
        assert limiter.insert(1000, timeout=0)
    limiter.refund(16)
    assert limiter.stats()["samples"] == 999 * 16
    other = limiters.make(0, 64, 16)
    other.load(limiter.save())
    assert other.stats() == limiter.stats()


def test_a_positive_ratio_makes_a_limit():
    assert isinstance(limiters.make(0.5, 64, 16), limiters.SamplesPerInsert)


@pytest.mark.parametrize("tolerance", [0, 15.9, -1, float("nan"), float("inf")])
def test_a_tolerance_below_one_batch_is_refused_with_what_is_needed(tolerance):
    with pytest.raises(ValueError, match=r"at least 16 .*tolerance=64"):
        limiters.SamplesPerInsert(0.5, tolerance, 16)
    limiters.SamplesPerInsert(0.5, 16, 16)


@pytest.mark.parametrize("ratio", [0, -1, float("nan"), float("inf")])
def test_a_ratio_that_is_no_limit_is_refused(ratio):
    with pytest.raises(ValueError, match="use Unlimited"):
        limiters.SamplesPerInsert(ratio, 64, 16)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_buffer_too_small_for_the_first_batch_is_refused(ratio):
    with pytest.raises(ValueError, match=r"would wait for ever.*holds 15 at most"):
        limiters.make(ratio, 64, 16, capacity=15)
    limiters.make(ratio, 64, 16, capacity=16)
    with pytest.raises(ValueError, match="expected min_size >= 1, got 0"):
        limiters.make(ratio, 64, 0)


def test_amounts_are_positive_integers():
    limiter = started()
    limiter.sample(16)
    calls = (
        limiter.insert,
        limiter.sample,
        limiter.want_insert,
        limiter.want_sample,
        limiter.refund,
        limiter.withdraw,
    )
    for call in calls:
        for amount in (0, -1):
            with pytest.raises(ValueError, match=f"1 or more, got {amount}"):
                call(amount)
        with pytest.raises(TypeError):
            call(1.5)
