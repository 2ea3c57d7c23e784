from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from selector_testing import FACTORIES, UPROBS, filled, slots

from embodied.replay import selectors

every_selector = pytest.mark.parametrize("name", FACTORIES)


@every_selector
def test_an_empty_selector_is_true_so_that_it_is_not_replaced_by_a_default(name):
    selector = FACTORIES[name]()
    assert bool(selector) is True
    assert (selector or "default") is selector


@every_selector
def test_an_empty_selector_says_so_when_it_is_sampled(name):
    selector = FACTORIES[name]()
    with pytest.raises(LookupError, match="selector is empty"):
        selector.sample(1)
    selector.insert(slots(3))
    selector.remove(slots(3))
    with pytest.raises(LookupError, match="is empty"):
        selector.sample(1, peek=True)
    assert selector.sample(0).tolist() == []


@every_selector
def test_samples_are_int64_in_the_amount_asked_for(name):
    selector = filled(name, 7)
    for amount in (0, 1, 5, 200):
        drawn = selector.sample(amount)
        assert drawn.dtype == np.int64
        assert drawn.shape == (amount,)
    with pytest.raises(ValueError, match="0 slots or more, got -1"):
        selector.sample(-1)


@every_selector
def test_operations_on_no_slots_do_nothing(name):
    selector = filled(name, 10)
    for _ in range(2):
        selector.insert(slots())
        selector.remove(slots())
        selector.prioritize(slots(), np.zeros(0))
        assert len(selector) == 10


@every_selector
def test_peeking_changes_nothing_that_training_sees(name):
    selector, other = filled(name, 50), filled(name, 50)
    for _ in range(20):
        other.sample(16, peek=True)
        np.testing.assert_array_equal(selector.sample(4), other.sample(4))


@every_selector
def test_growth_over_many_sizes_loses_no_slot(name):
    selector = FACTORIES[name]()
    total = 0
    for amount in (1, 62, 1, 1, 63, 500, 3000, 1):
        selector.insert(np.arange(total, total + amount))
        total += amount
        assert len(selector) == total
    assert set(selector.sample(60_000)) <= set(range(total))
    selector.remove(np.arange(total - 1))
    assert set(selector.sample(100)) == {total - 1}


@every_selector
def test_memory_per_slot_is_small_and_does_not_grow_with_recycling(name):
    amount = 2**17
    tracemalloc.start()
    try:
        selector = filled(name, amount)
        used = tracemalloc.get_traced_memory()[0]
        for start in range(0, 3 * amount, amount // 8):
            recycled = np.arange(start, start + amount // 8) % amount
            selector.remove(recycled)
            selector.insert(recycled)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < amount * (56 if name == "mixture" else 32)
    assert after < amount * (56 if name == "mixture" else 32)


@every_selector
def test_an_operation_on_few_slots_does_not_touch_all(name):
    # A copy of, or a mask over, all slots would take at least a byte each.
    amount = 2**18
    selector = filled(name, amount)
    selector.prioritize(np.arange(amount), np.ones(amount))
    selector.remove(slots(0))
    selector.insert(slots(0))
    tracemalloc.start()
    try:
        selector.sample(4)
        selector.sample(4, peek=True)
        selector.prioritize(slots(7, 9, amount - 1), np.ones(3))
        selector.remove(slots(1, 2, 3))
        selector.insert(slots(1, 2, 3))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < amount // 8


@pytest.mark.parametrize("name", [x for x in FACTORIES if x != "fifo"])
def test_selectors_of_one_seed_draw_alike_and_of_another_do_not(name):
    kinds = {
        "uniform": selectors.Uniform,
        "recency": lambda seed: selectors.Recency(UPROBS, seed),
        "prioritized": lambda seed: selectors.Prioritized(seed=seed),
        "zeroing": lambda seed: selectors.Prioritized(1, 1, True, seed=seed),
        "mixture": lambda seed: selectors.Mixture(
            {"a": selectors.Fifo(), "b": selectors.Uniform()},
            {"a": 0.5, "b": 0.5},
            seed,
        ),
    }
    drawn = []
    for seed in (1, 1, 2):
        selector = kinds[name](seed=seed)
        selector.insert(np.arange(1000))
        drawn.append(selector.sample(30).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
