"""Watches memory, descriptors and threads of the roles of a long parallel run.

    python -m benchmarks.soak --minutes 60 --out docs/results/soak.jsonl

The file has one line for each role and half minute. At the end a straight line is
fitted to the second half of each curve, and its rise per hour is printed. The last line
of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

EVERY = 30.0  # Seconds between measurements.
MEASURES = ("rss_mb", "files", "threads")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, watches, and prints the slopes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", default="", help="where to write what was seen")
    parser.add_argument("--flags", default="", help="further flags of the run")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        looks = watch(folder, options.minutes * 60, options.flags.split())
    if options.out:
        lines = [json.dumps(look) for look in looks]
        pathlib.Path(options.out).write_text("\n".join(lines) + "\n")
    result = slopes(looks)
    for role, values in result.items():
        print(f"{role:>8}: {values}")
    print(json.dumps({"minutes": options.minutes, "rise_per_hour": result}))
    return 0


def watch(folder: str, seconds: float, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the whole system and measures its processes at intervals."""
    command = [sys.executable, "-m", "dreamerv3.main", "--configs", "debug"]
    command += ["--script", "parallel", "--task", "dummy_disc", "--logdir", folder]
    command += ["--run.envs", "4", "--run.eval_envs", "1", "--run.save_every", "60"]
    command += ["--run.report_every", "60", "--run.log_every", "10"]
    # Small, so that the replay is full, and stops growing, after the warm-up.
    command += ["--replay.size", "2000", "--logger.outputs", "jsonl", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    looks: list[dict[str, Any]] = []
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + seconds:
            time.sleep(EVERY)
            if process.poll() is not None:
                raise RuntimeError(f"The run ended with code {process.returncode}.")
            looks += look(process.pid, time.monotonic() - begin)
            print(f"{(time.monotonic() - begin) / 60:6.1f} min", flush=True)
    finally:
        process.terminate()
        process.wait(120)
    return looks


def look(pid: int, seconds: float) -> list[dict[str, Any]]:
    """Returns what every role uses now; env workers are one role."""
    totals: dict[str, collections.Counter[str]] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            name = "agent" if process.pid == pid else process.cmdline()[-1]
            role = "env" if name.startswith("env-") else name
            values = {
                "rss_mb": process.memory_info().rss / 2**20,
                "files": process.num_fds(),
                "threads": process.num_threads(),
                "processes": 1,
            }
        except (psutil.Error, IndexError):
            continue  # The process has ended meanwhile.
        totals.setdefault(role, collections.Counter()).update(values)
    return [{"seconds": round(seconds, 1), "role": r, **t} for r, t in totals.items()]


def slopes(looks: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns level and rise per hour of every measure, over the second half."""
    result: dict[str, dict[str, float]] = {}
    middle = max(entry["seconds"] for entry in looks) / 2
    for role in sorted({entry["role"] for entry in looks}):
        rows = [x for x in looks if x["role"] == role and x["seconds"] >= middle]
        if len(rows) < 3:
            continue
        hours = np.array([row["seconds"] for row in rows]) / 3600
        result[role] = {}
        for measure in MEASURES:
            values = np.array([row[measure] for row in rows], float)
            rise = np.polyfit(hours, values, 1)[0]
            result[role][measure] = round(float(values.mean()), 1)
            result[role][f"{measure}_rise"] = round(float(rise), 2)
    return result


if __name__ == "__main__":
    sys.exit(main())
