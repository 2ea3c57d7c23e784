"""Streams and checkpoints of an agent: where they continue, and what is loaded."""

import logging

import jax
import ml_dtypes
import numpy as np
import pytest
from toy_testing import kernel, make_agent, make_batch, make_obs, train

from embodied import streams


class Numbered(streams.Stateless):
    """Batches with their number as reward, from a position that can be saved."""

    def __init__(self):
        super().__init__(self._make)
        self.index = 0
        self.closed = False

    def _make(self):
        self.index += 1
        return {**make_batch(), "reward": np.full((8, 3), self.index, np.float32)}

    def save(self):
        return {"index": self.index}

    def load(self, data):
        self.index = data["index"]

    def close(self):
        self.closed = True


def test_batches_are_on_the_device_with_different_seeds():
    agent = make_agent()
    with agent.stream(Numbered()) as stream:
        batches = [next(stream) for _ in range(3)]
    assert all(isinstance(x, jax.Array) for x in batches[0].values())
    seeds = {tuple(np.asarray(batch["seed"])) for batch in batches}
    assert len(seeds) == 3
    assert batches[0]["seed"].dtype == np.uint32


def test_seeds_repeat_with_the_agents_seed_and_differ_between_streams():
    found = []
    for seed in (1, 1, 2):
        agent = make_agent(seed=seed)
        for _ in range(2):
            with agent.stream(Numbered()) as stream:
                found.append(tuple(np.asarray(next(stream)["seed"])))
    assert found[:2] == found[2:4]
    assert len(set(found)) == 4


def test_no_batch_is_lost_or_repeated_by_saving():
    agent = make_agent()
    with agent.stream(Numbered()) as stream:
        for _ in range(3):
            next(stream)
        data = stream.save()
        expected = [next(stream) for _ in range(3)]
    with agent.stream(Numbered()) as other:
        other.load(data)
        found = [next(other) for _ in range(3)]
    for one, two in zip(expected, found):
        assert one["reward"][0, 0] == two["reward"][0, 0]
        np.testing.assert_array_equal(one["seed"], two["seed"])
    assert expected[0]["reward"][0, 0] == 4


def test_closing_reaches_the_source():
    source = Numbered()
    stream = make_agent().stream(source)
    next(stream)
    stream.close()
    assert source.closed


def test_plain_iterators_are_streams_too():
    agent = make_agent()
    carry = agent.init_train(8)
    for batch in agent.stream(make_batch(index) for index in range(3)):
        carry, _, _ = agent.train(carry, batch)
    assert agent.flush()[1]["opt/updates"] == 3


def test_saved_data_is_plain():
    agent = make_agent()
    train(agent, make_batch())
    data = agent.save()
    assert set(data) == {"params", "opt", "counters"}
    assert set(data["params"]) == {"net/kernel", "net/age"}
    assert set(data["opt"]) == {"step", "nonfinite"}
    arrays = [*data["params"].values(), *data["opt"].values()]
    assert all(type(array) is np.ndarray for array in arrays)
    assert data["counters"] == {"updates": 1, "policy_calls": 0}


def test_saved_data_does_not_change_with_further_updates():
    agent = make_agent()
    train(agent, make_batch())
    data = agent.save()
    before = data["params"]["net/kernel"].copy()
    train(agent, make_batch(), make_batch())
    np.testing.assert_array_equal(data["params"]["net/kernel"], before)


def test_training_and_actions_continue_as_if_nothing_had_happened():
    one, two = make_agent(seed=1), make_agent(seed=2)
    train(one, *[make_batch(index) for index in range(3)])
    one.policy(one.init_policy(2), make_obs(2))
    two.load(one.save())
    # The agents' seeds differ, so the batch brings one for both.
    batch = {**make_batch(3), "seed": np.array([1, 2], np.uint32)}
    for agent in (one, two):
        train(agent, batch)
    np.testing.assert_array_equal(kernel(one), kernel(two))
    obs = make_obs(2, first=True)
    actions = [x.policy(x.init_policy(2), obs, "eval")[1] for x in (one, two)]
    np.testing.assert_array_equal(actions[0]["action"], actions[1]["action"])
    assert one.save()["counters"] == two.save()["counters"]


def test_only_what_the_regex_matches_is_loaded_and_that_is_said(caplog):
    caplog.set_level(logging.INFO)
    source, agent = make_agent(seed=1), make_agent(seed=2)
    train(source, make_batch())
    agent.load(source.save(), regex="net/k")
    np.testing.assert_array_equal(kernel(agent), kernel(source))
    data = agent.save()
    assert data["opt"]["step"] == 0
    assert data["counters"]["updates"] == 0
    assert (data["params"]["net/age"] == 0).all()
    assert "Loaded 1 of the agent's 4 arrays." in caplog.text
    assert "Left out: net/age, opt/nonfinite, opt/step." in caplog.text


def test_with_a_regex_other_names_are_only_reported(caplog):
    caplog.set_level(logging.INFO)
    agent = make_agent()
    data = agent.save()
    data["params"]["other/kernel"] = data["params"].pop("net/age")
    agent.load(data, regex=".*")
    assert "Not in what was loaded: net/age." in caplog.text
    assert "Not in this agent: other/kernel." in caplog.text


def test_without_a_regex_other_names_are_an_error():
    agent = make_agent()
    data = agent.save()
    data["params"]["other/kernel"] = data["params"].pop("net/age")
    with pytest.raises(ValueError, match=r"Missing: net/age\. .*: other/kernel"):
        agent.load(data)


@pytest.mark.parametrize("regex", [None, ".*"])
def test_other_shapes_are_an_error_that_names_them(regex):
    agent = make_agent()
    data = agent.save()
    before = kernel(agent)
    data["params"]["net/kernel"] = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"net/kernel \(expected \(64, 64\), got") as e:
        agent.load(data, regex)
    # A run that continues has no regex to change.
    assert ("run.from_checkpoint_regex" in str(e.value)) == (regex is not None)
    np.testing.assert_array_equal(kernel(agent), before)
    agent.load(data, "net/age|opt/")


def test_a_regex_that_matches_nothing_is_an_error():
    agent = make_agent()
    with pytest.raises(ValueError, match="got 'none', which matches none"):
        agent.load(agent.save(), "none")


def test_other_precisions_are_converted():
    agent = make_agent()
    data = agent.save()
    small = data["params"]["net/kernel"].astype(ml_dtypes.bfloat16)
    data["params"]["net/kernel"] = small
    agent.load(data)
    assert kernel(agent).dtype == np.float32
    np.testing.assert_array_equal(kernel(agent), small.astype(np.float32))
