"""Checks an environment before training: the agent's view of it, speed, problems.

In the main process; the environment is stepped in a process of its own, as in training.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import elements
import numpy as np

from dreamerv3.cli import texts
from dreamerv3.cli.config import ConfigError
from dreamerv3.cli.factories import EnvFactory, make_env
from embodied.base import Env, Spaces, TaskError
from embodied.driver import Driver, EnvError, env_errors
from embodied.envs.keys import SIGNALS
from embodied.random_agent import RandomAgent
from embodied.replay import ReplayMemoryError
from embodied.replay.sizing import ReplaySettings, plan_sizes
from embodied.space import Space

STEPS, SECONDS = 1000, 10.0  # Stepping ends at whichever comes first.
BATCH_STEPS = 100  # Of environments that step together.
LARGE_REWARD = 1e4


def run_check(config: elements.Config) -> None:
    """Steps an environment of the task and prints what an agent would see of it.

    Raises:
      ConfigError: training would fail; the message lists the problems.
    """
    print(f"{config.task}:", flush=True)
    problems: list[str] = []
    with env_errors(0, TaskError):
        env = make_env(config, 0)
        other = make_env(config, 1)
    try:
        print(describe_spaces(env))
        if (env.obs_space, env.act_space) != (other.obs_space, other.act_space):
            problems.append(
                "Environments of one task expected equal spaces, but env 1 has others "
                "than env 0. Spaces must not depend on the seed."
            )
        problems += _agent_problems(config, env)
        problems += _replay_problems(config, env)
        hints = [] if problems else _seed_hints(config, env, other)
    finally:
        env.close()
        other.close()
    if not problems:
        try:
            found = step_env(config)
            step_batch(config)
        except EnvError as error:
            problems.append(texts.env_failure(error))
        except TaskError as error:
            problems.append(str(error))
        else:
            print("\n".join(found.lines()))
            hints += found.hints()
    for hint in hints:
        print(f"  Note: {hint}")
    if problems:
        raise ConfigError(*problems)
    print("No problems found: it can be trained on.")


def describe_spaces(env: Env) -> str:
    """Returns lines with the spaces of a Gymnasium environment and the agent's keys."""
    inner = env
    while hasattr(inner, "env"):
        inner = inner.env
    gym_env = getattr(inner, "gym_env", None)
    lines = []
    if gym_env is not None:
        lines.append(f"  environment's observations: {gym_env.observation_space}")
        lines.append(f"  environment's actions:      {gym_env.action_space}")
    lines.append("  The agent sees:")
    for key, space in sorted(env.obs_space.items()):
        if key.startswith("log/"):
            lines.append(f"    {key}: logged, not seen")
        elif key not in SIGNALS:
            lines.append(f"    {key}: {_described(space)}")
    lines.append("  The agent decides on:")
    for key, space in sorted(env.act_space.items()):
        if key != "reset":
            lines.append(f"    {key}: {_described(space)}")
    return "\n".join(lines)


class StepStatistics:
    """Statistics of an environment that is stepped at random.

    Attributes:
      steps: number of steps.
      seconds: duration of the steps after the first.
      rewards: rewards of all steps.
      lengths: lengths of the episodes that have ended.
      terminals: number of episodes that ended in a terminal state.
      nonfinite: number of steps with a value that is not finite, by key.
      constant: keys whose value never changed.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.terminals = 0
        self.nonfinite: dict[str, int] = {}
        self._first: dict[str, np.ndarray] = {}
        self._changed: set[str] = set()
        self._length = 0

    def add(self, transition: dict[str, Any], worker: int) -> None:
        """Adds a step to the statistics."""
        self.steps += 1
        self._length = 0 if transition["is_first"] else self._length + 1
        self.rewards.append(float(transition["reward"]))
        if transition["is_last"]:
            self.lengths.append(self._length)
            self.terminals += bool(transition["is_terminal"])
        for key, value in transition.items():
            value = np.asarray(value)
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                self.nonfinite[key] = self.nonfinite.get(key, 0) + 1
            if key not in self._first:
                self._first[key] = value
            elif key not in self._changed and not np.array_equal(
                value, self._first[key]
            ):
                self._changed.add(key)

    @property
    def constant(self) -> list[str]:
        """Keys whose value never changed."""
        return sorted(self._first.keys() - self._changed - SIGNALS.keys())

    def lines(self) -> Iterator[str]:
        """Yields the statistics as lines of text."""
        timed = self.steps - 1  # Without the first, which is not in `seconds`.
        rate = timed / self.seconds if self.seconds else math.inf
        yield f"  {self.steps} random steps in a process of its own: {rate:.0f} steps/s"
        low, high = min(self.rewards), max(self.rewards)
        yield f"  rewards from {low:.4g} to {high:.4g}"
        if self.lengths:
            mean = sum(self.lengths) / len(self.lengths)
            yield (
                f"  {len(self.lengths)} episodes of {mean:.4g} steps on average, "
                f"{self.terminals} ended in a terminal state"
            )

    def hints(self) -> Iterator[str]:
        """Yields possible problems that do not stop training."""
        if not self.lengths:
            yield (
                f"no episode ended within {self.steps} steps. If none ever does, there "
                "are no scores: see embodied.wrappers.TimeLimit."
            )
        if self.lengths and max(self.lengths) == 0:
            yield "episodes end with their first observation."
        if not any(self.rewards):
            yield "all rewards were 0, as in tasks with sparse rewards."
        elif max(map(abs, self.rewards)) > LARGE_REWARD:
            yield f"rewards of more than {LARGE_REWARD:g}; consider scaling them."
        for key, count in sorted(self.nonfinite.items()):
            yield (
                f"{key!r} was not finite in {count} steps; the agent takes it as "
                "missing."
            )
        for key in self.constant:
            yield f"{key!r} never changed."


def step_env(config: elements.Config) -> StepStatistics:
    """Steps an environment at random, in a process of its own.

    Raises:
      EnvError: the environment fails, hangs, or returns values outside of its spaces.
    """
    factory = functools.partial(EnvFactory(config), 0)
    found = StepStatistics()
    timeout = config.run.env_timeout
    with Driver([factory], parallel=True, timeout=timeout, mode="train") as driver:
        agent = RandomAgent(driver.obs_space, driver.act_space, seed=config.seed)
        driver.on_step(lambda transition, worker, mode: found.add(transition, worker))
        driver.reset(agent.init_policy)
        driver(agent.policy, steps=1)  # The first step takes longer.
        begin = time.monotonic()
        while found.steps < STEPS and time.monotonic() - begin < SECONDS:
            driver(agent.policy, steps=1)
        found.seconds = time.monotonic() - begin
    return found


def step_batch(config: elements.Config) -> None:
    """Steps the environments of a worker as one batch, if the task supports it.

    Raises:
      EnvError: they fail.
      TaskError: they cannot be made.
    """
    rows = config.run.envs_per_worker
    with env_errors(0, TaskError):
        batch = EnvFactory(config).make_batch(range(rows))
        if batch is None:
            return
        agent = RandomAgent(batch.obs_space, batch.act_space, seed=config.seed)
        carry = agent.init_policy(rows)
        actions = {
            key: np.zeros((rows, *space.shape), space.dtype)
            for key, space in batch.act_space.items()
        }
        reset = np.ones(rows, bool)
        try:
            for _ in range(BATCH_STEPS):
                obs = batch.step({**actions, "reset": reset})
                carry, actions, _ = agent.policy(carry, obs)
                reset = obs["is_last"]
        finally:
            batch.close()
    print(f"  {rows} environments of a worker step together")


def _agent_problems(config: elements.Config, env: Env) -> list[str]:
    """Returns why the networks refuse the spaces; prints how large they would be."""
    if config.random_agent:
        return []
    import jax

    from dreamerv3 import model
    from dreamerv3.report import parameter_summary

    def init() -> Any:
        key = jax.random.key(0)
        return model.init(key, env.obs_space, env.act_space, config.agent)

    try:
        shapes = jax.eval_shape(init)
    except ValueError as error:
        return [str(error)]
    print(f"  The agent would have {parameter_summary(shapes.model)}")
    return []


def _replay_problems(config: elements.Config, env: Env) -> list[str]:
    """Returns why the replay would not fit; prints how large it would be."""
    stored: Spaces = {**env.obs_space, **env.act_space}
    size = sum(
        math.prod(space.shape) * space.dtype.itemsize
        for key, space in stored.items()
        if not key.startswith("log/") and key != "reset"
    )
    if config.replay_context and not config.random_agent:
        rssm = config.agent.dyn.rssm  # Recurrent states, in half precision at least.
        size += 2 * rssm.deter + rssm.stoch
    settings = config.replay
    length = config.consec_train * config.batch_length + config.replay_context
    try:
        plan = plan_sizes(
            ReplaySettings(
                *("replay", length, settings.size, settings.bytes, settings.chunksize),
                *(config.replay_context, settings.online),
            ),
            size,
        )
    except ReplayMemoryError as error:
        return [f"{error} The capacity is --replay.size, and bytes --replay.bytes."]
    print(f"  A step takes {size} bytes, the replay holds {plan.capacity} of them")
    return []


def _seed_hints(config: elements.Config, env: Env, other: Env) -> list[str]:
    """Returns hints if equal seeds begin differently, or different seeds alike."""
    with env_errors(0, TaskError):
        again = make_env(config, 0)
        try:
            one, two, three = (_first_values(x) for x in (env, again, other))
        finally:
            again.close()
    hints = []
    if one != two:
        hints.append("two environments of the same seed begin differently.")
    elif one == three:
        hints.append("environments of different seeds begin alike.")
    return hints


def _first_values(env: Env) -> dict[str, bytes]:
    action = {key: np.zeros(x.shape, x.dtype) for key, x in env.act_space.items()}
    obs = env.step({**action, "reset": np.bool_(True)})
    return {
        key: np.asarray(value).tobytes()
        for key, value in obs.items()
        if not key.startswith("log/")
    }


def _described(space: Space) -> str:
    shape = " x ".join(map(str, space.shape)) or "a scalar"
    if len(space.shape) == 3 and space.dtype == np.uint8:
        return f"image {shape}"
    if not space.discrete:
        low, high = space.limits
        bounds = f" from {low.min():.4g} to {high.max():.4g}"
        bounded = np.isfinite(low).all() and np.isfinite(high).all()
        return f"{space.dtype} {shape}{bounds if bounded else ''}"
    counts = np.unique(space.classes)
    word = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{word} classes, {shape}"
