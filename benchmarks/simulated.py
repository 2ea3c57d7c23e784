"""Measures learner duty on a simulated device: what everything else costs.

    python -m benchmarks.simulated --cases 512:16 32:64:4 32:16 [--beside]

Runs `embodied.run.parallel.combined` with dummy environments and an agent that
computes nothing: updates and policy steps take a given time each, one after the other,
as on one device, or with `--beside` at the same time. Batches, latents, actions and
metrics have the sizes of size12m, and take the same paths as in real runs. This shows,
on any machine, whether processes, transport and replay keep up with a device, and in
which cases policy steps are the limit. Prints one JSON object per case.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.end_to_end import WARMUP_LINES, add_cases, cases, mean, read_metrics
from dreamerv3.cli import factories
from dreamerv3.cli.config import load_config, make_args
from embodied import RandomAgent, streams
from embodied.base import Array, Spaces, Tree
from embodied.run.parallel import combined

DETER, STOCH = 2048, 32  # Sizes of latents.
CASES = [
    {"ratio": 512.0, "envs": 16, "per_worker": 1},
    {"ratio": 32.0, "envs": 64, "per_worker": 4},
    {"ratio": 32.0, "envs": 16, "per_worker": 1},
]
AHEAD = 2  # Batches that wait on the device.


class Clock:
    """A simulated device with a queue. `_lock` guards the time at which it is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = 0.0

    def queue(self, seconds: float) -> float:
        """Adds work to the queue; returns when it will be done."""
        with self._lock:
            self._free = max(time.monotonic(), self._free) + seconds
            return self._free


class ClockAgent(RandomAgent):
    """Takes as long as an agent on a device, with arrays of the same sizes.

    Args:
      obs_space: of the environments.
      act_space: of the environments.
      update: seconds of an update on the device.
      launch: seconds that the processor needs to queue an update.
      policy: seconds of a policy step on the device.
      beside: whether policy steps do not wait for updates.
    """

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        update: float,
        launch: float,
        policy: float,
        beside: bool = False,
    ):
        super().__init__(obs_space, act_space)
        self._seconds = {"update": update, "launch": launch, "policy": policy}
        self._clock = Clock()
        self._policy_clock = Clock() if beside else self._clock
        self._last: tuple[float, dict[str, Any]] | None = None

    def stream(self, source: Any) -> Iterator[dict[str, Array]]:
        """Copies batches ahead of their use, as if to a device."""

        def move(batch: Mapping[str, Array]) -> dict[str, Array]:
            return {key: np.array(value) for key, value in batch.items()}

        return streams.Prefetch(
            streams.Stateless(iter(source)), transform=move, amount=AHEAD
        )

    def train(self, carry: Tree, batch: Mapping[str, Array]) -> tuple[Tree, Any, Any]:
        """Queues an update and waits for the previous one."""
        done = self._clock.queue(self._seconds["update"])
        time.sleep(self._seconds["launch"])
        steps = np.asarray(batch["stepid"])[:, 1:]
        outputs = {"replay": {"stepid": steps, **latents(steps.shape[:2])}}
        last, self._last = self._last, (done, outputs)
        if last is None:
            return carry, {}, {}
        wait_until(last[0])
        return carry, last[1], {"loss": np.float32(0)}

    def policy(
        self, carry: Tree, obs: dict[str, Array], mode: str = "train"
    ) -> tuple[Tree, dict[str, Array], dict[str, Array]]:
        """Acts at random, once the device has done this step of its queue."""
        wait_until(self._policy_clock.queue(self._seconds["policy"]))
        carry, actions, _ = super().policy(carry, obs, mode)
        return carry, actions, latents((len(obs["is_first"]),))


def latents(lead: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns latents with the bytes, though not the dtypes, of an agent's."""
    return {
        "dyn/deter": np.zeros((*lead, DETER), np.uint16),
        "dyn/stoch": np.zeros((*lead, STOCH), np.uint8),
    }


def wait_until(moment: float) -> None:
    """Sleeps until a moment of the monotonic clock."""
    time.sleep(max(0.0, moment - time.monotonic()))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the cases that the arguments ask for."""
    options = parse(argv)
    for case in cases(options):
        print(json.dumps(measure(case)), flush=True)
    return 0


def measure(case: argparse.Namespace) -> dict[str, Any]:
    """Runs one case and returns its figures."""
    update, launch, policy = (
        1e-3 * value for value in (case.update, case.launch, case.policy)
    )
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        logdir = pathlib.Path(folder, "run")
        config = load_config(
            [
                *("--task", "dummy_disc", "--logdir", str(logdir)),
                *("--script", "parallel", "--logger.outputs", "jsonl"),
                *("--run.envs", str(case.envs), "--run.eval_envs", "0"),
                *("--run.envs_per_worker", str(case.per_worker)),
                *("--run.train_ratio", str(case.ratio), "--run.log_every", "2"),
                *("--run.duration", str(case.seconds), "--run.report_every", "0"),
                *("--run.save_every", "0", "--replay.size", "2e4"),
                *case.flags.split(),
            ]
        )
        spaces = factories.make_spaces(config)
        make_env = functools.partial(factories.make_env, config)
        make_replay = functools.partial(factories.make_replay, config)
        combined(
            lambda: ClockAgent(*spaces, update, launch, policy, case.beside),
            functools.partial(make_replay, "replay"),
            functools.partial(make_replay, "replay_eval", "eval"),
            make_env,
            make_env,
            functools.partial(factories.make_stream, config),
            functools.partial(factories.make_logger, config),
            make_args(config),
        )
        lines = read_metrics(logdir)
    busy = [line for line in lines if line.get("parallel/updates_per_second")]
    if len(busy) <= WARMUP_LINES + 1:
        raise RuntimeError(
            f"The run was over before its speed was known. Raise --seconds, which are "
            f"{case.seconds:g}."
        )
    updates = mean(busy[WARMUP_LINES:-1], "parallel/updates_per_second")
    return {
        "train_ratio": case.ratio,
        "envs": case.envs,
        "learner_duty": round(updates * update, 4),
        "updates_per_second": round(updates, 2),
        "env_steps_per_second": round(mean(lines[2 * WARMUP_LINES :], "fps/env"), 1),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_cases(parser, CASES, "what to measure")
    parser.add_argument("--update", type=float, default=14.8, help="milliseconds")
    parser.add_argument("--launch", type=float, default=5.5, help="milliseconds")
    parser.add_argument("--policy", type=float, default=0.5, help="milliseconds")
    parser.add_argument(
        "--beside", action="store_true", help="policy steps do not wait for updates"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--flags", default="", help="further flags of the runs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
