"""Measures whole parallel runs: env steps, updates, and how busy the learner is.

    python -m benchmarks.end_to_end                            # Two cores, no device.
    python -m benchmarks.end_to_end --duty --ratio 512 --envs 16     # One accelerator.
    python -m benchmarks.end_to_end --duty --cases 512:16 32:64:4    # Several of them.
    python -m benchmarks.end_to_end --view               # With the view, and without.

Without `--duty` and `--view`: a random agent and dummy environments, over our transport
and over portal. With `--duty`: learner duty, which is updates per second of a run,
divided by those of a bare loop of `agent.train` on one batch that stays on the device.
With `--view`: env steps with and without `--run.view True`, in turns. The last line is
one JSON object; with `--cases` there is one for each.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

BARE_SECONDS = 15.0
BOTTLENECK = re.compile(r"Bottleneck: (.*)")  # In the output of a run.
Case = dict[str, Any]  # Options by name.

WARMUP_LINES = 2  # Metrics of the first seconds of a run are left out.


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the arguments ask for."""
    options = parse(argv)
    if options.bare:
        print(json.dumps({"updates_per_second": bare_loop(options)}))
        return 0
    if options.duty:
        measure_duty(options)
    elif options.view:
        print(json.dumps(measure_view(options)))
    else:
        print(json.dumps(measure_random(options)))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--duty", action="store_true", help="measure learner duty")
    parser.add_argument(
        "--view", type=int, nargs="?", const=3, default=0, help="turns, by default 3"
    )
    parser.add_argument(
        "--bare", action="store_true", help="measure the bare loop only"
    )
    parser.add_argument("--size", default="size12m", help="block with the model's size")
    parser.add_argument("--task", default="dummy_disc", help="of the environments")
    parser.add_argument("--envs", type=int, default=16, help="training environments")
    parser.add_argument("--per-worker", type=int, default=1, help="envs of a worker")
    parser.add_argument(
        "--ratio",
        type=float,
        default=None,
        help="train ratio; default: 32 for duty, else 1, so that collecting counts",
    )
    add_cases(parser, (), "for --duty, instead of --ratio, --envs and --per-worker")
    parser.add_argument("--seconds", type=float, default=0.0, help="length of a run")
    parser.add_argument("--flags", default="", help="further flags of the run")
    options = parser.parse_args(argv)
    if options.cases and not options.duty:
        parser.error("--cases is for --duty")
    if options.ratio is None:
        options.ratio = 32.0 if options.duty else 1.0
    return options


def measure_random(options: argparse.Namespace) -> dict[str, Any]:
    """Compares env steps per second over our transport and over portal."""
    seconds = options.seconds or 20.0
    results = {}
    for transport in ("portal", "zmq"):
        flags = ["--random_agent", "True", "--run.transport", transport]
        results[transport] = run(options, flags, seconds)
        print(f"{transport:>7}: {describe(results[transport])}", flush=True)
    ours, portal = results["zmq"], results["portal"]
    return {
        "env_steps_ratio": round(ours["env_steps"] / portal["env_steps"], 2),
        "env_steps_per_second": round(ours["env_steps"], 1),
        "portal_env_steps_per_second": round(portal["env_steps"], 1),
        "learner_duty": None,  # A random agent has no updates that take time.
        "updates_per_second": round(ours["updates"], 2),
        "infrastructure_cpu_percent": round(ours["cpu"], 1),
    }


def measure_view(options: argparse.Namespace) -> dict[str, Any]:
    """Compares env steps per second with and without the view beside a run."""
    seconds = options.seconds or 20.0
    steps: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(options.view):
        # In alternating order, since the load of the machine may change in between.
        for shown in (False, True) if turn % 2 else (True, False):
            flags = ["--random_agent", "True", "--run.view", str(shown)]
            result = run(options, flags, seconds)
            steps[shown].append(result["env_steps"])
            print(f"view {shown!s:>5}: {describe(result)}", flush=True)
    without, beside = (statistics.median(steps[shown]) for shown in (False, True))
    return {
        "env_steps_ratio": round(beside / without, 3),
        "env_steps_per_second": {
            "without": [round(x, 1) for x in steps[False]],
            "with": [round(x, 1) for x in steps[True]],
        },
    }


def measure_duty(options: argparse.Namespace) -> None:
    """Prints updates per second of runs, divided by those of the bare loop."""
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--bare"]
    command += ["--size", options.size, "--task", options.task]
    command += ["--flags", options.flags]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    bare = json.loads(output.splitlines()[-1])["updates_per_second"]
    print(f"bare loop: {bare:.2f} updates/s", flush=True)
    for case in cases(options):
        result = run(case, ["--configs", case.size], case.seconds or 120.0)
        print(f"  the run: {describe(result)}", flush=True)
        figures = {
            "train_ratio": case.ratio,
            "envs": case.envs,
            "env_steps_ratio": None,  # Only our transport is measured here.
            "learner_duty": round(result["updates"] / bare, 4),
            "updates_per_second": round(result["updates"], 2),
            "bare_updates_per_second": round(bare, 2),
            "env_steps_per_second": round(result["env_steps"], 1),
            "infrastructure_cpu_percent": round(result["cpu"], 1),
            "bottleneck": result["bottleneck"],
        }
        print(json.dumps(figures), flush=True)


def add_cases(
    parser: argparse.ArgumentParser, default: Sequence[Case], text: str
) -> None:
    """Adds the flag `--cases`."""
    parser.add_argument(
        "--cases",
        nargs="+",
        type=_case,
        default=default,
        metavar="RATIO:ENVS[:PER_WORKER]",
        help=text,
    )


def cases(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yields the options of each case."""
    if not options.cases:
        yield options
    for case in options.cases:
        yield argparse.Namespace(**{**vars(options), **case})


def _case(text: str) -> Case:
    try:
        ratio, envs, per_worker = [*text.split(":"), "1"][:3]
        case = {"ratio": float(ratio), "envs": int(envs), "per_worker": int(per_worker)}
    except ValueError:
        case = {}
    if text.count(":") > 2 or not case or min(case["envs"], case["per_worker"]) < 1:
        raise argparse.ArgumentTypeError(
            f"expected RATIO:ENVS or RATIO:ENVS:PER_WORKER, got {text!r}"
        )
    return case


def run(
    options: argparse.Namespace, flags: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Runs `--script parallel` for some seconds after its first update."""
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        logdir = pathlib.Path(folder, "run")
        command = [sys.executable, "-m", "dreamerv3.main", *flags]
        command += ["--script", "parallel", "--task", options.task]
        command += ["--logdir", str(logdir), "--logger.outputs", "jsonl"]
        command += ["--run.envs", str(options.envs), "--run.eval_envs", "0"]
        command += ["--run.envs_per_worker", str(options.per_worker)]
        command += ["--run.train_ratio", str(options.ratio)]
        command += ["--run.log_every", "2", "--run.report_every", "0"]
        command += ["--run.save_every", "0", "--replay.size", "1e5"]
        command += options.flags.split()
        told = pathlib.Path(folder, "told")
        with told.open("wb") as output:
            process = subprocess.Popen(command, stdout=output)
        try:
            _wait_for_updates(logdir, process)
            usage = _Usage(process.pid)
            before = len(read_metrics(logdir))
            time.sleep(seconds)
            cpu = usage.percent()
            # Not the last metrics of the run, which are about a time without updates.
            lines = read_metrics(logdir)[before + WARMUP_LINES :]
            bottlenecks = BOTTLENECK.findall(told.read_text())
        finally:
            process.terminate()
            process.wait(120)
    return {
        "env_steps": mean(lines, "fps/env"),
        "updates": mean(lines, "parallel/updates_per_second"),
        "cpu": cpu,
        "bottleneck": bottlenecks[-1] if bottlenecks else "",
    }


def describe(result: dict[str, Any]) -> str:
    """Returns the figures of a run as a line."""
    return (
        f"{result['env_steps']:.0f} env steps/s, {result['updates']:.2f} updates/s, "
        f"{result['cpu']:.0f}% of a core for all but the envs; {result['bottleneck']}"
    )


def read_metrics(logdir: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the metrics that were written so far."""
    path = logdir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    """Returns the mean of a metric."""
    values = [line[key] for line in lines if key in line]
    return statistics.fmean(values) if values else 0.0


def bare_loop(options: argparse.Namespace) -> float:
    """Returns updates per second on one batch that stays on the device."""
    from dreamerv3.cli.config import load_config
    from dreamerv3.main import make_agent, make_env, make_replay, make_stream
    from embodied import Driver

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            [
                *("--configs", options.size, "--task", options.task),
                *("--logdir", folder, *options.flags.split()),
            ]
        )
        agent, replay = make_agent(config), make_replay(config, "replay")
        with Driver([lambda: make_env(config, 0)] * 4, parallel=False) as driver:
            driver.on_step(replay.add)
            driver.reset(agent.init_policy)
            driver(agent.policy, steps=8 * config.batch_length)
        batch = next(iter(agent.stream(make_stream(config, replay, "train"))))
    carry = agent.init_train(config.batch_size)
    for _ in range(5):
        carry, _, _ = agent.train(carry, batch)
    agent.flush()
    begin, updates = time.monotonic(), 0
    while time.monotonic() < begin + BARE_SECONDS:
        carry, _, _ = agent.train(carry, batch)
        updates += 1
    agent.flush()
    return updates / (time.monotonic() - begin)


class _Usage:
    """Processor time of a run's processes, without its env workers."""

    def __init__(self, pid: int):
        self._pid = pid
        self._begin = time.monotonic()
        self._before = self._seconds()

    def percent(self) -> float:
        """Returns the processor time since the start, in percent of one core."""
        spent = self._seconds() - self._before
        return 100 * spent / (time.monotonic() - self._begin)

    def _seconds(self) -> float:
        total = 0.0
        root = psutil.Process(self._pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                if process.cmdline()[-1].startswith("env-"):
                    continue
                times = process.cpu_times()
            except (psutil.Error, IndexError):
                continue
            total += times.user + times.system
        return total


def _wait_for_updates(logdir: pathlib.Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"The run ended with exit code {process.returncode}.")
        if mean(read_metrics(logdir), "parallel/updates_per_second") > 0:
            return
        time.sleep(0.5)
    raise TimeoutError("The run made no update within 500 s.")


if __name__ == "__main__":
    sys.exit(main())
