from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from selector_testing import INF, assert_distribution, normalised, slots

from embodied.replay import selectors


def prioritized(values, **options):
    selector = selectors.Prioritized(**{"seed": 1, **options})
    selector.insert(np.arange(len(values)))
    selector.prioritize(np.arange(len(values)), np.array(values))
    return selector


@pytest.mark.parametrize("branching", [2, 3, 16, 100])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 2.0])
def test_prioritized_draws_in_proportion_to_the_power_of_priorities(
    branching, exponent
):
    values = np.random.default_rng(0).uniform(0.5, 3, 150)
    values[::7] = 0
    selector = prioritized(values, exponent=exponent, branching=branching)
    selector.remove(np.arange(20))
    weights = {
        slot: value**exponent if value else 0.0
        for slot, value in enumerate(values.tolist())
        if slot >= 20
    }
    assert_distribution(selector.sample(60_000), normalised(weights))


def test_a_new_slot_has_the_initial_priority_even_where_another_was():
    selector = prioritized([100.0, 1.0, 1.0], initial=2.0)
    selector.remove(slots(0))
    selector.insert(slots(0))
    assert_distribution(selector.sample(20_000), {0: 0.5, 1: 0.25, 2: 0.25})


def test_the_priorities_of_steps_are_mixed_from_maximum_and_mean():
    steps = np.array([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0], [3.0, 3.0, 3.0]], np.float32)
    selector = prioritized([1.0] * 3, maxfrac=0.25)
    selector.prioritize(np.arange(3), steps)
    first = 0.25 * 6 + 0.75 * 3
    assert_distribution(selector.sample(20_000), normalised({0: first, 1: 0.0, 2: 3.0}))


def test_steps_without_a_priority_do_not_count():
    steps = np.array([[np.nan, 2.0, 4.0], [INF, INF, 1.0], [-5.0, 2.0, np.nan]])
    selector = prioritized([1.0] * 3, maxfrac=0.5, initial=INF)
    selector.prioritize(np.arange(3), steps)
    chances = normalised({0: 3.5, 1: 1.0, 2: 2.0})
    assert_distribution(selector.sample(20_000), chances)


def test_a_priority_that_is_no_number_changes_nothing():
    selector = prioritized([1.0, 3.0, 1.0, 1.0])
    selector.prioritize(slots(0, 1, 2, 1), np.array([np.nan, INF, -2.0, 6.0]))
    selector.prioritize(slots(3), np.full((1, 4), np.nan, np.float32))
    chances = normalised({0: 1.0, 1: 6.0, 2: 1.0, 3: 1.0})
    assert_distribution(selector.sample(20_000), chances)


def test_infinite_slots_are_drawn_equally_before_all_others():
    selector = selectors.Prioritized(initial=INF, seed=1)
    selector.insert(np.arange(10))
    selector.prioritize(np.arange(6), np.full(6, 1e200))
    assert_distribution(selector.sample(10_000), dict.fromkeys(range(6, 10), 0.25))
    selector.prioritize(np.arange(6, 10), np.zeros(4))
    assert_distribution(selector.sample(10_000), dict.fromkeys(range(6), 1 / 6))


def test_an_infinite_slot_is_drawn_once_where_drawing_sets_it_to_zero():
    selector = selectors.Prioritized(initial=INF, zero_on_sample=True)
    selector.insert(np.arange(5))
    selector.prioritize(slots(0, 1), np.array([0.0, 4.0]))
    drawn = selector.sample(4).tolist()
    assert sorted(drawn[:3]) == [2, 3, 4]
    assert drawn[3] == 1
    assert set(selector.sample(500)) == set(range(5))  # All are zero now.


def test_infinite_slots_are_drawn_in_random_order():
    first = []
    for seed in range(2000):
        selector = selectors.Prioritized(initial=INF, zero_on_sample=True, seed=seed)
        selector.insert(np.arange(4))
        first.append(tuple(selector.sample(2).tolist()))
    pairs = list(itertools.permutations(range(4), 2))
    counts = Counter(first)
    assert stats.chisquare([counts[x] for x in pairs]).pvalue > 1e-3


def test_drawing_many_with_zeroing_is_like_drawing_one_by_one():
    values = {0: 5.0, 1: 1.0, 2: 3.0, 3: 1.0}
    counts = Counter()
    for seed in range(3000):
        selector = prioritized(list(values.values()), zero_on_sample=True, seed=seed)
        counts[tuple(selector.sample(3).tolist())] += 1
    expected = {}
    for drawn in itertools.permutations(values, 3):
        chance, rest = 1.0, sum(values.values())
        for slot in drawn:
            chance, rest = chance * values[slot] / rest, rest - values[slot]
        expected[drawn] = 3000 * chance
    assert set(counts) <= set(expected)
    observed = [counts[drawn] for drawn in expected]
    assert stats.chisquare(observed, list(expected.values())).pvalue > 1e-3


def test_a_drawn_slot_stays_at_zero_until_it_gets_a_priority():
    selector = prioritized([1.0, 1.0, 1.0], zero_on_sample=True)
    (drawn,) = selector.sample(1).tolist()
    others = set(range(3)) - {drawn}
    assert set(selector.sample(100, peek=True)) == others
    selector.prioritize(slots(*others), np.zeros(2))
    selector.prioritize(slots(drawn), np.array([0.1]))
    assert set(selector.sample(100, peek=True)) == {drawn}


def test_peeking_sets_no_priority_to_zero():
    selector = selectors.Prioritized(initial=INF, zero_on_sample=True)
    selector.insert(np.arange(3))
    selector.prioritize(slots(0), np.array([1.0]))
    for _ in range(5):
        assert set(selector.sample(100, peek=True)) == {1, 2}


def test_all_slots_are_drawn_equally_while_all_priorities_are_zero():
    selector = prioritized([1.0, 0.0, 0.0, 0.0])
    assert set(selector.sample(100)) == {0}
    selector.prioritize(slots(0), np.array([0.0]))
    assert_distribution(selector.sample(20_000), dict.fromkeys(range(4), 0.25))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 3.0])
def test_extreme_priorities_neither_overflow_nor_draw_others(exponent):
    selector = prioritized([1e308, 1e308, 0.0, 5e-324], exponent=exponent)
    assert_distribution(selector.sample(10_000), {0: 0.5, 1: 0.5, 2: 0, 3: 0})


def test_priorities_need_one_row_per_slot():
    selector = prioritized([1.0, 2.0])
    for wrong in (np.ones(3), np.ones((1, 2)), np.ones((2, 2, 2)), np.float32(1)):
        with pytest.raises(ValueError, match=r"\[2\] or \[2, T\], one row per slot"):
            selector.prioritize(slots(0, 1), wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"exponent": -1.0},
        {"exponent": INF},
        {"exponent": np.nan},
        {"initial": -1.0},
        {"initial": np.nan},
        {"maxfrac": 1.5},
        {"maxfrac": np.nan},
        {"branching": 1},
    ],
)
def test_prioritized_refuses_options_out_of_range(options):
    (key,) = options
    with pytest.raises(ValueError, match=f"Prioritized expected {key}"):
        selectors.Prioritized(**options)
