"""Helpers for the tests of selectors."""

from __future__ import annotations

from collections import Counter

import numpy as np
from scipy import stats

from embodied.replay import selectors

INF = float("inf")
UPROBS = 1 / np.arange(1, 4001)

FACTORIES = {
    "fifo": selectors.Fifo,
    "uniform": selectors.Uniform,
    "recency": lambda: selectors.Recency(UPROBS),
    "prioritized": lambda: selectors.Prioritized(0.8, 2.0, maxfrac=0.5, branching=3),
    "zeroing": lambda: selectors.Prioritized(0.8, INF, True),
    "mixture": lambda: selectors.Mixture(
        {
            "uniform": selectors.Uniform(),
            "priority": selectors.Prioritized(0.8, INF, True),
            "recency": selectors.Recency(UPROBS),
        },
        {"uniform": 2, "priority": 1, "recency": 1},
    ),
}


def slots(*values):
    return np.array(values, np.int64)


def filled(name, amount):
    selector = FACTORIES[name]()
    selector.insert(np.arange(amount))
    return selector


def assert_distribution(drawn, chances):
    """Checks that slots were drawn with these probabilities, which sum to one."""
    counts = Counter(drawn.tolist())
    assert set(counts) <= {slot for slot, chance in chances.items() if chance > 0}
    possible = [slot for slot, chance in chances.items() if chance > 0]
    observed = [counts[slot] for slot in possible]
    expected = [chances[slot] * len(drawn) for slot in possible]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def normalised(weights):
    total = sum(weights.values())
    return {slot: weight / total for slot, weight in weights.items()}
