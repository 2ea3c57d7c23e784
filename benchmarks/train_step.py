"""Measures updates and policy steps of the agent, as runs make them.

    python -m benchmarks.train_step --size size12m [--batch 16] [--length 64]
        [--platform cuda] [--dtype bfloat16] [--flags "--jax.concurrent True"]
        [--cold] [--count-only] [--turn FILE]

Images of 64x64x3 and 17 discrete actions. Updates are calls of `agent.train` on one
batch that stays on the device; a policy step is a call of `agent.policy_table`, from
observations to actions and latents, all in host memory. The last line is JSON:

- ms_per_update, ms_per_policy: the best round of updates; the median policy step.
- model_tflop: operations of the matrix products and convolutions of an update.
- utilisation: their share of what the device can do in that time; null if unknown.
- peak_bytes: most memory in use on the device, by the client that trains.
- compile_seconds: of the update; short if it is in the persistent cache.
- parameters: of all networks that are trained.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

PEAK_FLOPS = {"NVIDIA H200": 790e12}  # In bfloat16, measured; by kind of device.
IMAGE, CLASSES = (64, 64, 3), 17
POLICY_STEPS, POLICY_WARMUP = 100, 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurements."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.cold:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        print(json.dumps(measure(options, folder)), flush=True)
    return 0


def measure(options: argparse.Namespace, logdir: str) -> dict[str, Any]:
    """Returns the figures."""
    import jax

    from dreamerv3 import agent as agents
    from dreamerv3 import model
    from dreamerv3.cli.config import load_config

    if options.unroll:
        loops = dict(zip(("scan", "imagine"), options.unroll))
        for name in ("CPU", "ACCELERATOR"):
            setattr(model, name, dataclasses.replace(getattr(model, name), **loops))
    config = load_config(
        [
            *("--configs", options.size, "--logdir", logdir),
            *("--jax.platform", options.platform),
            *("--jax.compute_dtype", options.dtype),
            *("--run.envs", str(options.envs), "--run.actor_batch", str(options.envs)),
            *options.flags.split(),
        ]
    )
    state = state_shapes(config)
    result: dict[str, Any] = {
        "size": options.size,
        "dtype": options.dtype,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.model)),
    }
    if options.count_only:
        return result
    agent = agents.Agent(*spaces(), config)
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {options.size}", flush=True)
    batch = make_batch(options, config.agent.dyn.rssm)
    flops = count_update(state, batch)
    update, result["compile_seconds"] = compile_update(agent, batch, options)
    agent.init_table(options.envs)
    with turn(options.turn):
        seconds = update_seconds(agent, update, options)
        result["ms_per_update"] = round(1e3 * seconds, 3)
        result["ms_per_policy"] = round(1e3 * policy_seconds(agent, options.envs), 3)
    result["model_tflop"] = round(flops / 1e12, 4)
    peak = PEAK_FLOPS.get(device.device_kind)
    result["utilisation"] = round(flops / seconds / peak, 4) if peak else None
    statistics = device.memory_stats() or {}
    result["peak_bytes"] = int(statistics.get("peak_bytes_in_use", 0))
    return result


def compile_update(
    agent: Any, batch: dict[str, np.ndarray], options: argparse.Namespace
) -> tuple[Callable[[], None], float]:
    """Returns a function that queues an update, and the seconds until the first."""
    placed = next(iter(agent.stream([batch])))
    carry = agent.init_train(options.batch)

    def update() -> None:
        nonlocal carry
        carry, _, _ = agent.train(carry, placed)

    started = time.perf_counter()
    update()
    return update, round(time.perf_counter() - started, 1)


def update_seconds(
    agent: Any, update: Callable[[], None], options: argparse.Namespace
) -> float:
    """Returns the seconds of an update, in the best round."""
    times = []
    for _ in range(options.repeats + 1):
        agent.flush()
        started = time.perf_counter()
        for _ in range(options.updates):
            update()
        agent.flush()
        times.append((time.perf_counter() - started) / options.updates)
    return min(times[1:])


@contextlib.contextmanager
def turn(path: str) -> Iterator[None]:
    """Waits until no other process with the same file measures; '' waits for none."""
    if not path:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # Until it is closed.
        yield


def policy_seconds(agent: Any, envs: int) -> float:
    """Returns the median time of a policy step."""
    rng = np.random.default_rng(0)
    obs = {
        "image": rng.integers(0, 255, (envs, *IMAGE), np.uint8),
        "is_first": np.zeros(envs, bool),
    }
    times = []
    for _ in range(POLICY_STEPS):
        started = time.perf_counter()
        agent.policy_table(np.arange(envs), obs)
        times.append(time.perf_counter() - started)
    return float(np.median(times[POLICY_WARMUP:]))


def state_shapes(config: Any) -> Any:
    """Returns the shapes and dtypes of the agent's state, without its values."""
    import jax

    from dreamerv3 import model

    def init() -> model.State:
        # The key is made here, since a real one would initialise JAX before `setup`.
        return model.init(jax.random.key(0), *spaces(), config.agent)

    return jax.eval_shape(init)


def count_update(state: Any, batch: dict[str, np.ndarray]) -> int:
    """Returns the operations of an update."""
    import jax

    from benchmarks.flops import count_flops
    from dreamerv3.model import init_carry
    from dreamerv3.training import train_step

    rows = len(batch["is_first"])
    carry = jax.eval_shape(lambda: init_carry(state.model, rows))
    seed = jax.ShapeDtypeStruct((2,), np.uint32)
    return count_flops(train_step, state, carry, batch, seed)


def spaces() -> tuple[dict, dict]:
    """Returns the spaces of the task that is measured."""
    from embodied import Space
    from embodied.envs.keys import SIGNALS

    obs = {"image": Space(np.uint8, IMAGE), **SIGNALS}
    return obs, {"reset": Space(bool), "action": Space(np.int32, (), 0, CLASSES)}


def make_batch(options: argparse.Namespace, rssm: Any) -> dict[str, np.ndarray]:
    """Returns a batch like those of the replay, with one step of context."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    lead = (options.batch, options.length + 1)
    deter = np.zeros((options.batch, 1, rssm.deter))
    wide = ml_dtypes.bfloat16 if options.dtype == "bfloat16" else np.float32
    return {
        "image": rng.integers(0, 255, (*lead, *IMAGE), np.uint8),
        "reward": rng.standard_normal(lead).astype(np.float32),
        "is_first": np.zeros(lead, bool),
        "is_last": np.zeros(lead, bool),
        "is_terminal": np.zeros(lead, bool),
        "action": rng.integers(0, CLASSES, lead, np.int32),
        "consec": np.zeros(lead, np.int32),
        "stepid": np.zeros((*lead, 20), np.uint8),
        "dyn/deter": deter.astype(wide),
        "dyn/stoch": np.zeros((options.batch, 1, rssm.stoch), np.uint8),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="size12m", help="block with the model's size")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=64, help="their steps")
    parser.add_argument("--envs", type=int, default=16, help="rows of a policy step")
    parser.add_argument("--platform", default="auto", help="kind of device")
    parser.add_argument(
        "--dtype", default="bfloat16", help="the CPU supports only float32"
    )
    parser.add_argument("--flags", default="", help="further flags of the agent")
    parser.add_argument(
        "--unroll",
        type=int,
        nargs=2,
        metavar=("SCAN", "IMAGINE"),
        help="steps per iteration of the loops over time; default: as in runs",
    )
    parser.add_argument("--updates", type=int, default=20, help="of a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument(
        "--turn",
        default="",
        help="a file; processes that name it measure in turns, while others compile",
    )
    parser.add_argument("--cold", action="store_true", help="compile without the cache")
    parser.add_argument(
        "--count-only", action="store_true", help="count parameters, and no more"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
