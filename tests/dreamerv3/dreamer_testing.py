"""Agents with tiny networks, created as the programs create them."""

from __future__ import annotations

import agent_testing as testing
import jax
import numpy as np

from dreamerv3.agent import Agent
from dreamerv3.cli.config import load_config

QUICK = testing.QUICK


def make_config(*argv: str):
    sizes = testing.rssm_flags(deter=16, hidden=6, stoch=3, classes=4, blocks=4)
    context = ["--replay_context", str(testing.CONTEXT), "--agent.imag_length", "3"]
    return load_config(["--configs", "debug", *sizes, *context, *argv], {})


def make_agent(*argv: str) -> Agent:
    config = make_config(*argv)
    return Agent(testing.OBS_SPACE, testing.ACT_SPACE, config, compiler=QUICK)


def make_obs(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "vector": rng.normal(size=(rows, 3)).astype(np.float32),
        "token": rng.integers(0, 4, rows),
        "is_first": np.ones(rows, bool),
        "reward": np.zeros(rows, np.float32),
    }


def train_rounds(agent: Agent, rounds: int, rows: int) -> dict[str, np.ndarray]:
    """Trains on numbered batches; returns parameters, metrics and outputs by name.

    With several processes each takes its part of the same rows. All batches after the
    first continue their sequences, from the carry.
    """
    host, hosts = jax.process_index(), jax.process_count()
    mine = slice(host * rows // hosts, (host + 1) * rows // hosts)
    carry = agent.init_train(rows // hosts)
    for index in range(rounds):
        batch = testing.make_batch(index, batch=rows)
        batch["consec"] = np.full_like(batch["consec"], index)
        carry, _, _ = agent.train(carry, {key: x[mine] for key, x in batch.items()})
    outputs, metrics = agent.flush()
    parts = {
        "params": agent.save()["params"],
        "metrics": metrics,
        "replay": outputs["replay"],
    }
    return {f"{part}:{key}": x for part in parts for key, x in parts[part].items()}
