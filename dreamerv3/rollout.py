"""Steps environments with an agent and logs episodes; in the main process."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import elements

from embodied import Agent, Env
from embodied.clock import LocalClock
from embodied.driver import Driver
from embodied.episodes import Episodes
from embodied.logger import Logger


@dataclasses.dataclass(frozen=True)
class Result:
    """What a rollout did.

    Attributes:
      steps: environment steps, over all environments.
      seconds: how long it took, without the start of the environments.
      episodes: finished episodes.
      mean_score: of these; None if there were none.
    """

    steps: int
    seconds: float
    episodes: int
    mean_score: float | None


class _Collector:
    """Counts steps and logs episodes as transitions come in, in the driver's thread."""

    def __init__(self, logger: Logger, timeout: float):
        self.steps = 0
        self.scores: list[float] = []
        self._logger = logger
        self._step: elements.Counter = logger.step
        self._episodes = Episodes(timeout)
        self._logged = (time.monotonic(), 0)

    def add(self, transition: dict[str, Any], worker: int) -> None:
        self.steps += 1
        self._step.increment()
        for metrics in self._episodes.add(transition, worker):
            self.scores.append(metrics["episode/score"])
            self._logger.add(metrics)

    def log(self) -> None:
        """Writes the episodes and statistics since the last call."""
        now, (start, steps) = time.monotonic(), self._logged
        self._logger.add(self._episodes.result())
        if now > start:
            self._logger.add({"fps/env": (self.steps - steps) / (now - start)})
        self._logged = (now, self.steps)
        self._logger.write()


def rollout(
    agent: Agent,
    make_env: Callable[[int], Env],
    logger: Logger,
    args: Any,
    stop: threading.Event,
) -> Result:
    """Steps `args.envs` environments until `args.steps`, `args.duration` or `stop`.

    Args:
      agent: whose policy acts, in train mode.
      make_env: makes the environment of an index; with `args.debug` in this process,
        else in a process for each.
      logger: gets every episode, and statistics every `args.log_every` seconds.
      args: the `run` block of the configuration.
      stop: ends the rollout after the current step once it is set.
    """
    collector = _Collector(logger, args.episode_timeout)
    should_log = LocalClock(args.log_every)
    makers = [
        functools.partial(make_env, args.env_offset + index)
        for index in range(args.envs)
    ]
    with Driver(makers, parallel=not args.debug, timeout=args.env_timeout) as driver:
        driver.on_step(collector.add)
        driver.reset(agent.init_policy)
        start = time.monotonic()
        deadline = start + args.duration if args.duration else float("inf")
        while collector.steps < args.steps and time.monotonic() < deadline:
            if stop.is_set():
                break
            driver(agent.policy, steps=len(driver))
            if should_log():
                collector.log()
        seconds = time.monotonic() - start
        collector.log()
    scores = collector.scores
    mean = sum(scores) / len(scores) if scores else None
    return Result(collector.steps, seconds, len(scores), mean)
