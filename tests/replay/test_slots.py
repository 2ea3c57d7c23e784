from __future__ import annotations

import bisect

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.replay.chunks import SlotRing
from embodied.replay.slots import SlotSet, SumTree


@given(
    rounds=st.lists(st.integers(0, 2**32 - 1), max_size=8),
    branching=st.integers(2, 20),
)
@settings(max_examples=30)
def test_a_sum_tree_agrees_with_running_sums(rounds, branching):
    tree = SumTree(branching)
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


@given(
    expected=st.integers(1, 100),
    rounds=st.lists(st.integers(0, 2**32 - 1), max_size=12),
)
@settings(max_examples=30)
def test_a_ring_agrees_with_a_list(expected, rounds):
    ring, model = SlotRing(expected), []
    for seed in rounds:
        rng = np.random.default_rng(seed)
        new = rng.permutation(400)[: int(rng.integers(0, 100))]
        ring.append(new)
        model += new.tolist()
        amount = int(rng.integers(0, len(model) + 1))
        assert ring.oldest(amount).tolist() == model[:amount]
        ring.drop(amount)
        del model[:amount]
        assert len(ring) == len(model)
        ranks = rng.permutation(len(model))
        assert ring.at(ranks).tolist() == [model[rank] for rank in ranks]


@given(rounds=st.lists(st.integers(0, 2**32 - 1), max_size=12))
@settings(max_examples=30)
def test_a_set_agrees_with_a_python_set(rounds):
    members, model = SlotSet(), set()
    for seed in rounds:
        rng = np.random.default_rng(seed)
        absent = np.setdiff1d(np.arange(400), list(model))
        new = rng.permutation(absent)[: int(rng.integers(0, 100))]
        members.insert(new)
        model |= set(new.tolist())
        old = rng.integers(0, 1000, int(rng.integers(0, 300)))  # Not all are members.
        members.discard(old)
        model -= set(old.tolist())
        assert len(members) == len(model)
        assert sorted(members.at(np.arange(len(model)))) == sorted(model)
