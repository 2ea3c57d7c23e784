"""How much is trained for each environment step."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied.run.ratio import TrainRatio

RATIOS = st.one_of(
    st.integers(1, 2000).map(float),
    st.floats(0.01, 100).map(lambda ratio: round(ratio, 3)),
)


def batches(keeper, steps, stored):
    """Trains all that is due after some steps; returns how many batches."""
    keeper.collected(steps)
    due = keeper.due(stored)
    for left in reversed(range(due)):
        keeper.trained(1)
        assert keeper.due(stored) == left
    return due


@given(RATIOS, st.integers(1, 8), st.integers(1, 16), st.lists(st.integers(1, 40)))
def test_trained_steps_keep_to_the_ratio_within_one_batch(ratio, size, length, calls):
    keeper, batch = TrainRatio(ratio, size, length), size * length
    assert batches(keeper, 3, stored=size - 1) == 0
    trained, steps = batches(keeper, 4, stored=size) * batch, 7
    assert trained > 0, "the first batch comes at once"
    for amount in calls:
        trained += batches(keeper, amount, stored=1000) * batch
        steps += amount
        assert 0 < trained - Fraction(str(ratio)) * steps <= batch


@given(RATIOS, st.lists(st.integers(1, 40), max_size=30), st.integers(0, 30))
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(ratio, calls, cut):
    def run(interrupted):
        keeper, due = TrainRatio(ratio, 2, 3), []
        for index, amount in enumerate(calls):
            if interrupted and index == cut:
                data, keeper = keeper.save(), TrainRatio(ratio, 2, 3)
                keeper.load(data)
            due.append(batches(keeper, amount, stored=10))
        return due

    assert run(interrupted=True) == run(interrupted=False)


def test_steps_before_the_first_batch_are_made_up_for():
    keeper = TrainRatio(10, batch_size=4, batch_length=10)
    assert [batches(keeper, 20, stored) for stored in (0, 1, 3)] == [0, 0, 0]
    assert batches(keeper, 2, stored=4) == 16  # More than 620 / 40 batches.
    assert batches(keeper, 4, stored=4) == 1


@given(RATIOS, st.integers(1, 1000), st.data())
def test_what_is_not_trained_stays_due(ratio, steps, data):
    keeper = TrainRatio(ratio, 2, 3)
    keeper.collected(steps)
    due = keeper.due(stored=2)
    made = data.draw(st.integers(0, due))
    keeper.trained(made)
    again = TrainRatio(ratio, 2, 3)
    again.load(keeper.save())
    assert keeper.due(stored=2) == again.due(stored=2) == due - made


@pytest.mark.parametrize("ratio", [0, -1])
def test_without_a_ratio_steps_are_followed_by_one_batch(ratio):
    keeper = TrainRatio(ratio, batch_size=4, batch_length=10)
    assert batches(keeper, 1, stored=3) == 0
    assert [batches(keeper, steps, stored=4) for steps in (1, 1000, 5)] == [1, 1, 1]


@pytest.mark.parametrize("ratio", [4e-7, 1e-300])
def test_a_tiny_ratio_is_a_limit_too(ratio):
    keeper = TrainRatio(ratio, batch_size=16, batch_length=64)
    assert sum(batches(keeper, 16, stored=1000) for _ in range(100)) == 1
    again = TrainRatio(ratio, batch_size=16, batch_length=64)
    again.load(keeper.save())
    assert batches(again, 16, stored=1000) == 0


def test_another_ratio_counts_anew():
    keeper = TrainRatio(1, batch_size=1, batch_length=10)
    batches(keeper, 1, stored=1)
    assert batches(keeper, 1_000_000, stored=1) == 100_000
    faster = TrainRatio(20, batch_size=1, batch_length=10)
    faster.load(keeper.save())
    assert faster.due(stored=1) == 0, "there were no steps at this ratio"
    assert batches(faster, 1, stored=1) == 3
    assert batches(faster, 1, stored=1) == 2


@pytest.mark.parametrize("data", [None, {}, {"steps": 1, "trained": 2}])
def test_foreign_state_is_refused(data):
    with pytest.raises(ValueError, match=r"\['ratio', 'steps', 'trained'\]"):
        TrainRatio(1, 1, 1).load(data)


@pytest.mark.parametrize(
    "arguments", [(float("nan"), 1, 1), (float("inf"), 1, 1), (1, 0, 1), (1, 1, 0)]
)
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ValueError, match="TrainRatio expected"):
        TrainRatio(*arguments)
