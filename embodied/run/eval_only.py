"""Evaluates an agent from a checkpoint, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

from embodied.base import Agent
from embodied.checkpoint import CheckpointError
from embodied.clock import LocalClock
from embodied.episodes import Episodes
from embodied.run.collecting import MakeEnv, make_driver
from embodied.run.evaluation import Evaluator
from embodied.run.metrics import Meter, Usage
from embodied.run.progress import Limit
from embodied.run.saving import load_agent
from embodied.run.signals import stop_on_signals

CONFIDENCE = statistics.NormalDist().inv_cdf(0.975)  # In standard errors, for 95%.


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation has found.

    Attributes:
      step: at which the agent was saved.
      scores: of all episodes.
      lengths: of all episodes, in actions.
      wanted: number of episodes that were to be played.
    """

    step: int
    scores: tuple[float, ...]
    lengths: tuple[float, ...]
    wanted: int

    @property
    def mean_score(self) -> float | None:
        """The mean score; None if no episode was finished."""
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def margin(self) -> float | None:
        """Half the width of the 95% confidence interval of the mean score.

        From the normal approximation; None for fewer than two episodes.
        """
        if len(self.scores) < 2:
            return None
        error = statistics.stdev(self.scores) / math.sqrt(len(self.scores))
        return CONFIDENCE * error

    def __str__(self) -> str:
        count, mean, margin = len(self.scores), self.mean_score, self.margin
        if mean is None:
            return f"No episode was finished (of {self.wanted})."
        episodes = f"{count} episode{'s' if count > 1 else ''}"
        if count < self.wanted:
            episodes += f" (of {self.wanted}, so that short ones count too much)"
        text = f"{episodes} of the agent of step {self.step}: mean score {mean:.4g}"
        if margin is not None:
            low, high = mean - margin, mean + margin
            text += f" (95% confidence interval {low:.4g} to {high:.4g})"
        return f"{text}, mean length {statistics.fmean(self.lengths):.4g}."


def eval_only(
    make_agent: Callable[[], Agent],
    make_env: MakeEnv,
    make_logger: Callable[[], Any],
    args: Any,
) -> Evaluation:
    """Plays episodes with the agent of `args.from_checkpoint`, and prints the score.

    `args.eval_eps` episodes are played in `args.envs` environments, but at least one in
    each. `args.steps`, `args.duration`, Ctrl-C and SIGTERM end it before that. Metrics
    are logged at the step at which the agent was saved; nothing is saved.

    Args:
      make_agent: makes the agent.
      make_env: makes the environment of an id.
      make_logger: makes the logger: `add`, `write`, `close` and a counter `step`.
      args: the `run` block of the configuration and what belongs to it.

    Returns:
      What was found.

    Raises:
      CheckpointError: `from_checkpoint` is not given, or there is no checkpoint.
    """
    if not args.from_checkpoint:
        raise CheckpointError(
            "run.from_checkpoint: expected the logdir of a run to evaluate, got ''."
        )
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        agent = make_agent()
        step = load_agent(agent, args.from_checkpoint, args.from_checkpoint_regex)
        logger = stack.enter_context(contextlib.closing(make_logger()))
        logger.step.load(step)
        driver = make_driver(make_env, 0, args.envs, args)
        episodes, amount = Episodes(timeout=0), max(args.eval_eps, args.envs)
        evaluator = stack.enter_context(
            Evaluator(agent, driver, amount, logger, episodes)
        )
        limit = Limit(lambda: evaluator.steps, args.steps, args.duration, stop)
        meter, usage = Meter(), Usage(args.usage)
        should_log = LocalClock(args.log_every)

        def log() -> None:
            logger.add(episodes.result())
            logger.add(meter.result())
            logger.add(usage.result(), prefix="usage")
            logger.write()

        evaluator.begin()
        while not (evaluator.done or limit.reached()):
            with meter.section("evaluate"):
                meter.count("policy", evaluator.play())
            if should_log():
                log()
        if not meter.idle:
            log()
    scores, lengths = evaluator.scores, evaluator.lengths
    result = Evaluation(step, tuple(scores), tuple(lengths), amount)
    print(result, flush=True)
    return result
