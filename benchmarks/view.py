"""Measures the view: its first page, a long curve, memory, and what it does idly.

    python -m benchmarks.view

A folder of 100 runs, one of which has 1,000,000 scores, is shown by a server of its
own. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import psutil

from dreamerv3.cli.config import FILENAME, load_config

IDLE_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="below the folder")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of one of them")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="view-") as name:
        folder = pathlib.Path(name)
        load_config(["--logdir", name]).save(folder / FILENAME)
        config = (folder / FILENAME).read_text()
        (folder / FILENAME).unlink()
        for index in range(options.runs):
            rows = options.rows if index == 0 else 1000
            write_run(folder / f"run{index}", config, rows)
        print(json.dumps(measure(folder)))
    return 0


def write_run(folder: pathlib.Path, config: str, rows: int) -> None:
    """Writes the configuration and the scores of a run."""
    folder.mkdir()
    (folder / FILENAME).write_text(config)
    with (folder / "scores.jsonl").open("w") as file:
        for step in range(rows):
            file.write(f'{{"step": {step}, "episode/score": {step % 1000}}}\n')


def measure(folder: pathlib.Path) -> dict[str, Any]:
    """Asks a server for what a browser would ask for."""
    command = [sys.executable, "-m", "dreamerv3.main", "--script", "view"]
    command += ["--logdir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            page, _ = timed(address)
            first, content = timed(f"{address}api/runs")
            runs = json.loads(content)
            (long,) = (run["id"] for run in runs if run["name"] == "run0")
            curve, content = timed(f"{address}api/series?run={long}")
            total = json.loads(content)[0]["total"]
            server = psutil.Process(process.pid)
            before = server.cpu_times()
            time.sleep(IDLE_SECONDS)
            after = server.cpu_times()
            used = after.user + after.system - before.user - before.system
            memory = server.memory_info().rss
        finally:
            process.terminate()
    return {
        "runs": len(runs),
        "first_page_s": round(page + first, 2),
        "points": total,
        "long_curve_s": round(curve, 2),
        "memory_mb": round(memory / 1e6),
        "idle_cpu_percent": round(100 * used / IDLE_SECONDS, 1),
    }


def timed(address: str) -> tuple[float, bytes]:
    """Returns how long an answer took, and its content."""
    begin = time.perf_counter()
    with urllib.request.urlopen(address) as reply:
        content = reply.read()
    return time.perf_counter() - begin, content


if __name__ == "__main__":
    sys.exit(main())
