"""Steps environments, for training and for evaluation. The process that collects."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from embodied.base import Agent, Array, Env
from embodied.driver import Driver
from embodied.episodes import Episodes
from embodied.replay import Replay
from embodied.run.live import LIVE_SCORES, logged_step
from embodied.run.settings import RunSettings

MakeEnv = Callable[[int], Env]

# Episodes in the mean score of a result: few, since the policy has improved since older
# ones were played.
RECENT_EPISODES = 10


def make_driver(
    make_env: MakeEnv, first: int, amount: int, settings: RunSettings
) -> Driver:
    """Makes the driver of `amount` environments with consecutive ids.

    Args:
      make_env: makes the environment of an id.
      first: id of the first one, on top of `settings.env_offset`.
      amount: number of environments.
      settings: the `run` block; with `debug` environments live in this process.
    """
    ids = range(settings.env_offset + first, settings.env_offset + first + amount)
    makers = [functools.partial(make_env, index) for index in ids]
    return Driver(makers, parallel=not settings.debug, timeout=settings.env_timeout)


class Collector:
    """Steps the training environments: counts, stores and logs every step.

    A context manager, which closes the environments.

    Args:
      agent: acts in mode 'train'.
      make_env: makes the environment of an id.
      replay: gets the steps.
      logger: gets score and length of every episode; its step counter is increased.
      episodes: gets the steps for the statistics.
      settings: the `run` block.
    """

    def __init__(
        self,
        agent: Agent,
        make_env: MakeEnv,
        replay: Replay,
        logger: Any,
        episodes: Episodes,
        settings: RunSettings,
    ):
        self.steps = 0
        self.episodes = 0
        # Of the newest episodes, the step at the end and the score.
        self.history: collections.deque[tuple[int, float]] = collections.deque(
            maxlen=LIVE_SCORES
        )
        self._policy = functools.partial(agent.policy, mode="train")
        self._replay = replay
        self._logger = logger
        self._episodes = episodes
        self._driver = make_driver(make_env, 0, settings.envs, settings)
        self._driver.on_step(self._add)
        self._driver.reset(agent.init_policy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._driver.close()

    @property
    def scores(self) -> list[float]:
        """Scores of the last `RECENT_EPISODES` episodes."""
        return [score for _, score in self.history][-RECENT_EPISODES:]

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
            score = metrics["episode/score"]
            self.history.append((logged_step(self._logger), score))
            self._logger.add(metrics)


class Evaluator:
    """Plays a fixed number of episodes in each environment, in mode 'eval'.

        evaluator.begin()
        while not evaluator.done:
          evaluator.play()

    The number per environment is fixed, because the first episodes to finish out of
    many are the short ones. If an environment has played its episodes before the
    others, its further ones do not count.

    Args:
      agent: acts in mode 'eval'.
      driver: driver of the environments.
      amount: number of episodes in all, spread over the environments.
      logger: gets score and length of every episode.
      episodes: gets the steps for the statistics.
      replay: gets all steps, if given.
    """

    def __init__(
        self,
        agent: Agent,
        driver: Driver,
        amount: int,
        logger: Any,
        episodes: Episodes,
        replay: Replay | None = None,
    ):
        self.steps = 0
        # Per episode since `begin`; `largest` has the maximum of each scalar `log/...`.
        self.scores: list[float] = []
        self.lengths: list[float] = []
        self.largest: dict[str, list[float]] = {}
        self._agent = agent
        self._policy = functools.partial(agent.policy, mode="eval")
        self._driver = driver
        self._amount = amount
        self._logger = logger
        self._episodes = episodes
        self._replay = replay
        self._left = [0] * len(driver)  # Episodes to come, by environment.
        # Largest values so far in the current episode, by environment.
        self._running: list[dict[str, float]] = [{} for _ in range(len(driver))]
        driver.on_step(self._add)

    @property
    def done(self) -> bool:
        """Whether all episodes have been played."""
        return not any(self._left)

    def begin(self) -> None:
        """Starts an evaluation: forgets the last one and resets all environments."""
        share, rest = divmod(self._amount, len(self._left))
        self._left = [share + (worker < rest) for worker in range(len(self._left))]
        self.scores, self.lengths, self.largest = [], [], {}
        self._running = [{} for _ in self._running]
        self._driver.reset(self._agent.init_policy)

    def play(self) -> int:
        """Steps every environment once; returns the number of steps."""
        self._driver(self._policy, steps=len(self._driver))
        return len(self._driver)

    def _add(self, transition: dict[str, Array], worker: int) -> None:
        self.steps += 1
        if self._replay is not None:
            self._replay.add(transition, worker)
        if not self._left[worker]:
            return
        running = self._running[worker]
        for key, value in transition.items():
            if key.startswith("log/") and not np.ndim(value):
                running[key] = max(running.get(key, -math.inf), float(value))
        for metrics in self._episodes.add(transition, worker, is_eval=True):
            self._left[worker] -= 1
            self.scores.append(metrics["eval_episode/score"])
            self.lengths.append(metrics["eval_episode/length"])
            for key, value in running.items():
                self.largest.setdefault(key, []).append(value)
            running.clear()
            self._logger.add(metrics)
