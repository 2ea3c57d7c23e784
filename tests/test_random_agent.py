from __future__ import annotations

import json
import threading

import elements
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied import Space
from embodied.random_agent import RandomAgent

# Other work on the machine must not decide whether a test passes.

OBS_SPACE = {
    "vector": Space(np.float32, 3),
    "reward": Space(np.float32),
    "is_first": Space(bool),
    "is_last": Space(bool),
    "is_terminal": Space(bool),
}
ACT_SPACE = {
    "reset": Space(bool),
    "move": Space(np.int32, (), 2, 6),
    "buttons": Space(np.int32, (2,), [0, 10], [3, 11]),
    "jump": Space(bool, (2,)),
    "steer": Space(np.float32, (3,), [-1, 0, 5], [1, 2, 6]),
    "speed": Space(np.float32, (), 1, None),
    "force": Space(np.float64, (2, 2)),
    "key": Space(np.uint64),
    "pixel": Space(np.uint8, (2,)),
}


def observe(batch_size):
    return {
        "vector": np.zeros((batch_size, 3), np.float32),
        "reward": np.zeros(batch_size, np.float32),
        "is_first": np.zeros(batch_size, bool),
        "is_last": np.zeros(batch_size, bool),
        "is_terminal": np.zeros(batch_size, bool),
    }


def act(agent, batch_sizes, mode="train"):
    return [
        agent.policy(agent.init_policy(size), observe(size), mode)[1]
        for size in batch_sizes
    ]


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


@given(st.integers(0, 2**32), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_actions_lie_in_their_spaces(seed, batch_sizes):
    agent = RandomAgent(OBS_SPACE, ACT_SPACE, seed=seed)
    for size, actions in zip(batch_sizes, act(agent, batch_sizes)):
        assert actions.keys() == ACT_SPACE.keys() - {"reset"}
        for key, value in actions.items():
            assert len(value) == size
            assert all(row in ACT_SPACE[key] for row in value), (key, value)


def test_every_env_gets_its_own_action():
    (actions,) = act(RandomAgent(OBS_SPACE, ACT_SPACE), [500])
    assert set(actions["move"].tolist()) == {2, 3, 4, 5}
    assert len(np.unique(actions["force"])) == 2000


def test_carries_on_with_the_carry_it_got_and_has_no_outputs():
    agent = RandomAgent(OBS_SPACE, ACT_SPACE)
    carry, _, outputs = agent.policy(agent.init_policy(2), observe(2), mode="eval")
    assert carry == agent.init_policy(2)
    assert outputs == {}


@given(st.integers(0, 99), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_the_seed_decides(seed, sizes):
    first = act(RandomAgent(OBS_SPACE, ACT_SPACE, seed=seed), sizes)
    assert_equal(first, act(RandomAgent(OBS_SPACE, ACT_SPACE, None, seed), sizes))
    other = act(RandomAgent(OBS_SPACE, ACT_SPACE, seed=seed + 1), sizes)
    assert not np.array_equal(first[0]["force"], other[0]["force"])


@given(st.integers(0, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_saving_keeps_the_random_state(before, sizes):
    first = RandomAgent(OBS_SPACE, ACT_SPACE, seed=1)
    act(first, [3] * before)
    state = json.loads(json.dumps(first.save()))
    second = RandomAgent(OBS_SPACE, ACT_SPACE, seed=2)
    second.load(state)
    assert_equal(act(first, sizes), act(second, sizes))


def test_loading_with_a_regex_that_matches_nothing_changes_nothing():
    first, second = (RandomAgent(OBS_SPACE, ACT_SPACE, seed=1) for _ in range(2))
    other = RandomAgent(OBS_SPACE, ACT_SPACE, seed=2).save()
    first.load(other, regex="dyn/")
    assert_equal(act(first, [2]), act(second, [2]))
    first.load(other, regex=".*")
    assert first.save() == other


def test_train_and_report_measure_the_batch():
    agent = RandomAgent(OBS_SPACE, ACT_SPACE)
    batch = {"reward": np.array([[0, 1, -3], [4, 0, 1]], np.float32)}
    carry, outputs, metrics = agent.train(agent.init_train(2), batch)
    assert outputs == {}
    assert {key: float(value) for key, value in metrics.items()} == {
        "batch_size": 2,
        "batch_length": 3,
        "reward_mean": 0.5,
        "reward_max": 4,
    }
    assert agent.report(agent.init_report(2), batch) == (carry, metrics)


def test_training_draws_nothing_and_counts():
    agent = RandomAgent(OBS_SPACE, ACT_SPACE)
    before = agent.save()
    for _ in range(3):
        agent.train(agent.init_train(1), {"reward": np.zeros((1, 2), np.float32)})
    assert agent.save() == {**before, "counters": {"updates": 3}}
    other = RandomAgent(OBS_SPACE, ACT_SPACE)
    other.load(agent.save())
    assert other.save() == agent.save()
    other.load(before, regex="rng")
    assert other.save() == agent.save()


def test_the_stream_is_passed_on():
    batches = [{"reward": np.zeros((1, 2))} for _ in range(3)]
    items = list(RandomAgent(OBS_SPACE, ACT_SPACE).stream(batches))
    assert all(item is batch for item, batch in zip(items, batches, strict=True))


def test_spaces_of_elements_are_accepted():
    space = elements.Space(np.int32, (), 0, 3)
    (actions,) = act(RandomAgent(OBS_SPACE, {"move": space}), [100])
    assert set(actions["move"].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("threads", [4])
def test_threads_share_one_sequence_of_draws(threads):
    def draw(agent, into, barrier):
        barrier.wait(60)
        into.extend(row.tobytes() for a in act(agent, [1] * 50) for row in a["force"])

    agent = RandomAgent(OBS_SPACE, ACT_SPACE)
    barrier = threading.Barrier(threads)
    drawn: list[bytes] = []
    workers = [
        threading.Thread(target=draw, args=(agent, drawn, barrier))
        for _ in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    alone = act(RandomAgent(OBS_SPACE, ACT_SPACE), [1] * 50 * threads)
    assert sorted(drawn) == sorted(a["force"][0].tobytes() for a in alone)
