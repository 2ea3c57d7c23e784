"""What the command line says to people: notes on the way, and a summary at the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import elements

if TYPE_CHECKING:
    from dreamerv3.rollout import Result as RolloutResult
    from embodied.run import Result as TrainResult


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Through `print`, since a live display redirects it to above itself.
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        print(f"{kind}{record.getMessage()}", flush=True)


@contextlib.contextmanager
def show_messages() -> Iterator[None]:
    """Prints what the framework logs, from notes on, within the body."""
    log = logging.getLogger("embodied")
    printer, level = _Printer(), log.level
    log.addHandler(printer)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(printer)


def summary(config: elements.Config, result: RolloutResult | TrainResult) -> str:
    """Says what was done, and what lies where in the logdir."""
    rate = result.steps / result.seconds if result.seconds else 0.0
    score = "" if result.mean_score is None else f", mean score {result.mean_score:.3g}"
    updates = getattr(result, "updates", None)  # A rollout makes none.
    trained = "" if updates is None else f" and {updates} updates"
    step = getattr(result, "step", result.steps)  # It counts earlier calls too.
    total = "" if step == result.steps else f", now at step {step}"
    logdir, outputs = config.logdir, config.logger.outputs
    lines = [
        f"{result.steps} steps{trained} in {result.seconds:.1f} s "
        f"({rate:.0f} steps/s), {result.episodes} episodes{score}{total}.",
        f"Written to {logdir}:",
        "  config.yaml     the configuration",
    ]
    if "jsonl" in outputs:
        lines.append("  metrics.jsonl   all metrics, a JSON object per line")
        lines.append("  scores.jsonl    the score of every episode")
    if "tensorboard" in outputs:
        lines.append(
            f"  events.*        curves and videos: tensorboard --logdir {logdir}"
        )
    if "scope" in outputs:
        lines.append("  scope           metrics and videos for Scope")
    if updates is not None:
        lines.append("  ckpt, replay    the checkpoint: the same command continues")
        play = f"--script eval_only --logdir {logdir}"
        lines.append(f"  ckpt            the policy, which {play} plays")
    return "\n".join(lines)
