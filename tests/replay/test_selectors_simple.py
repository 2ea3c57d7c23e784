from __future__ import annotations

import numpy as np
import pytest
from selector_testing import (
    FACTORIES,
    INF,
    UPROBS,
    assert_distribution,
    normalised,
    slots,
)

from embodied.replay import selectors

# Fifo


def test_fifo_draws_in_order_and_begins_anew():
    selector = selectors.Fifo()
    selector.insert(slots(7, 3, 5))
    assert selector.sample(2).tolist() == [7, 3]
    assert selector.sample(4, peek=True).tolist() == [5, 7, 3, 5]
    assert selector.sample(4).tolist() == [5, 7, 3, 5]


def test_fifo_draws_a_new_slot_after_all_old_ones():
    selector = selectors.Fifo()
    selector.insert(slots(7, 3))
    assert selector.sample(2).tolist() == [7, 3]
    selector.insert(slots(1))
    assert selector.sample(3).tolist() == [1, 7, 3]


def test_fifo_skips_nothing_when_slots_before_the_cursor_go():
    selector = selectors.Fifo()
    selector.insert(slots(7, 3, 5, 4, 8))
    selector.sample(3)
    selector.remove(slots(7, 3))
    assert selector.sample(1).tolist() == [4]
    selector.remove(slots(5, 4))
    selector.insert(slots(1))
    assert selector.sample(3).tolist() == [8, 1, 8]


def test_fifo_goes_on_with_the_oldest_slot_when_the_next_one_is_gone():
    selector = selectors.Fifo()
    selector.insert(slots(7, 3, 5))
    selector.sample(1)
    selector.remove(slots(7, 3))
    assert selector.sample(1).tolist() == [5]


# Uniform


def test_uniform_draws_all_slots_equally_after_removals():
    selector = selectors.Uniform(seed=1)
    selector.insert(np.arange(60))
    selector.remove(np.arange(20))
    drawn = selector.sample(40_000)
    assert_distribution(drawn, dict.fromkeys(range(20, 60), 1 / 40))


def test_peeks_have_the_same_distribution_as_samples():
    selector = selectors.Uniform(seed=1)
    selector.insert(np.arange(20))
    drawn = np.concatenate([selector.sample(100, peek=True) for _ in range(200)])
    assert_distribution(drawn, dict.fromkeys(range(20), 1 / 20))


# Recency


def test_recency_draws_by_age():
    selector = selectors.Recency([8, 4, 0, 2, 1], seed=1)
    order = [9, 2, 7, 4, 0, 5]
    selector.insert(slots(*order[:4]))
    selector.insert(slots(*order[4:]))
    chances = {5: 8 / 15, 0: 4 / 15, 4: 0, 7: 2 / 15, 2: 1 / 15, 9: 0}
    assert_distribution(selector.sample(40_000), chances)


def test_recency_cuts_the_probabilities_off_at_its_length():
    selector = selectors.Recency([8, 4, 2, 1], seed=1)
    selector.insert(slots(3, 1))
    assert_distribution(selector.sample(20_000), {1: 2 / 3, 3: 1 / 3})


def test_recency_counts_no_removed_slot_as_age():
    selector = selectors.Recency([8, 4, 2, 1], seed=1)
    selector.insert(np.arange(200))
    selector.remove(np.arange(197))
    chances = {199: 8 / 14, 198: 4 / 14, 197: 2 / 14}
    assert_distribution(selector.sample(20_000), chances)


def test_recency_by_the_default_exponent_over_many_slots():
    selector = selectors.Recency(UPROBS, seed=1)
    for start in range(0, 3000, 100):
        selector.insert(np.arange(start, start + 100) % 700)
        if start >= 500:
            selector.remove(np.arange(start - 500, start - 400) % 700)
    ages = {(2999 - age) % 700: 1 / (age + 1) for age in range(500)}
    assert_distribution(selector.sample(100_000), normalised(ages))


def test_recency_draws_equally_while_all_ages_present_have_probability_zero():
    selector = selectors.Recency([0, 0, 1], seed=1)
    selector.insert(slots(4, 6))
    assert_distribution(selector.sample(10_000), {4: 0.5, 6: 0.5})
    selector.insert(slots(8))
    assert set(selector.sample(50)) == {4}


@pytest.mark.parametrize(
    "uprobs", [[], [0, 0], [1, -1], [1, np.nan], [INF], [[1, 2]], 3.0]
)
def test_recency_refuses_what_are_no_probabilities(uprobs):
    with pytest.raises(ValueError, match="probabilities by age"):
        selectors.Recency(uprobs)


# Mixture


def test_a_mixture_has_the_length_of_its_members():
    selector = FACTORIES["mixture"]()
    assert len(selector) == 0
    selector.insert(np.arange(5))
    selector.remove(slots(0, 1))
    assert len(selector) == 3


def test_a_mixture_draws_from_its_members_by_their_fractions():
    members = {
        "uniform": selectors.Uniform(),
        "priority": selectors.Prioritized(),
        "recency": selectors.Recency([1, 1, 0, 0]),
    }
    selector = selectors.Mixture(members, {"uniform": 2, "priority": 5, "recency": 1})
    selector.insert(np.arange(8))
    selector.prioritize(np.arange(8), np.array([3, 1, 0, 0, 0, 0, 0, 0]))
    chances = dict.fromkeys(range(8), 2 / 8 / 8)
    chances[0] += 5 / 8 * 3 / 4
    chances[1] += 5 / 8 * 1 / 4
    chances[6] += 1 / 8 / 2
    chances[7] += 1 / 8 / 2
    drawn = np.concatenate([selector.sample(16) for _ in range(2000)])
    assert_distribution(drawn, chances)
    for place in range(0, 16, 5):  # No place in a batch belongs to one member.
        assert_distribution(drawn.reshape(-1, 16)[:, place], chances)


def test_which_member_is_chosen_says_nothing_of_what_it_draws():
    # A config may give all selectors the same seed. If they then drew the same random
    # numbers, a low number would choose the first member and also its newest slot.
    drawn = []
    for seed in range(2000):
        members = {"a": selectors.Recency([1, 1], seed), "b": selectors.Fifo()}
        selector = selectors.Mixture(members, {"a": 1, "b": 1}, seed)
        selector.insert(slots(0, 1))
        drawn.append(selector.sample(1))
    assert_distribution(np.concatenate(drawn), {0: 0.75, 1: 0.25})


def test_a_mixture_uses_priorities_if_a_member_with_a_fraction_does():
    members = {"a": selectors.Uniform(), "b": selectors.Prioritized()}
    assert selectors.Mixture(members, {"a": 1, "b": 0.1}).uses_priorities
    assert not selectors.Mixture(members, {"a": 1, "b": 0}).uses_priorities
    assert not members["a"].uses_priorities


def test_a_member_of_fraction_zero_is_left_out():
    members = {"a": selectors.Uniform(), "b": selectors.Fifo()}
    selector = selectors.Mixture(members, {"a": 0.0, "b": 3})
    selector.insert(slots(2, 1, 0))
    assert selector.sample(3).tolist() == [2, 1, 0]
    assert len(members["a"]) == 0


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({"a": 1}, "same names"),
        ({"a": 1, "c": 1}, "same names"),
        ({"a": 0, "b": 0}, "not all zero"),
        ({"a": 1, "b": -1}, "not negative"),
        ({"a": 1, "b": np.nan}, "finite"),
        ({"a": 1, "b": INF}, "finite"),
        ({}, "same names"),
    ],
)
def test_a_mixture_refuses_wrong_fractions(fractions, message):
    members = {"a": selectors.Uniform(), "b": selectors.Fifo()}
    with pytest.raises(ValueError, match=message):
        selectors.Mixture(members, fractions)


def test_a_mixture_refuses_members_of_different_lengths():
    members = {"a": selectors.Uniform(), "b": selectors.Fifo()}
    members["a"].insert(slots(1))
    with pytest.raises(ValueError, match="hold the same slots"):
        selectors.Mixture(members, {"a": 1, "b": 1})
