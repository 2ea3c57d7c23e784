"""Updates of an agent: when results are returned, and values that are not finite."""

import logging

import jax
import numpy as np
import pytest
from toy_testing import ALGORITHM, UNITS, kernel, make_agent, make_batch, train

from embodied.jax.agent import AgentOptions, JaxAgent
from embodied.jax.compiling import compile_ahead
from embodied.jax.devices import Layout
from embodied.jax.train_runner import BATCH_FILE, NonfiniteError


def test_results_are_those_of_the_call_before():
    agent = make_agent()
    carry = agent.init_train(8)
    batches = [make_batch(seed) for seed in range(3)]
    carry, outputs, metrics = agent.train(carry, batches[0])
    assert (outputs, metrics) == ({}, {})
    for index in (1, 2):
        carry, outputs, metrics = agent.train(carry, batches[index])
        assert metrics["opt/updates"] == index
        expected = batches[index - 1]["stepid"]
        np.testing.assert_array_equal(outputs["replay"]["stepid"], expected)
    outputs, metrics = agent.flush()
    assert metrics["opt/updates"] == 3
    assert isinstance(outputs["replay"]["stepid"], np.ndarray)
    assert agent.flush() == ({}, {})


def test_large_integers_come_back_as_they_are():
    agent = make_agent()
    train(agent, make_batch())
    assert agent.flush()[1]["large"] == 165_965_075


def test_state_and_carry_are_given_away():
    agent = make_agent()
    carry = agent.init_train(8)
    state = dict(zip(agent._trainer.names, agent._trainer._leaves))
    assert {"net/kernel", "opt/step"} <= state.keys()
    agent.train(carry, make_batch())
    assert carry["total"].is_deleted()
    kept = [name for name, array in state.items() if not array.is_deleted()]
    assert not kept


def test_same_seed_and_batches_give_the_same_parameters():
    one, two, other = (make_agent(seed=seed) for seed in (5, 5, 6))
    for agent in (one, two, other):
        train(agent, *[make_batch(index) for index in range(20)])
    np.testing.assert_array_equal(kernel(one), kernel(two))
    assert not np.array_equal(kernel(one), kernel(other))


def test_report_changes_nothing():
    agent = make_agent()
    before = kernel(agent)
    _, metrics = agent.report(agent.init_report(8), make_batch())
    assert metrics["video"].dtype == np.uint8
    assert metrics["loss"].shape == ()
    np.testing.assert_array_equal(kernel(agent), before)


def test_batches_of_other_lengths_compile_once_each(caplog):
    caplog.set_level(logging.INFO)
    agent = make_agent()
    for steps in (3, 2, 3, 2):
        train(agent, make_batch(steps=steps))
    messages = [record.getMessage() for record in caplog.records]
    compiling = [text for text in messages if text.startswith("Compiling train")]
    assert len(compiling) == 2
    assert "8 x 3" in compiling[0]
    assert any("Compiled train" in text for text in messages)


def test_missing_keys_are_named():
    agent = make_agent()
    batch = make_batch()
    del batch["target"]
    with pytest.raises(ValueError, match="target is missing"):
        agent.train(agent.init_train(8), batch)


def test_batches_may_be_arrays_of_jax():
    agent, other = make_agent(), make_agent()
    train(agent, jax.tree.map(jax.numpy.asarray, make_batch()))
    train(other, make_batch())
    np.testing.assert_array_equal(kernel(agent), kernel(other))


def test_further_keys_are_left_out():
    agent = make_agent()
    train(agent, {**make_batch(), "log/score": np.array(["text"] * 8)})
    assert agent.flush()[1]["opt/updates"] == 1


BAD = {**make_batch(), "target": np.full((8, 3, UNITS), np.nan, np.float32)}


def test_updates_are_skipped_and_training_goes_on(caplog):
    agent = make_agent(max_nonfinite=3)
    before = kernel(agent)
    train(agent, BAD, BAD)
    assert agent.flush()[1]["opt/nonfinite"] == 2
    np.testing.assert_array_equal(kernel(agent), before)
    train(agent, make_batch())
    assert agent.flush()[1]["opt/nonfinite"] == 0
    assert not np.array_equal(kernel(agent), before)
    assert "Skipped an update" in caplog.text


def test_results_of_a_skipped_update_do_not_reach_the_replay():
    agent = make_agent()
    outputs, metrics = train(agent, BAD, make_batch())
    assert metrics["opt/nonfinite"] == 1 and not outputs
    assert "replay" in agent.flush()[0]


def test_a_damaged_state_is_an_error_at_once_and_is_not_saved():
    agent = make_agent(max_nonfinite=50)
    data = agent.save()
    spoiled = data["params"]["net/kernel"].copy()
    spoiled[3, 4] = np.nan
    agent.load({**data, "params": {**data["params"], "net/kernel": spoiled}})
    with pytest.raises(NonfiniteError, match="1 of 4 arrays, such as net/kernel"):
        train(agent, make_batch(), make_batch())
    with pytest.raises(NonfiniteError, match="they are not saved"):
        agent.save()


def test_too_many_in_a_row_are_an_error_with_the_batch_in_a_file(tmp_path):
    folder = tmp_path / "logdir"
    agent = make_agent(max_nonfinite=3, folder=folder)
    with pytest.raises(NonfiniteError, match=r"fewer than 3 updates .* got 3"):
        train(agent, make_batch(), *[BAD] * 4)
    with np.load(folder / BATCH_FILE) as file:
        assert np.isnan(file["target"]).all()
        np.testing.assert_array_equal(file["vector"], BAD["vector"])


def test_without_a_limit_there_is_no_error():
    agent = make_agent(max_nonfinite=0)
    train(agent, *[BAD] * 10)
    assert agent.flush()[1]["opt/nonfinite"] == 10


def test_a_reward_that_is_not_finite_counts_as_zero(caplog):
    batch, clean = make_batch(), make_batch()
    batch["reward"][2, 1], clean["reward"][2, 1] = np.nan, 0
    agents = make_agent(), make_agent()
    for agent, data in zip(agents, (batch, clean)):
        train(agent, data)
        train(agent, data)
    np.testing.assert_array_equal(kernel(agents[0]), kernel(agents[1]))
    assert caplog.text.count("A reward in the replay is not finite") == 1
    _, metrics = train(agents[0], make_batch(), make_batch())
    assert metrics["nonfinite/reward"] == 2
    assert np.isnan(batch["reward"][2, 1])


def test_rows_that_the_devices_cannot_divide_are_an_error(monkeypatch):
    monkeypatch.setattr(Layout, "parts", property(lambda self: 3))
    with pytest.raises(ValueError, match="batch_size: expected a multiple of the 3"):
        JaxAgent(ALGORITHM, AgentOptions()).init_train(8)


def test_an_agent_tells_that_it_compiles():
    agent, told = make_agent(), []

    def function(x):
        told.append(agent.compiling)
        return x

    def fail(x):
        raise ValueError("it cannot be traced")

    compile_ahead(function, (1.0,), name="a function")
    assert told == [True] and not agent.compiling
    with pytest.raises(ValueError, match="cannot be traced"):
        compile_ahead(fail, (1.0,), name="a function")
    assert not agent.compiling
