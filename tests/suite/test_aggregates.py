"""Means, medians and interquartile means over runs, and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dreamerv3.suite import aggregates

numbers = st.floats(-100, 100, allow_nan=False)
# Three tasks of four runs each.
scores = st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=3, max_size=3)


def arrays(rows):
    return [np.array(row, np.float64) for row in rows]


def test_hand_computed_values():
    # Means of tasks are 2, 5 and 20. The iqm leaves out two runs at each end.
    estimates = aggregates.aggregate(arrays([[1, 2, 3], [4, 5, 6], [10, 20, 30]]))
    assert estimates["mean"].value == pytest.approx(9)
    assert estimates["median"].value == pytest.approx(5)
    assert estimates["iqm"].value == pytest.approx((3 + 4 + 5 + 6 + 10) / 5)


@given(scores)
def test_the_interquartile_mean_is_the_trimmed_mean_of_all_runs(rows):
    value = aggregates.interquartile_mean(np.array(rows))
    assert value == pytest.approx(stats.trim_mean(np.ravel(rows), 0.25), abs=1e-9)


def test_tasks_with_fewer_runs_count_the_same():
    few = aggregates.aggregate(arrays([[0, 2], [8]]))
    alike = aggregates.aggregate(arrays([[0, 2], [8, 8]]))
    for name in aggregates.METRICS:
        assert few[name].value == alike[name].value


def test_tasks_with_any_numbers_of_runs_weigh_about_the_same():
    tasks = [np.full(count, float(count)) for count in (7, 8, 9, 11, 13)]
    found = aggregates.aggregate(tasks, resamples=20)["mean"]
    assert found.value == pytest.approx(9.6, rel=1e-6)
    mixed = [np.arange(count) / (count - 1) for count in (7, 8, 9, 11, 13)]
    found = aggregates.aggregate(mixed, resamples=20)
    assert found["mean"].value == pytest.approx(0.5, abs=0.01)


def test_intervals_of_one_task_are_those_of_a_bootstrap_of_the_mean():
    values = np.random.default_rng(1).normal(50, 10, 20)
    estimate = aggregates.mean_score(values)
    margin = 1.96 * values.std() / np.sqrt(len(values))
    low, high = estimate.interval
    assert low == pytest.approx(values.mean() - margin, abs=0.6)
    assert high == pytest.approx(values.mean() + margin, abs=0.6)


def test_intervals_are_drawn_within_tasks():
    # Tasks differ but their runs do not, so all resamples are equal.
    estimates = aggregates.aggregate(arrays([[0, 0, 0], [100, 100, 100]]))
    assert estimates["mean"].interval == (50, 50)


def test_two_runs_give_the_four_resamples_of_a_slow_loop():
    # Of the means of (0, 0), (0, 4), (4, 0), (4, 4), a quarter is 0 and a quarter 4.
    assert aggregates.mean_score(np.array([0.0, 4.0])).interval == (0, 4)


@pytest.mark.parametrize("rows", [[[3.0]], [[3.0], [5.0]]])
def test_single_runs_have_no_interval(rows):
    estimates = aggregates.aggregate(arrays(rows))
    assert all(estimate.interval is None for estimate in estimates.values())
    assert estimates["mean"].value == np.mean(rows)


@given(scores)
def test_intervals_hold_between_the_least_and_the_most(rows):
    estimates = aggregates.aggregate(arrays(rows), resamples=50)
    for estimate in estimates.values():
        low, high = estimate.interval
        assert np.min(rows) - 1e-9 <= low <= high <= np.max(rows) + 1e-9


@given(scores, st.floats(0.5, 3), numbers)
def test_everything_moves_with_the_scores(rows, factor, offset):
    before = aggregates.aggregate(arrays(rows), resamples=20)
    moved = arrays(np.array(rows) * factor + offset)
    after = aggregates.aggregate(moved, resamples=20)
    for name in aggregates.METRICS:
        expected = [before[name].value, *before[name].interval]
        found = [after[name].value, *after[name].interval]
        np.testing.assert_allclose(
            found, np.array(expected) * factor + offset, atol=1e-6
        )


def test_the_same_runs_give_the_same_table_in_parts_too(monkeypatch):
    rows = arrays([[1, 5, 2], [7, 3]])
    first = aggregates.aggregate(rows)
    assert first == aggregates.aggregate(rows)
    monkeypatch.setattr(aggregates, "BLOCK", 100)
    parts = aggregates.aggregate(rows)
    for name in aggregates.METRICS:
        assert parts[name].value == first[name].value
        np.testing.assert_allclose(parts[name].interval, first[name].interval, atol=0.3)
