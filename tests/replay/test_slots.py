from __future__ import annotations

import bisect

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.replay.slots import InsertionOrder, SlotSet, SumTree


@given(
    rounds=st.lists(st.integers(0, 2**32 - 1), max_size=8),
    branching=st.integers(2, 20),
    exact=st.booleans(),
)
@settings(max_examples=30)
def test_a_sum_tree_agrees_with_running_sums(rounds, branching, exact):
    tree = SumTree(branching, np.uint8 if exact else np.float64)
    numbers = np.zeros(0)
    for seed in rounds:
        rng = np.random.default_rng(seed)
        length = len(numbers) + int(rng.integers(0, 300))
        numbers = np.concatenate([numbers, np.zeros(length - len(numbers))])
        tree.reserve(length)
        if not length:
            continue
        indices = rng.integers(0, length, int(rng.integers(0, 60)))
        values = rng.integers(0, 3, len(indices))  # Sums of these are exact.
        tree.update(indices, values)
        numbers[indices] = values
        ends = np.cumsum(numbers)
        assert tree.total == ends[-1]
        places = rng.integers(0, length, 20)
        np.testing.assert_array_equal(tree.before(places), (ends - numbers)[places])
        np.testing.assert_array_equal(tree[places], numbers[places])
        if tree.total:
            targets = rng.integers(0, tree.total, 20)
            slow = [bisect.bisect_right(ends, target) for target in targets]
            np.testing.assert_array_equal(tree.find(targets), slow)


@given(
    weights=st.lists(st.floats(0, 1e290, allow_subnormal=True), min_size=1),
    shares=st.lists(st.floats(0, 1), min_size=1),
)
def test_a_sum_tree_never_finds_a_zero_whatever_is_rounded(weights, shares):
    tree = SumTree(3)
    tree.reserve(len(weights))
    tree.update(np.arange(len(weights)), np.array(weights))
    if tree.total > 0:
        found = tree.find(np.array(shares) * tree.total)
        assert all(weights[index] > 0 for index in found)


def test_the_sums_depend_on_the_numbers_only_and_not_on_how_they_came():
    rng = np.random.default_rng(0)
    grown, fresh = SumTree(16), SumTree(16)
    numbers = np.zeros(5000)
    for _ in range(200):
        indices = rng.integers(0, 5000, 30)
        numbers[indices] = rng.random(30) * 10.0 ** rng.integers(-9, 9, 30)
        grown.reserve(int(indices.max()) + 1)
        grown.update(indices, numbers[indices])
    fresh.reserve(50_000)
    fresh.update(np.arange(5000), numbers)
    assert grown.total == fresh.total
    targets = rng.random(1000) * grown.total
    np.testing.assert_array_equal(grown.find(targets), fresh.find(targets))


@given(rounds=st.lists(st.integers(0, 2**32 - 1), max_size=12))
@settings(max_examples=30)
def test_an_order_and_a_set_agree_with_lists(rounds):
    order, members, model = InsertionOrder(), SlotSet(), []
    for seed in rounds:
        rng = np.random.default_rng(seed)
        absent = np.setdiff1d(np.arange(400), model)
        new = rng.permutation(absent)[: int(rng.integers(0, 100))]
        order.insert(new)
        members.insert(new)
        model += new.tolist()
        old = rng.permutation(model)[: int(rng.integers(0, 100))].astype(np.int64)
        order.remove(old)
        members.remove(old)
        model = [slot for slot in model if slot not in set(old.tolist())]
        ranks = np.arange(len(model))
        assert len(order) == len(members) == len(model)
        assert order.at(ranks).tolist() == model
        assert order.ranks(np.array(model, np.int64)).tolist() == ranks.tolist()
        assert sorted(members.at(ranks)) == sorted(model)
        present = members.contains(np.arange(1000))
        assert np.flatnonzero(present).tolist() == sorted(model)
