from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_testing import FACTORIES, INF

every_selector = pytest.mark.parametrize("name", FACTORIES)

# Each operation comes with numbers that choose its slots.
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "remove", "prioritize", "sample", "peek"]),
        st.integers(1, 40),
        st.integers(0, 2**32 - 1),
    ),
    max_size=30,
)


class Model:
    """A slow reference selector that knows which slots may be drawn next."""

    def __init__(self, name):
        self.name = name
        self.order = []  # Oldest first.
        self.cursor = 0  # Index in `order`.
        self.priorities = {}

    def insert(self, new):
        self.order += new
        initial = 2.0 if self.name == "prioritized" else INF
        self.priorities.update(dict.fromkeys(new, initial))

    def remove(self, old):
        for slot in old:
            index = self.order.index(slot)
            self.cursor -= index < self.cursor
            del self.order[index]
            del self.priorities[slot]

    def prioritize(self, changed, values):
        for slot, value in zip(changed, values):
            if 0 <= value < INF:
                self.priorities[slot] = value

    def possible(self):
        if self.name == "fifo":
            return {self.order[self.cursor % len(self.order)]}
        if self.name in ("prioritized", "zeroing"):
            highest = max(self.priorities.values())
            if highest in (0, INF):
                return {x for x, value in self.priorities.items() if value == highest}
            return {x for x, value in self.priorities.items() if value > 0}
        return set(self.order)

    def drawn(self, slot):
        if self.name == "fifo":
            self.cursor = self.cursor % len(self.order) + 1
        if self.name == "zeroing":
            self.priorities[slot] = 0.0


class Trial:
    """Random operations on a model and on a selector."""

    def __init__(self, name):
        self.selector = FACTORIES[name]()
        self.model = Model(name)
        self.free = list(range(500))

    def run(self, operations):
        for operation, amount, seed in operations:
            rng = np.random.default_rng(seed)
            if operation != "insert" and not self.model.order:
                self.refuse_to_sample(amount)
            else:
                getattr(self, operation)(amount, rng)
            assert len(self.selector) == len(self.model.order)

    def refuse_to_sample(self, amount):
        with pytest.raises(LookupError, match="is empty"):
            self.selector.sample(amount)

    def insert(self, amount, rng):
        # Slots are taken out of order, and removed slots are used again.
        new = rng.choice(self.free, min(amount, len(self.free)), replace=False)
        self.free = sorted(set(self.free) - set(new.tolist()))
        self.selector.insert(new)
        self.model.insert(new.tolist())

    def remove(self, amount, rng):
        old = self.model.order[:amount]  # A buffer evicts the oldest only.
        self.free += old
        self.selector.remove(np.array(old))
        self.model.remove(old)

    def prioritize(self, amount, rng):
        changed = rng.choice(self.model.order, amount)  # May hold a slot twice.
        values = rng.choice([0.0, 0.5, 3.0, 1e-3, np.nan, INF, -1.0], amount)
        self.selector.prioritize(changed, values)
        self.model.prioritize(changed.tolist(), values)

    def peek(self, amount, rng):
        drawn = self.selector.sample(amount, peek=True).tolist()
        fifo = self.model.name == "fifo"
        assert set(drawn) <= (set(self.model.order) if fifo else self.model.possible())

    def sample(self, amount, rng):
        drawn = self.selector.sample(amount).tolist()
        assert len(drawn) == amount
        for slot in drawn:
            assert slot in self.model.possible()
            self.model.drawn(slot)


@every_selector
@given(operations=OPERATIONS)
@settings(max_examples=20)
def test_only_slots_are_drawn_that_a_slow_model_allows(name, operations):
    Trial(name).run(operations)


@pytest.mark.slow
@every_selector
@given(operations=OPERATIONS)
@settings(max_examples=2000)
def test_only_slots_are_drawn_that_a_slow_model_allows_long(name, operations):
    Trial(name).run(operations)
