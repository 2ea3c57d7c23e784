"""What the command line says to people: notes on the way, and a summary at the end."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

import elements

from embodied.logger import TensorBoardOutput

if TYPE_CHECKING:
    from dreamerv3.rollout import Result as RolloutResult
    from embodied.run import Result as TrainResult


def summary(config: elements.Config, result: RolloutResult | TrainResult) -> str:
    """Says what was done, and what lies where in the logdir."""
    from embodied.run.collecting import RECENT

    rate = result.steps / result.seconds if result.seconds else 0.0
    updates = getattr(result, "updates", None)  # A rollout makes none.
    few = "" if updates is None else f" of the last {min(RECENT, result.episodes)}:"
    score = (
        ""
        if result.mean_score is None
        else f", mean score{few} {result.mean_score:.3g}"
    )
    trained = "" if updates is None else f" and {updates} updates"
    step = getattr(result, "step", result.steps)  # It counts earlier calls too.
    total = "" if step == result.steps else f", now at step {step}"
    line = (
        f"{result.steps} steps{trained} in {result.seconds:.1f} s "
        f"({rate:.0f} steps/s), {result.episodes} episodes{score}{total}."
    )
    return "\n".join([line, *files(config, updates is not None)])


def parallel_summary(config: elements.Config, seconds: float) -> str:
    """Says what a parallel run has done, and what lies where in the logdir."""
    from embodied.checkpoint import Checkpoint
    from embodied.run.collecting import RECENT

    line = f"Done in {seconds:.0f} s"
    saved = Checkpoint(config.logdir).last()
    if saved is not None:
        line += f", at step {saved.meta.get('step', 0)}"
    path = pathlib.Path(config.logdir, "scores.jsonl")
    if path.exists():
        rows = [json.loads(row) for row in path.read_text().splitlines()]
        scores = [row.get("episode/score") for row in rows]
        # Without those that are not numbers, of rewards that are not.
        scores = [score for score in scores if score is not None]
        if scores:
            newest = scores[-RECENT:]
            mean = sum(newest) / len(newest)
            line += f", mean score of the last {len(newest)} episodes {mean:.3g}"
    return "\n".join([f"{line}.", *files(config, trained=True)])


def files(config: elements.Config, trained: bool) -> list[str]:
    """Says what lies where in the logdir."""
    logdir, outputs = config.logdir, config.logger.outputs
    lines = [
        f"Written to {logdir}:",
        "  config.yaml     the configuration",
    ]
    if "jsonl" in outputs:
        lines.append("  metrics.jsonl   all metrics, a JSON object per line")
        lines.append("  scores.jsonl    the score of every episode")
    if "tensorboard" in outputs and TensorBoardOutput.available():
        lines.append(
            f"  events.*        curves and videos: tensorboard --logdir {logdir}"
        )
    if "scope" in outputs:
        lines.append("  scope           metrics and videos for Scope")
    if trained:
        play = f"--script eval_only --logdir {logdir}"
        lines.append(
            "  ckpt, replay    the policy and its training: the same command goes on,"
        )
        lines.append(f"                  and {play} plays it")
    return lines
