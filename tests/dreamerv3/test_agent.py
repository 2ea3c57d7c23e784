"""The agent as programs use it: configuration, training, acting, checkpoints."""

import json

import agent_testing as testing
import jax
import numpy as np
import pytest
from dreamer_testing import QUICK, make_agent, make_config, make_obs
from program_testing import run_program

from dreamerv3.agent import Agent
from embodied import Space

UPDATES = 20


def train(agent: Agent, updates: int) -> tuple[dict, dict]:
    carry = agent.init_train(testing.BATCH)
    source = (testing.make_batch(index) for index in range(updates))
    with agent.stream(source) as batches:
        for batch in batches:
            carry, _, _ = agent.train(carry, batch)
    return agent.flush()


@pytest.fixture(scope="module")
def trained() -> tuple[Agent, dict, dict, dict]:
    """A trained agent, outputs and metrics of its last update, and its saved state."""
    agent = make_agent()
    before = agent.save()["params"]
    outputs, metrics = train(agent, UPDATES)
    after = agent.save()
    changed = {x for x in before if not np.array_equal(before[x], after["params"][x])}
    assert {x.split("/")[0] for x in changed} >= {"enc", "dyn", "dec", "pol", "val"}
    return agent, outputs, metrics, after


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_agents_with_one_seed_have_the_same_bits_after_20_updates(trained):
    other = make_agent()
    train(other, UPDATES)
    one, two = trained[3], other.save()
    for part in ("params", "opt"):
        assert one[part].keys() == two[part].keys()
        for name, value in one[part].items():
            np.testing.assert_array_equal(value, two[part][name], err_msg=name)
    fresh = make_agent().save()["params"]
    assert not np.array_equal(
        one["params"]["pol/mlp/linear0/kernel"], fresh["pol/mlp/linear0/kernel"]
    )


def test_training_returns_latents_for_the_replay_and_metrics(trained):
    _, outputs, metrics, _ = trained
    lead = (testing.BATCH, testing.LENGTH)
    replay = outputs["replay"]
    assert replay["stepid"].shape == (*lead, 20)
    assert replay["dyn/deter"].shape == (*lead, 16)
    assert replay["dyn/stoch"].shape == (*lead, 3)
    expected = testing.make_batch(UPDATES - 1)["stepid"][:, testing.CONTEXT :]
    np.testing.assert_array_equal(replay["stepid"], expected)
    assert metrics["opt/updates"] == UPDATES
    assert metrics["opt/nonfinite"] == 0
    names = {"opt/loss", "loss/vector", "loss/policy", "ret_rate", "rand/move"}
    assert names <= set(metrics)
    assert all(np.isfinite(value) for value in metrics.values())


def test_policy_returns_actions_of_their_spaces_and_latents(trained):
    agent = trained[0]
    carry = agent.init_policy(2)
    carry, actions, outputs = agent.policy(carry, make_obs(2))
    assert isinstance(carry["deter"], jax.Array)
    assert actions.keys() == {"force", "move"}
    assert actions["move"].dtype == np.int32
    for key in actions:
        space = testing.ACT_SPACE[key]
        assert actions[key].shape == (2, *space.shape)
        assert all(row in space for row in np.asarray(actions[key], space.dtype))
    assert outputs["dyn/stoch"].dtype == np.uint8
    _, evaluated, _ = agent.policy(carry, make_obs(2), "eval")
    assert evaluated.keys() == actions.keys()


def test_table_and_carry_have_the_same_states(trained):
    agent = trained[0]
    agent.init_table(2)
    obs = make_obs(2)
    _, table = agent.policy_table([0, 1], obs)
    _, _, carry = agent.policy(agent.init_policy(2), obs)
    np.testing.assert_allclose(table["dyn/deter"], carry["dyn/deter"], rtol=1e-5)


def test_state_is_restored_into_another_agent(trained):
    data = trained[3]
    other = make_agent("--seed", "1")
    other.load(data)
    restored = other.save()
    for name, value in data["params"].items():
        np.testing.assert_array_equal(value, restored["params"][name])
    assert restored["counters"]["updates"] == UPDATES
    assert data["opt"]["step/value"] == UPDATES


def test_one_module_can_be_loaded_alone(trained):
    data = trained[3]
    other = make_agent("--seed", "1")
    before = other.save()["params"]
    other.load(data, "enc/")
    after = other.save()["params"]
    for name in after:
        source = data["params"] if name.startswith("enc/") else before
        np.testing.assert_array_equal(after[name], source[name], err_msg=name)


def test_checkpoint_of_another_size_is_an_error_that_names_parameters(trained):
    config = testing.rssm_flags(hidden=5)
    with pytest.raises(ValueError, match=r"dyn/dynin0/kernel \(expected \(16, 5\)"):
        make_agent(*config).load(trained[3])


def test_reports_can_be_turned_off():
    agent = make_agent("--agent.report", "False")
    assert agent.report((), testing.make_batch()) == ((), {})


def test_few_keys_of_the_configuration_are_enough():
    config = make_config()
    keys = {key: config[key] for key in ("agent", "jax", "seed")}
    agent = Agent(testing.OBS_SPACE, testing.ACT_SPACE, keys, compiler=QUICK)
    assert agent.options.seed == 0
    assert agent.options.max_nonfinite == 50


def test_observations_that_every_environment_has_are_required():
    spaces = {"vector": Space(np.float32, 3), "is_first": Space(bool)}
    with pytest.raises(ValueError, match="Add reward, is_last, is_terminal"):
        Agent(spaces, testing.ACT_SPACE, make_config())


def test_log_keys_and_reset_are_left_out():
    spaces = {**testing.OBS_SPACE, "log/score": Space(np.float32)}
    agent = Agent(spaces, testing.ACT_SPACE, make_config(), compiler=QUICK)
    names = agent.save()["params"]
    assert not any("log" in name.split("/") or "reset" in name for name in names)


GRADIENTS = """
import dataclasses, json, sys
from embodied.jax.setup import setup
setup('cpu', mock_devices=8)
import agent_testing as testing, jax, numpy as np
from dreamerv3 import model, training
from embodied import Space
from embodied.jax import devices
from embodied.jax.param_names import flat_params

testing.OBS_SPACE['image'] = Space(np.uint8, (48, 48, 3))
flags = testing.flags(**{'agent.dyn.rssm.free_nats': 0})  # Else the prior may rest.
state = testing.make_state(*flags, replay_context=testing.CONTEXT)
batch = testing.make_batch(batch=8)
shape = (*batch['token'].shape, 48, 48, 3)
batch['image'] = np.random.default_rng(0).integers(0, 256, shape, np.uint8)

def gradients(params, slowval, norms, carry, batch):
    seed = jax.numpy.array([1, 2], jax.numpy.uint32)
    def loss(params):
        weights = layout.gather((params, slowval))
        return training.loss(weights[0], carry, batch, seed, weights[1], norms)
    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, grads

results = []
for indices, mesh in [([0], '1,1,1'), *((range(8), mesh) for mesh in sys.argv[1:])]:
    layout = devices.train_layout(list(indices), mesh)
    layout = dataclasses.replace(layout, smallest=16)  # Nearly all weights are split.
    weights = (state.model, state.slowval, training.norm_states(state))
    weights = devices.put(jax.device_get(weights), layout.weights(weights))
    split = sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(weights))
    carry = jax.device_get(model.init_carry(state.model, 8))
    carry, rows = layout.place(carry), layout.place(batch)
    step = testing.quick_jit(gradients, out_shardings=layout.everywhere)
    value, grads = jax.device_get(step(*weights, carry, rows))
    results.append((float(value), flat_params(grads), split))
one, few, _ = results[0]
norm = np.linalg.norm
print(json.dumps([
    {
        'loss': abs(one - value) / abs(one),
        'split': split,
        'errors': {x: float(norm(few[x] - many[x]) / norm(few[x])) for x in few},
    }
    for value, many, split in results[1:]
]))
"""
MESHES = [
    ["-1,1,1", "2,2,2"],
    pytest.param(["2,4,1", "1,8,1", "4,1,2"], marks=pytest.mark.slow, id="two axes"),
    pytest.param(["1,4,2", "1,2,4", "1,1,8"], marks=pytest.mark.slow, id="tensor"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("meshes", MESHES)
@pytest.mark.slow
def test_eight_devices_and_one_have_the_same_loss_and_gradients(meshes):
    results = json.loads(run_program(GRADIENTS, *meshes).splitlines()[-1])
    for mesh, found in zip(meshes, results, strict=True):
        assert found["loss"] < 1e-4, mesh
        assert len(found["errors"]) > 60
        worst = max(found["errors"], key=found["errors"].__getitem__)
        assert found["errors"][worst] < 1e-4, (mesh, worst)
        assert (found["split"] > 10) == (mesh != "-1,1,1")


AGENTS = """
import json, sys
from dreamerv3.agent import Agent  # Must not have used any device.
from embodied.jax.setup import setup
setup('cpu', mock_devices=8)
import agent_testing as testing, numpy as np
import dreamer_testing
config = dreamer_testing.make_config('--configs', 'debug', 'multicpu', *sys.argv[1:])
agent = Agent(
    testing.OBS_SPACE, testing.ACT_SPACE, config, compiler=dreamer_testing.QUICK)
carry = agent.init_train(12)
for index in range(2):
    carry, _, _ = agent.train(carry, testing.make_batch(index, batch=12))
_, metrics = agent.flush()
agent.init_table(4)
actions, outputs = agent.policy_table([1, 3, 0], dreamer_testing.make_obs(3))
carry, more = agent.report(agent.init_report(12), testing.make_batch(2, batch=12))
print(json.dumps({
    'train': {key: float(value) for key, value in metrics.items()},
    'deter': outputs['dyn/deter'].tolist(),
    'report': {key: float(x) for key, x in more.items() if not x.ndim},
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", ["-1,1,1", "2,3,1", "3,1,2"])
def test_agent_on_policy_and_training_devices_of_their_own_equals_one(mesh):
    flags = ["--jax.train_devices", "0", "--jax.policy_devices", "0"]
    single = json.loads(run_program(AGENTS, *flags).splitlines()[-1])
    several = json.loads(run_program(AGENTS, "--jax.train_mesh", mesh).splitlines()[-1])
    np.testing.assert_allclose(single["deter"], several["deter"], rtol=1e-3, atol=1e-4)
    for part in ("train", "report"):
        for key, value in single[part].items():
            other = several[part][key]
            np.testing.assert_allclose(other, value, rtol=1e-2, atol=1e-3, err_msg=key)
