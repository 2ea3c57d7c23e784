"""Crafter's score, from the result of an evaluation.

    python -m dreamerv3.main --script eval_only --logdir logdir/crafter \\
        --env.crafter.logs True --run.eval_eps 100
    python -m benchmarks.crafter logdir/crafter/eval/STEP.json

An achievement's success rate is the share of episodes that reached it at least once.
The score is the geometric mean of 1 + rate in percent, less 1, so that rare
achievements count too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "log/achievement_"
WIDTH = 40  # Characters of a full bar.


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the success rates and the score."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=pathlib.Path, help="JSON file of eval_only")
    options = parser.parse_args(argv)
    result = json.loads(options.result.read_text())
    rates = success_rates(result)
    if not rates:
        parser.exit(
            1,
            f"{options.result}: expected keys {PREFIX}*, found none. Evaluate with "
            "--env.crafter.logs True, and at least one episode.\n",
        )
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        bar = "█" * round(WIDTH * rate / 100)
        print(f"{name:>24} {rate:5.1f}% {bar}")
    figures = {
        "step": result["step"],
        "episodes": result["episodes"],
        "score": round(score(rates), 2),
        "mean_reward": result["mean_score"],
        "reached": sum(rate > 0 for rate in rates.values()),
    }
    print(json.dumps(figures))
    return 0


def success_rates(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the percentage of episodes that reached each achievement, by name."""
    return {
        key.removeprefix(PREFIX): 100 * statistics.fmean(value > 0 for value in counts)
        for key, counts in result["largest"].items()
        if key.startswith(PREFIX)
    }


def score(rates: Mapping[str, float]) -> float:
    """Returns Crafter's score in percent, from success rates in percent."""
    return math.expm1(statistics.fmean(math.log1p(rate) for rate in rates.values()))


if __name__ == "__main__":
    sys.exit(main())
