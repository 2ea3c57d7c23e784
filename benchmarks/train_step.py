"""Measures one update and one policy step of the agent.

    python -m benchmarks.train_step --size size12m [--batch 16] [--length 64]
        [--platform cuda] [--dtype bfloat16] [--unroll 1 1] [--count-only]

Images of 64x64x3 and 17 discrete actions, a batch that stays on the device. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from typing import Any

import numpy as np


def main() -> None:
    """Runs the measurements."""
    options = parse()
    if options.platform:
        os.environ["JAX_PLATFORMS"] = options.platform
    import jax

    from benchmarks.flops import count_flops
    from dreamerv3 import model as models
    from dreamerv3.config import load_config
    from dreamerv3.training import train_step

    config = load_config(["--configs", options.size])
    obs_space, act_space = spaces()
    result: dict[str, Any] = {"size": options.size, "dtype": options.dtype}
    init = partial(
        models.init,
        obs_space=obs_space,
        act_space=act_space,
        config=config.agent,
        compute_dtype=options.dtype,
        unroll={"scan": options.unroll[0], "imagine": options.unroll[1]},
    )
    shapes = jax.eval_shape(init, jax.random.key(0))
    leaves = jax.tree.leaves(shapes.model)
    result["parameters"] = int(sum(np.prod(leaf.shape) for leaf in leaves))
    if options.count_only:
        print(json.dumps(result))
        return

    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {options.size}", flush=True)
    batch = jax.device_put(make_batch(options, config.agent.dyn.rssm), device)
    state = jax.jit(init)(jax.random.key(0))
    carry = models.init_carry(state.model, options.batch)
    seed = jax.random.key_data(jax.random.key(1))
    flops = count_flops(train_step, state, carry, batch, seed)
    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    started = time.perf_counter()
    step = jitted.lower(state, carry, batch, seed).compile()
    result["compile_seconds"] = round(time.perf_counter() - started, 1)
    print(f"compiled in {result['compile_seconds']} s", flush=True)

    times = []
    for _ in range(options.repeats + 1):
        started = time.perf_counter()
        for _ in range(options.updates):
            state, carry, outputs, metrics = step(state, carry, batch, seed)
        jax.block_until_ready((state, outputs, metrics))
        times.append((time.perf_counter() - started) / options.updates)
    result["ms_per_update"] = round(1e3 * min(times[1:]), 3)
    result["loss"] = float(metrics["opt/loss"])
    result["model_tflop"] = round(flops / 1e12, 4)
    rate = flops / min(times[1:])
    result["utilisation"] = round(rate / PEAK_FLOPS, 4)
    statistics = device.memory_stats() or {}
    result["peak_bytes"] = int(statistics.get("peak_bytes_in_use", 0))
    result["ms_per_policy"] = round(1e3 * policy_seconds(state, options), 3)
    print(json.dumps(result))


PEAK_FLOPS = 790e12  # Of an H200 in bfloat16, measured.


def policy_seconds(state: Any, options: argparse.Namespace) -> float:
    """Median time of one policy step, from host observations to host actions."""
    import jax

    from dreamerv3 import model as models

    # As the actor does it: parameters are a list, which is quicker to pass.
    leaves, tree = jax.tree.flatten(jax.jit(models.policy_params)(state.model))
    carry = models.init_carry(state.model, options.envs)

    @partial(jax.jit, donate_argnums=(1,))
    def step(leaves: list, *arguments: Any) -> Any:
        return models.policy(jax.tree.unflatten(tree, leaves), *arguments)

    rng = np.random.default_rng(0)
    obs = {
        "image": rng.integers(0, 255, (options.envs, 64, 64, 3), np.uint8),
        "is_first": np.zeros(options.envs, bool),
    }
    times = []
    for index in range(100):
        started = time.perf_counter()
        seed = np.array([0, index], np.uint32)
        carry, actions, _ = step(leaves, carry, obs, seed)
        jax.device_get(actions)
        times.append(time.perf_counter() - started)
    return float(np.median(times[20:]))


def spaces() -> tuple[dict, dict]:
    """Spaces of the task that is measured."""
    from embodied import Space
    from embodied.envs.keys import SIGNALS

    obs = {"image": Space(np.uint8, (64, 64, 3)), **SIGNALS}
    return obs, {"reset": Space(bool), "action": Space(np.int32, (), 0, 17)}


def make_batch(options: argparse.Namespace, rssm: Any) -> dict[str, np.ndarray]:
    """A batch as the replay gives it, with one step of context."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    lead = (options.batch, options.length + 1)
    deter = np.zeros((options.batch, 1, rssm.deter))
    wide = ml_dtypes.bfloat16 if options.dtype == "bfloat16" else np.float32
    return {
        "image": rng.integers(0, 255, (*lead, 64, 64, 3), np.uint8),
        "reward": rng.standard_normal(lead).astype(np.float32),
        "is_first": np.zeros(lead, bool),
        "is_last": np.zeros(lead, bool),
        "is_terminal": np.zeros(lead, bool),
        "action": rng.integers(0, 17, lead, np.int32),
        "consec": np.zeros(lead, np.int32),
        "stepid": np.zeros((*lead, 20), np.uint8),
        "dyn/deter": deter.astype(wide),
        "dyn/stoch": np.zeros((options.batch, 1, rssm.stoch), np.uint8),
    }


def parse() -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="size12m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--platform", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--unroll", type=int, nargs=2, default=[1, 1])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count-only", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
