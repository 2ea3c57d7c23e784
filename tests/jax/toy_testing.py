"""A toy algorithm that compiles quickly, for tests of the agent that runs it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np

from embodied import Space
from embodied.jax.agent import AgentOptions, JaxAgent
from embodied.jax.algorithm import Algorithm

# Options that save most of the compiler's time on the CPU.
QUICK: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # Later versions may refuse it as unknown.
    QUICK["xla_cpu_use_fusion_emitters"] = False


def compute(function, *inputs):
    """Returns NumPy arrays, compiling one program instead of one per operation."""
    compiled = jax.jit(lambda *args: function(*args), compiler_options=QUICK)
    return jax.device_get(compiled(*inputs))


INPUTS, UNITS = 64, 64  # Enough weights to be split across devices.

OBSERVATIONS = {"vector": Space(np.float32, INPUTS), "is_first": Space(bool)}
KEYS = ("vector", "target", "reward", "stepid")


def init(key):
    kernel = jax.random.normal(key, (INPUTS, UNITS), jnp.float32)
    return {
        "net": {"kernel": kernel, "age": jnp.zeros(UNITS, jnp.float32)},
        "opt": {name: jnp.zeros((), jnp.int32) for name in ("step", "nonfinite")},
    }


def carry(params, rows):
    return {"total": jnp.zeros((rows, UNITS), jnp.float32)}


def loss(net, batch, noise):
    error = batch["vector"] @ net["kernel"] + noise - batch["target"]
    return jnp.square(error).mean() + batch["reward"].mean()


def train(state, carry, batch, seed, gather):
    """Gradient descent; every element of `age` is the number of updates."""
    net, opt = state["net"], state["opt"]
    shape = (*batch["vector"].shape[:2], UNITS)
    noise = 0.1 * jax.random.normal(jax.random.wrap_key_data(seed), shape)
    value, grad = jax.value_and_grad(lambda net: loss(gather(net), batch, noise))(net)
    finite = jnp.isfinite(value)
    kernel = net["kernel"] - jnp.where(finite, 0.1 * grad["kernel"], 0)
    skipped = jnp.where(finite, 0, opt["nonfinite"] + 1)
    step = opt["step"] + 1
    new = {
        "net": {"kernel": kernel, "age": net["age"] + 1},
        "opt": {"step": step, "nonfinite": skipped},
    }
    carry = {"total": carry["total"] + (batch["vector"] @ kernel).sum(1)}
    outputs = {"replay": {"stepid": batch["stepid"]}}
    metrics = {
        "loss": value,
        "opt/updates": step,
        "opt/nonfinite": skipped,
        "large": jnp.array(165_965_075, jnp.int32),
    }
    return new, carry, outputs, metrics


def report(state, carry, batch, seed):
    value = loss(state["net"], batch, 0.0)
    return carry, {"loss": value, "video": jnp.zeros((2, 3, 3, 3), jnp.uint8)}


def policy(params, carry, obs, seed, mode):
    """Sums products, with noise in mode `train`; the outputs hold the observation."""
    before = jnp.where(obs["is_first"][:, None], 0, carry["total"])
    seen = jnp.where(jnp.isfinite(obs["vector"]), obs["vector"], 0)
    total = before + seen @ params["kernel"]
    noise = jax.random.normal(jax.random.wrap_key_data(seed), total.shape)
    action = total + noise if mode == "train" else total
    outputs = {
        "seen": obs["vector"],
        "age": jnp.broadcast_to(params["age"], total.shape),
    }
    return {"total": total}, {"action": action}, outputs


ALGORITHM = Algorithm(
    init=init,
    carry=carry,
    train=train,
    report=report,
    policy_params=lambda state: state["net"],
    policy=policy,
    observations=OBSERVATIONS,
    batch_keys=KEYS,
    modes={"train": "train", "eval": "eval"},
)


def make_agent(**options) -> JaxAgent:
    return JaxAgent(ALGORITHM, AgentOptions(**{"compiler": QUICK, **options}))


def make_batch(seed: int = 0, rows: int = 8, steps: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "vector": rng.normal(size=(rows, steps, INPUTS)).astype(np.float32),
        "target": rng.normal(size=(rows, steps, UNITS)).astype(np.float32),
        "reward": rng.normal(size=(rows, steps)).astype(np.float32),
        "stepid": rng.integers(0, 256, (rows, steps, 20)).astype(np.uint8),
    }


def make_obs(rows: int, seed: int = 0, first: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "vector": rng.normal(size=(rows, INPUTS)).astype(np.float32),
        "is_first": np.full(rows, first),
    }


def kernel(agent: JaxAgent) -> np.ndarray:
    return agent.save()["params"]["net/kernel"]


def train(agent: JaxAgent, *batches: dict[str, np.ndarray]) -> tuple[dict, dict]:
    """Trains on batches; returns outputs and metrics of the last call."""
    carry = agent.init_train(len(batches[0]["reward"]))
    for batch in batches:
        carry, outputs, metrics = agent.train(carry, batch)
    return outputs, metrics


def train_rounds(agent: JaxAgent, rounds: int, rows: int = 8) -> dict[str, np.ndarray]:
    """Trains on numbered batches; returns the parameters and the last metrics.

    With several processes each takes its part of the same rows.
    """
    host, hosts = jax.process_index(), jax.process_count()
    mine = slice(host * rows // hosts, (host + 1) * rows // hosts)
    carry = agent.init_train(rows // hosts)
    for index in range(rounds):
        batch = {key: value[mine] for key, value in make_batch(index, rows).items()}
        carry, _, _ = agent.train(carry, batch)
    outputs, metrics = agent.flush()
    np.testing.assert_array_equal(outputs["replay"]["stepid"], batch["stepid"])
    return {**agent.save()["params"], **metrics}


def print_results(rows: int, agents: list[dict]) -> None:
    """Trains agents with the given options, and prints a line of JSON for each."""
    for options in agents:
        print(json.dumps(result_of(rows, options)), flush=True)


def result_of(rows: int, options: dict) -> dict:
    """Trains an agent with the given options; returns its results and devices."""
    agent = make_agent(**options)
    result = train_rounds(agent, 4, rows)
    obs = make_obs(3, first=True)
    agent.init_table(3)
    actions, _ = agent.policy_table([0, 1, 2], obs, "eval")
    carry, direct, _ = agent.policy(agent.init_policy(3), obs, "eval")
    kernel = agent._trainer._leaves[1]
    return {
        "kernel": result["net/kernel"].tolist(),
        "loss": float(result["loss"]),
        "actions": actions["action"].tolist(),
        "direct": direct["action"].tolist(),
        "spec": list(kernel.sharding.spec),
        "trained_on": len(kernel.sharding.device_set),
        "policy_on": sorted(device.id for device in carry["total"].devices()),
    }
