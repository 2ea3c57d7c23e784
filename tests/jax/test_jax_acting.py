"""The policy: its parameters, its carries in a table, its observations."""

import logging
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_testing import UNITS, kernel, make_agent, make_batch, make_obs, train

from embodied.jax.agent import JaxAgent
from embodied.jax.policy_runner import Parameters, batch_sizes


def test_policy_uses_the_newest_parameters_after_their_donation():
    agent = make_agent()
    obs = make_obs(2, first=True)
    for index in range(3):
        train(agent, make_batch(index))
        _, actions, outputs = agent.policy(agent.init_policy(2), obs, "eval")
        expected = obs["vector"] @ kernel(agent)
        np.testing.assert_allclose(actions["action"], expected, rtol=1e-4)
        assert (outputs["age"] == index + 1).all()


def test_carry_may_be_used_again():
    agent = make_agent()
    carry = agent.init_policy(2)
    first, *_ = agent.policy(carry, make_obs(2), "eval")
    again, *_ = agent.policy(carry, make_obs(2), "eval")
    np.testing.assert_array_equal(first["total"], again["total"])


def test_actions_are_the_same_with_the_same_seed():
    actions = []
    for _ in range(2):
        agent = make_agent(seed=3)
        carry = agent.init_policy(2)
        for _ in range(3):
            carry, action, _ = agent.policy(carry, make_obs(2))
            actions.append(action["action"])
    for one, two in zip(actions[:3], actions[3:]):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(actions[1] - actions[0], actions[2] - actions[1])


@pytest.mark.parametrize("beside", [False, True])
def test_parameters_are_never_half_updated_while_training_goes_on(beside):
    agent = make_agent(policy_beside=beside)
    agent.init_table(4)
    stop, errors, ages = threading.Event(), [], []

    def act():
        try:
            while not stop.is_set():
                _, outputs = agent.policy_table([2, 0], make_obs(2))
                assert len(np.unique(outputs["age"])) == 1
                ages.append(outputs["age"][0, 0])
        except BaseException as error:
            errors.append(error)

    actor = threading.Thread(target=act)
    actor.start()
    train(agent, *[make_batch(index) for index in range(200)])
    stop.set()
    actor.join(60)
    assert not errors
    assert ages == sorted(ages)


def test_unknown_mode_and_wrong_observations_are_named():
    agent = make_agent()
    carry = agent.init_policy(2)
    with pytest.raises(ValueError, match="expected mode train or eval, got 'x'"):
        agent.policy(carry, make_obs(2), "x")
    with pytest.raises(ValueError, match="vector is missing"):
        agent.policy(carry, {"is_first": np.zeros(2, bool)})
    obs = {**make_obs(2), "vector": np.zeros((2, 3))}
    with pytest.raises(ValueError, match=r"'vector' of shape \(2, 64\), got"):
        agent.policy(carry, obs)


def test_an_agent_without_policy_says_so():
    agent = make_agent(enable_policy=False)
    train(agent, make_batch())
    with pytest.raises(RuntimeError, match=r"jax\.enable_policy is False"):
        agent.init_policy(1)


class Version:
    """Stands in for an array of parameters that is ready when the test says so."""

    def __init__(self, ready: bool = False):
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready


def test_policy_of_its_own_devices_does_not_wait_for_an_update():
    parameters = Parameters(None, wait=False)
    old, new, newest = Version(), Version(), Version()
    parameters.publish([old])
    parameters.publish([new])
    assert parameters.newest() == [old]
    new.ready = True
    parameters.publish([newest])
    assert parameters.newest() == [new]
    newest.ready = True
    assert parameters.newest() == [newest]


def test_policy_of_shared_devices_takes_the_newest():
    parameters = Parameters(None, wait=True)
    parameters.publish([Version()])
    new = Version()
    parameters.publish([new])
    assert parameters.newest() == [new]


def test_versions_that_nobody_can_use_any_more_are_dropped():
    parameters = Parameters(None, wait=False)
    for _ in range(100):
        parameters.publish([Version(ready=True)])
    assert len(parameters._versions) == 1


TABLE_SLOTS = 5


@pytest.fixture(scope="module")
def table_agent() -> JaxAgent:
    return make_agent(actor_batch=3)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.permutations(range(TABLE_SLOTS)),
            st.integers(1, TABLE_SLOTS),
            st.integers(0, 100),
        ),
        max_size=8,
    )
)
def test_slots_behave_like_environments_of_their_own(table_agent, steps):
    agent = table_agent
    agent.init_table(TABLE_SLOTS)
    totals = np.zeros((TABLE_SLOTS, UNITS), np.float32)
    weights = kernel(agent)
    for order, count, seed in steps:
        slots, obs = order[:count], make_obs(count, seed)
        obs["is_first"] = np.arange(count) == seed % 4
        actions, outputs = agent.policy_table(slots, obs, "eval")
        totals[slots] *= ~obs["is_first"][:, None]
        totals[slots] += obs["vector"] @ weights
        expected = totals[slots]
        np.testing.assert_allclose(actions["action"], expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(outputs["seen"], obs["vector"])


def test_slots_that_are_reset_begin_anew(table_agent):
    agent = table_agent
    agent.init_table(TABLE_SLOTS)
    obs = make_obs(3)
    first, _ = agent.policy_table([4, 1, 0], obs, "eval")
    agent.reset_slots([1])
    second, _ = agent.policy_table([4, 1, 0], obs, "eval")
    np.testing.assert_allclose(second["action"][1], first["action"][1])
    twice = 2 * first["action"][[0, 2]]
    np.testing.assert_allclose(second["action"][[0, 2]], twice, rtol=1e-6)
    third, _ = agent.policy_table([1], {k: v[1:2] for k, v in obs.items()}, "eval")
    np.testing.assert_allclose(third["action"][0], 2 * first["action"][1], rtol=1e-6)


def test_a_new_table_may_have_another_size(table_agent):
    obs = make_obs(2)
    for slots in (2, 6, 4):
        table_agent.init_table(slots)
        actions, _ = table_agent.policy_table([slots - 1, 0], obs, "eval")
        expected = obs["vector"] @ kernel(table_agent)
        np.testing.assert_allclose(actions["action"], expected, rtol=1e-3, atol=1e-3)


def test_a_few_sizes_are_compiled_before_the_first_step(caplog):
    caplog.set_level(logging.INFO)
    agent = make_agent(actor_batch=3)
    agent.init_table(9)
    messages = [record.getMessage() for record in caplog.records]
    compiled = [text for text in messages if text.startswith("Compiling policy")]
    modes = ("train", "eval")
    assert len(compiled) == len(modes) * len(batch_sizes(9, 3)) == 4
    caplog.clear()
    for count in range(1, 10):
        for mode in modes:
            agent.policy_table(range(count), make_obs(count), mode)
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize("slots", [[], [0, 0], [TABLE_SLOTS], [-1]])
def test_slots_that_are_not_there_are_named(table_agent, slots):
    table_agent.init_table(TABLE_SLOTS)
    with pytest.raises(ValueError, match="distinct slots below 5, the size of"):
        table_agent.policy_table(slots, make_obs(len(slots)))
    with pytest.raises(ValueError, match="distinct slots"):
        table_agent.reset_slots(slots)


def test_every_row_needs_a_slot(table_agent):
    table_agent.init_table(TABLE_SLOTS)
    with pytest.raises(ValueError, match="a slot for each of the 3 rows, got 2"):
        table_agent.policy_table([0, 1], make_obs(3))


def test_several_threads_may_step_their_slots(table_agent):
    agent, rounds = table_agent, 50
    agent.init_table(4)
    obs = make_obs(2)
    results = {}

    def act(slots):
        for _ in range(rounds):
            results[slots], _ = agent.policy_table(slots, obs, "eval")

    threads = [threading.Thread(target=act, args=(x,)) for x in ((0, 1), (2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = rounds * (obs["vector"] @ kernel(agent))
    for slots in ((0, 1), (2, 3)):
        actions = results[slots]["action"]
        np.testing.assert_allclose(actions, expected, rtol=1e-3, atol=1e-2)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 8))
def test_two_sizes_cover_all_batches(slots, batch, parts):
    sizes = batch_sizes(slots, batch, parts)
    assert sizes == sorted(set(sizes)) and len(sizes) <= 2
    assert all(size % parts == 0 for size in sizes)
    assert slots <= sizes[-1] < slots + parts
    if 0 < batch < slots:
        assert batch <= sizes[0] < batch + parts


def test_what_is_not_finite_is_missing_and_reported_once_for_each_env(caplog):
    agent = make_agent()
    agent.init_table(3)
    obs = make_obs(3)
    obs["vector"][1, 2], obs["vector"][2, 0] = np.nan, np.inf
    for _ in range(2):
        actions, outputs = agent.policy_table([0, 1, 2], obs, envids=[7, 8, 9])
    assert np.isfinite(actions["action"]).all()
    assert outputs["seen"][1, 2] == outputs["seen"][2, 0] == -np.inf
    assert np.isfinite(outputs["seen"][0]).all()
    assert caplog.text.count("is not finite") == 1
    assert "'vector' of environment 8, 9 is" in caplog.text
    obs["vector"][0] = np.nan
    agent.policy_table([0, 1, 2], obs, envids=[7, 8, 9])
    assert "'vector' of environment 7 is" in caplog.text
    _, metrics = train(agent, make_batch(), make_batch())
    assert metrics["nonfinite/vector"] == 7
    assert np.isnan(obs["vector"][1, 2])


def test_env_ids_may_come_with_the_observations(caplog):
    agent = make_agent()
    obs = {**make_obs(2), "envid": np.array([[5], [6]])}
    obs["vector"][1] = np.nan
    agent.policy(agent.init_policy(2), obs)
    assert "of environment 6" in caplog.text


def test_missing_values_are_not_reported(caplog):
    agent = make_agent()
    obs = make_obs(2)
    obs["vector"][0] = -np.inf
    agent.policy(agent.init_policy(2), obs)
    assert "not finite" not in caplog.text
    _, metrics = train(agent, make_batch(), make_batch())
    assert "nonfinite/vector" not in metrics
