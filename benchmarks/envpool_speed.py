"""Measures env steps/s of Atari with a random agent: EnvPool, or a worker per env.

    python -m benchmarks.envpool_speed
    python -m benchmarks.envpool_speed --envs 64 --seconds 60

Whole parallel runs, with replay and logger. Both kinds have gray frames of 96 x 96,
four to a step, sticky actions and all 18 actions. Cases take turns. The last line is
one JSON object with the median of each.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

WARMUP_LINES = 2  # Metrics of the first seconds of a run are left out.


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--per-worker", type=int, default=4, help="of the third case")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    envs = options.envs
    cases = {
        "envpool": ("envpool_Pong-v5", envs),
        "a worker for each": ("atari_pong", 1),
        f"{options.per_worker} envs a worker": ("atari_pong", options.per_worker),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, (task, per_worker) in cases.items():
            rates[name].append(measure(task, envs, per_worker, options.seconds))
            print(f"{name}: {rates[name][-1]:.0f} env steps/s", flush=True)
    result = {name: round(statistics.median(found)) for name, found in rates.items()}
    print(json.dumps({"cores": os.cpu_count(), "envs": envs, **result}))
    return 0


def measure(task: str, envs: int, per_worker: int, seconds: float) -> float:
    """Returns the median env steps per second of a run, without its first lines."""
    with tempfile.TemporaryDirectory() as logdir:
        subprocess.run(
            [
                *(sys.executable, "-m", "dreamerv3.main", "--script", "parallel"),
                *("--task", task, "--random_agent", "True", "--logdir", logdir),
                *("--run.envs", str(envs), "--run.envs_per_worker", str(per_worker)),
                *("--run.eval_envs", "0", "--run.duration", str(seconds)),
                *("--run.log_every", "2", "--run.report_every", "0"),
                *("--run.save_every", "0", "--run.train_ratio", "0.01"),
                *("--replay.size", "1e4", "--logger.outputs", "jsonl"),
                *("--batch_size", "4", "--batch_length", "8", "--report_length", "8"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lines = pathlib.Path(logdir, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = [row["fps/env"] for row in rows if "fps/env" in row]
    return statistics.median(found[WARMUP_LINES:] or found)


if __name__ == "__main__":
    sys.exit(main())
