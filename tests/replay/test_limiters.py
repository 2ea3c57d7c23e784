from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limiter_testing import (
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
)

from embodied.checkpoint import load_tree, save_tree
from embodied.replay import Replay
from embodied.replay.limiters import SamplesPerInsert

RATIOS = st.one_of(
    st.integers(1, 2000).map(float),
    st.floats(0.01, 100).map(lambda ratio: round(ratio, 3)),
)


def train(limiter, steps, stored, batch):
    """Inserts steps and samples all batches that are due; returns how many."""
    limiter.insert(steps)
    limiter.available(stored, full=False)
    due = limiter.due(batch)
    last = min(due, 20)  # The last ones singly, all others at once, which is quicker.
    if due > last:
        limiter.sample(batch * (due - last))
    for left in reversed(range(last)):
        limiter.sample(batch)
        assert limiter.due(batch) == left
    return due


# The start.


@pytest.mark.parametrize("ratio", [0.0, 1 / 64, 0.5, 16.0])
def test_there_is_no_sample_before_enough_is_stored(ratio):
    limiter = SamplesPerInsert(ratio, 64, 1024)
    for size in range(0, 1024, 31):
        limiter.insert(31)
        limiter.available(size, full=False)
        assert not may_sample(limiter)
        assert limiter.due(16) == 0
        assert not limiter.begun
    limiter.available(1024, full=False)
    assert limiter.begun
    assert may_sample(limiter)


def test_inserts_never_wait_before_enough_is_stored():
    limiter = SamplesPerInsert(16.0, 64, 16)
    for _ in range(2000):
        assert insert(limiter, 32, timeout=0)
    limiter.available(15, full=False)
    assert may_insert(limiter, 10**6)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 16.0])
def test_nothing_is_made_up_for_the_steps_before(ratio):
    limiter = SamplesPerInsert(ratio, 64, 16)
    for _ in range(1000):
        limiter.insert(1)
    limiter.available(16, full=False)
    assert counts(limiter) == (0, 0, 0)
    assert limiter.due(16) == 1, "one, and not hundreds"
    assert sample_until_held(limiter) == 16
    assert insert_until_held(limiter) == (16 + 64) / ratio


def test_a_buffer_that_holds_less_begins_when_it_is_full():
    replay = Replay(length=3, capacity=20)
    limiter = SamplesPerInsert(1.0, 64, 1024)
    for count in range(22):
        assert not limiter.begun
        replay.add({"count": count})
        limiter.insert(1)
        limiter.available(len(replay), replay.full)
    assert len(replay) == 20
    assert limiter.begun
    assert may_sample(limiter)


def test_a_buffer_whose_memory_is_full_begins_below_its_capacity():
    replay = Replay(length=30, chunksize=2, bytes=20_000)
    limiter = SamplesPerInsert(1.0, 64, 10**6)
    for count in range(2000):
        replay.add({"count": count})
        limiter.insert(1)
        limiter.available(len(replay), replay.full)
    assert replay.stats()["evicted"] > 0
    assert limiter.begun


def test_an_empty_buffer_has_nothing_to_sample_however_small():
    limiter = SamplesPerInsert(1.0, 64, 16)
    limiter.insert(5)
    limiter.available(0, full=True)
    assert not may_sample(limiter)


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
    sample(limiter, 16)
    assert insert_until_held(limiter) == 32


def test_a_group_larger_than_the_tolerance_waits_only_while_inserts_are_ahead():
    limiter = started(ratio=16.0, tolerance=64, min_size=16)
    assert insert(limiter, 128, timeout=0)
    assert limiter.stats()["ahead"] == -2048
    assert not may_insert(limiter, 128)
    assert not may_insert(limiter, 1)
    assert sample_until_held(limiter) == 2048 + 16
    assert may_insert(limiter, 128)


@pytest.mark.parametrize("ratio", [(1, 3), (1, 10), (32, 65), (1023, 64), (1, 10**6)])
def test_nothing_drifts_over_any_number_of_steps(ratio):
    limiter = started(ratio[0] / ratio[1])
    samples, inserts = (10**17 * number for number in ratio)
    exact = {**limiter.save(), "samples": samples, "inserts": inserts}
    limiter.load(exact)
    assert may_sample(limiter)
    limiter.load({**exact, "inserts": inserts - 1})
    assert not may_sample(limiter)


def test_a_third_is_a_third():
    limiter = started(ratio=1 / 3, tolerance=16, min_size=16)
    for _ in range(1000):
        assert sample(limiter, 16, timeout=0)
        assert not may_sample(limiter)
        for _ in range(48):
            assert insert(limiter, 1, timeout=0)
        assert limiter.stats()["ahead"] == 0


@given(run=settings_of_a_run(), choices=st.lists(st.integers(0, 5), max_size=300))
@settings(max_examples=40)
def test_whoever_comes_one_side_may_go_on_and_the_bounds_hold(run, choices):
    limiter = make_limiter(run)
    stored = 0
    for choice in choices:
        group = run["groups"][choice % len(run["groups"])]
        inserts, samples = may_insert(limiter, group), may_sample(limiter)
        assert inserts or samples
        filling = stored - run["prefill"] < run["min_size"]
        if filling:
            assert inserts
            assert not samples
        if choice < 3 and inserts:
            limiter.insert(group)
            stored += group
            limiter.available(max(0, stored - run["prefill"]), full=False)
        elif choice >= 3 and samples:
            limiter.sample(run["batch"])
        check_bounds(limiter, run)


# One thread, which asks how many batches are due.


@given(RATIOS, st.integers(1, 8), st.lists(st.integers(1, 40)))
def test_trained_batches_keep_to_the_ratio_within_one(ratio, batch, calls):
    limiter = SamplesPerInsert(ratio, 64, 100)
    assert train(limiter, 300, stored=99, batch=batch) == 0
    samples = train(limiter, 4, stored=100, batch=batch) * batch
    assert samples == batch, "the first batch comes at once, and alone"
    steps = 0
    for amount in calls:
        samples += train(limiter, amount, 1000, batch) * batch
        steps += amount
        assert 0 < samples - Fraction(str(ratio)) * steps <= batch


@given(RATIOS, st.lists(st.integers(1, 40), max_size=30), st.integers(0, 30))
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(ratio, calls, cut):
    def run(interrupted):
        limiter, due = SamplesPerInsert(ratio, 64, 9), []
        for index, amount in enumerate(calls):
            if interrupted and index == cut:
                data, limiter = limiter.save(), SamplesPerInsert(ratio, 64, 9)
                limiter.load(data)
            due.append(train(limiter, amount, stored=3 * index, batch=6))
        return due

    assert run(interrupted=True) == run(interrupted=False)


@given(RATIOS, st.integers(1, 1000), st.data())
def test_batches_that_are_not_trained_on_stay_due(ratio, steps, data):
    limiter = started(ratio)
    limiter.insert(steps)
    due = limiter.due(4)
    made = data.draw(st.integers(0, due))
    if made:
        limiter.sample(4 * made)
    again = SamplesPerInsert(ratio, 64, 16)
    again.load(limiter.save())
    assert again.due(4) == 0, "nothing is stored yet"
    again.available(16, full=False)
    assert limiter.due(4) == again.due(4) == due - made


@pytest.mark.parametrize("ratio", [0, -1])
def test_without_a_ratio_steps_are_followed_by_one_batch(ratio):
    limiter = SamplesPerInsert(ratio, 64, 4)
    assert train(limiter, 1, 3, batch=4) == 0
    assert [train(limiter, steps, 4, batch=4) for steps in (1, 1000, 5)] == [1, 1, 1]
    assert limiter.due(4) == 0


@pytest.mark.parametrize("ratio", [4e-7, 1e-300])
def test_a_tiny_ratio_is_a_limit_too(ratio):
    limiter = SamplesPerInsert(ratio, 64, 16)
    assert sum(train(limiter, 16, 1000, batch=16) for _ in range(100)) == 1
    again = SamplesPerInsert(ratio, 64, 16)
    again.load(limiter.save())
    assert train(again, 16, 1000, batch=16) == 0


# Save and load.


def test_a_restored_limiter_goes_on_with_the_exact_ratio(tmp_path):
    limiter = started(ratio=32 / 65)
    for _ in range(50):
        sample_until_held(limiter)
        insert_until_held(limiter, 7)
    save_tree(tmp_path, "limiter", limiter.save())
    restored = SamplesPerInsert(32 / 65, 64, 16)
    restored.load(load_tree(tmp_path, "limiter"))
    assert not may_sample(restored)  # Nothing is stored yet.
    restored.available(16, full=False)
    assert restored.stats() == limiter.stats()
    for _ in range(50):
        assert sample_until_held(restored) == sample_until_held(limiter)
        assert insert_until_held(restored, 7) == insert_until_held(limiter, 7)
    stats = restored.stats()
    assert -64 <= stats["samples"] - 32 / 65 * stats["inserts"] <= 16


def test_a_run_resumed_before_its_first_batch_goes_on_counting():
    limiter = started(ratio=1.0)
    insert(limiter, 40)
    resumed = SamplesPerInsert(1.0, 64, 16)
    resumed.load(limiter.save())
    resumed.insert(1)
    resumed.available(3, full=False)  # Some of the files were damaged.
    assert counts(resumed) == (41, 0, -41)
    assert may_sample(resumed)


def test_counts_that_older_versions_have_saved_go_on():
    limiter = SamplesPerInsert(0.5, 64, 1024)
    limiter.load({"ratio": [1, 2], "inserts": 300, "samples": 150})
    limiter.available(250, full=False)
    assert counts(limiter) == (300, 150, 0)
    assert may_sample(limiter)
    limiter.load({"ratio": [1, 2], "inserts": 300, "samples": 0})
    assert not may_sample(limiter)


def test_a_resumed_run_draws_prefetched_batches_again():
    limiter = started(ratio=0.5)
    insert_until_held(limiter)
    for _ in range(4):
        sample(limiter, 16)
    data = limiter.save(pending=32)  # Two batches are trained on, two on their way.
    assert limiter.stats()["samples"] == 64
    resumed = started(ratio=0.5)
    resumed.load(data)
    assert counts(resumed) == (128, 32, -32)
    assert limiter.save(pending=1000)["samples"] == 0


def test_with_another_ratio_counting_begins_anew():
    limiter = started(ratio=0.5)
    for _ in range(100):
        insert_until_held(limiter)
        sample_until_held(limiter)
    for ratio in (0.25, 0.0):
        other = SamplesPerInsert(ratio, 64, 16)
        other.load(limiter.save())
        other.available(1000, full=False)
        assert counts(other) == (0, 0, 0)
        assert not may_sample(other), "there were no steps at this ratio"
        other.insert(1)
        other.available(1000, full=False)
        assert other.due(16) == 1


def test_state_of_something_else_is_refused():
    for data in (None, {}, {"inserts": 3, "samples": 4}):
        with pytest.raises(ValueError, match="expected saved state with"):
            started().load(data)


# Settings.


@pytest.mark.parametrize("ratio", [0, 0.0, -1])
def test_a_ratio_of_zero_or_less_means_no_limit(ratio):
    limiter = SamplesPerInsert(ratio, 64, 16)
    assert insert(limiter, 10**6, timeout=0)
    assert not may_sample(limiter)
    limiter.available(16, full=False)
    for _ in range(1000):
        assert sample(limiter, 16, timeout=0)
    for _ in range(1000):
        assert insert(limiter, 1000, timeout=0)
    assert limiter.stats()["samples"] == 1000 * 16
    other = SamplesPerInsert(0, 64, 16)
    other.load(limiter.save())
    assert other.stats() == limiter.stats()


@pytest.mark.parametrize("tolerance", [0, 0.9, -1, float("nan"), float("inf")])
def test_a_tolerance_below_one_sample_is_refused(tolerance):
    with pytest.raises(ValueError, match=r"at least 1 sample"):
        SamplesPerInsert(0.5, tolerance, 16)


@pytest.mark.parametrize("ratio", [float("nan"), float("inf")])
def test_a_ratio_that_is_not_finite_is_refused(ratio):
    with pytest.raises(ValueError, match="finite ratio"):
        SamplesPerInsert(ratio, 64, 16)


def test_a_start_without_sequences_is_refused():
    with pytest.raises(ValueError, match="expected min_size >= 1, got 0"):
        SamplesPerInsert(0.5, 64, 0)


def test_amounts_are_positive_integers():
    limiter = started()
    for call in (limiter.insert, limiter.sample, limiter.wait_insert, limiter.due):
        for amount in (0, -1):
            with pytest.raises(ValueError, match=f"1 or more, got {amount}"):
                call(amount)
        with pytest.raises(TypeError):
            call(1.5)
