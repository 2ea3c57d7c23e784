"""Measures the view: first page, long curve, memory and idle load; or a dream.

    python -m benchmarks.view
    python -m benchmarks.view --dream      # Frames per second in a model of size12m.

A folder of 100 runs, one of which has 1,000,000 scores, is shown by a server of its
own; for a dream, a run that has just begun. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from dreamerv3.cli.config import FILENAME, load_config

ANSWER_SECONDS = 300.0  # Far more than any answer takes.
IDLE_SECONDS = 10.0
DREAM_STEPS = 100
RUN_STEPS = 200  # Too few for an update, which takes minutes to compile.


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="below the folder")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of one of them")
    parser.add_argument(
        "--dream", nargs="?", const="size12m", help="measure a dream in such a model"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="view-") as name:
        folder = pathlib.Path(name)
        if options.dream:
            print(json.dumps(measure_dream(folder / "run", options.dream)))
            return 0
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
    """Measures a server with the requests that a browser would make."""
    with served(folder) as (address, server):
        page, _ = timed(address)
        first, content = timed(f"{address}api/runs")
        runs = json.loads(content)
        (long,) = (run["id"] for run in runs if run["name"] == "run0")
        curve, content = timed(f"{address}api/series?run={long}")
        total = json.loads(content)[0]["total"]
        before = server.cpu_times()
        time.sleep(IDLE_SECONDS)
        after = server.cpu_times()
        used = after.user + after.system - before.user - before.system
        memory = server.memory_info().rss
    return {
        "runs": len(runs),
        "first_page_s": round(page + first, 2),
        "points": total,
        "long_curve_s": round(curve, 2),
        "memory_mb": round(memory / 1e6),
        "idle_cpu_percent": round(100 * used / IDLE_SECONDS, 1),
    }


def measure_dream(logdir: pathlib.Path, size: str) -> dict[str, Any]:
    """Measures a dream in which the policy plays as fast as frames come."""
    command = [sys.executable, "-m", "dreamerv3.main", "--script", "train"]
    command += ["--configs", size, "--task", "dummy_disc", "--logdir", str(logdir)]
    command += ["--run.steps", str(RUN_STEPS), "--logger.outputs", "jsonl"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with served(logdir) as (address, _):
        _, content = timed(f"{address}api/runs")
        (run,) = json.loads(content)
        start, content = timed(f"{address}api/dream", {"run": run["id"], "moment": 0.3})
        dream = f"{address}api/dream/{json.loads(content)['session']}"
        timed(dream, {"do": "start", "moment": 0.3})
        policy = {"do": "step", "policy": True}
        times = [timed(dream, policy)[0] for _ in range(DREAM_STEPS)]
    return {
        "size": size,
        "start_s": round(start, 1),
        "frames_per_s": round(DREAM_STEPS / sum(times), 1),
        "longest_frame_ms": round(1000 * max(times), 1),
    }


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serves a folder; yields the address of the view, and its process."""
    command = [sys.executable, "-m", "dreamerv3.main", "--script", "view"]
    command += ["--logdir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            yield address, psutil.Process(process.pid)
        finally:
            process.terminate()


def timed(address: str, body: dict[str, Any] | None = None) -> tuple[float, bytes]:
    """Returns how long an answer took, and its content."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if data else {}
    request = urllib.request.Request(address, data, headers)
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
        content = reply.read()
    return time.perf_counter() - begin, content


if __name__ == "__main__":
    sys.exit(main())
