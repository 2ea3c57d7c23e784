"""The policy beside updates: a second client of the same device."""

import weakref

import jax
import numpy as np
import pytest
from toy_testing import kernel, make_agent, make_batch, make_obs, train

from embodied.jax import devices, policy_runner
from embodied.jax.second_client import SecondClientError, second_client, share


def test_it_chooses_the_same_actions_as_between_updates():
    chosen = []
    for beside in (False, True):
        agent = make_agent(seed=3, policy_beside=beside, deterministic=True)
        agent.init_table(4)
        for index in range(3):
            train(agent, make_batch(index))
            actions, outputs = agent.policy_table([2, 0], make_obs(2, index))
            chosen.append(actions["action"])
            assert (outputs["age"] == index + 1).all()
    for between, beside in zip(chosen[:3], chosen[3:]):
        np.testing.assert_array_equal(between, beside)


def test_carries_of_the_caller_and_parameters_that_are_loaded():
    agent, other = (make_agent(seed=seed, policy_beside=True) for seed in (1, 2))
    train(other, make_batch(0))
    agent.load(other.save())
    _, actions, _ = agent.policy(agent.init_policy(2), make_obs(2, first=True), "eval")
    expected = make_obs(2, first=True)["vector"] @ kernel(other)
    np.testing.assert_allclose(actions["action"], expected, rtol=1e-4)


def test_the_newest_parameters_are_used_once_they_are_there():
    agent = make_agent(policy_beside=True)
    agent.init_table(4)
    train(agent, *[make_batch(index) for index in range(3)])
    agent.flush()
    _, outputs = agent.policy_table([2, 0], make_obs(2))
    assert (outputs["age"] == 3).all()


@pytest.mark.parametrize("table", [True, False])
def test_parameters_live_until_the_step_that_reads_them_has_ended(table, monkeypatch):
    agent = make_agent(policy_beside=True)
    agent.init_table(4)
    parameters = agent._policy_runner._parameters
    used = [weakref.ref(leaf) for leaf in parameters.newest()]
    alive = []

    def fetch(tree):
        if not alive:  # Newer parameters come while the step runs.
            train(agent, make_batch(0))
            agent.flush()
            parameters.newest()
            alive.extend(reference() is not None for reference in used)
        return whole(tree)

    # The learner fetches, too; only the policy's own name is replaced.
    whole = devices.fetch
    monkeypatch.setattr(policy_runner, "devices", Replaced(devices, fetch=fetch))
    if table:
        agent.policy_table([2, 0], make_obs(2))
    else:
        agent.policy(agent.init_policy(2), make_obs(2))
    assert alive and all(alive)


class Replaced:
    def __init__(self, module, **names):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)


def test_without_compiling_there_is_no_policy_beside_updates():
    with jax.disable_jit(), pytest.raises(ValueError, match=r"False with jax\.jit"):
        make_agent(policy_beside=True)


def test_the_policy_runs_on_the_second_client():
    agent = make_agent(policy_beside=True)
    carry = agent.init_policy(2)
    (device,) = jax.tree.leaves(carry)[0].devices()
    assert device is second_client(jax.devices()[0])
    assert device.client is not jax.devices()[0].client


def test_arrays_are_shared_and_not_copied():
    array = jax.device_put(np.arange(64.0, dtype=np.float32))
    other = second_client(jax.devices()[0])
    shared = share(array, other)
    assert shared.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    assert shared.devices() == {other}
    del array  # The other client keeps its memory.
    np.testing.assert_array_equal(shared, np.arange(64))


class StrangeDevice:
    device_kind, platform = "Abacus", "tpu"


def test_a_device_without_second_client_is_named():
    with pytest.raises(SecondClientError, match=r"NVIDIA GPU .* got Abacus and JAX"):
        second_client(StrangeDevice())
