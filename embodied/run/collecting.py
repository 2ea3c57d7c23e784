"""Steps environments and hands out what comes of it. The process that collects."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, Self

from embodied.base import Agent, Array, Env
from embodied.driver import Driver
from embodied.episodes import Episodes
from embodied.replay import Replay

MakeEnv = Callable[[int], Env]

# Episodes whose mean score a result has: few, since those of a policy that has learned
# since are not what a reader wants to know.
RECENT = 10


def make_driver(make_env: MakeEnv, first: int, amount: int, args: Any) -> Driver:
    """Makes the driver of `amount` environments with consecutive ids.

    Args:
      make_env: makes the environment of an id.
      first: id of the first one, on top of `args.env_offset`.
      amount: number of environments.
      args: the `run` block; with `debug` environments live in this process.
    """
    ids = range(args.env_offset + first, args.env_offset + first + amount)
    makers = [functools.partial(make_env, index) for index in ids]
    return Driver(makers, parallel=not args.debug, timeout=args.env_timeout)


class Collector:
    """Steps the training environments: every step is counted, stored and logged.

    A context manager, which closes the environments.

    Args:
      agent: whose policy acts, in mode 'train'.
      make_env: makes the environment of an id.
      replay: gets the steps.
      logger: gets score and length of every episode; its step is counted.
      episodes: gets the steps for the statistics.
      args: the `run` block.
    """

    def __init__(
        self,
        agent: Agent,
        make_env: MakeEnv,
        replay: Replay,
        logger: Any,
        episodes: Episodes,
        args: Any,
    ):
        self.steps = 0
        self.episodes = 0
        self.scores: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._policy = functools.partial(agent.policy, mode="train")
        self._replay = replay
        self._logger = logger
        self._episodes = episodes
        self._driver = make_driver(make_env, 0, args.envs, args)
        self._driver.on_step(self._add)
        self._driver.reset(agent.init_policy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._driver.close()

    def collect(self) -> int:
        """Steps every environment once; returns the number of steps."""
        before = self.steps
        self._driver(self._policy, steps=len(self._driver))
        return self.steps - before

    def _add(self, transition: dict[str, Array], worker: int) -> None:
        self.steps += 1
        self._logger.step.increment()
        self._replay.add(transition, worker)
        for metrics in self._episodes.add(transition, worker):
            self.episodes += 1
            self.scores.append(metrics["episode/score"])
            self._logger.add(metrics)
