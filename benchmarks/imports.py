"""Measures how long a user waits for `import embodied` and for `--help`.

    python -m benchmarks.imports [--rounds 9]

Each figure is the median over fresh processes, from start to exit, so the start of the
interpreter is part of it. The baselines, an interpreter that does nothing and one that
imports NumPy, take turns with them, so that a noisy machine disturbs all alike.
Processor time is printed beside clock time, since other load does not stretch it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

TARGET_SECONDS = 0.5
LIMIT_SECONDS = 60.0  # For one process; more is a hang.

COMMANDS = {
    "python": ("-c", "pass"),
    "import_numpy": ("-c", "import numpy"),
    "import_embodied": ("-c", "import embodied"),
    "help": ("-m", "dreamerv3.main", "--help"),
}
OURS = ("import_embodied", "help")


def main() -> None:
    """Runs all measurements and prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="processes of each kind")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {rounds}")
    for arguments in COMMANDS.values():
        run(arguments)  # Writes the bytecode of modules, which users have too.
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            samples[name].append(run(arguments))

    print(f"{'':<34} {'clock':>9} {'processor':>11}")
    result: dict[str, float | bool] = {}
    for name, arguments in COMMANDS.items():
        clock, processor = map(statistics.median, zip(*samples[name]))
        shown = " ".join(("python", *arguments))
        print(f"{shown:<34} {clock:>7.3f} s {processor:>9.3f} s")
        result[f"{name}_seconds"] = round(clock, 3)
        result[f"{name}_processor_seconds"] = round(processor, 3)
    for name in OURS:
        ratios = [
            ours / numpy
            for (ours, _), (numpy, _) in zip(samples[name], samples["import_numpy"])
        ]
        result[f"{name}_over_numpy"] = round(statistics.median(ratios), 2)
    result["target_seconds"] = TARGET_SECONDS
    result["target_met"] = all(
        result[f"{name}_seconds"] < TARGET_SECONDS for name in OURS
    )
    print(json.dumps(result))


def run(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Runs Python with arguments; returns its seconds on the clock and processor."""
    before = _processor_seconds()
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    return time.perf_counter() - start, _processor_seconds() - before


def _processor_seconds() -> float:
    """Returns the processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
