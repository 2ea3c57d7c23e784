"""The interfaces of the framework: Agent, Env, Stream. Any process.

Each class docstring shows the loop that calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from embodied.space import Space

Array = Any  # np.ndarray, or a device array inside an agent.
Tree = Any  # Nested dicts, lists and tuples of arrays and plain values.
Spaces = dict[str, Space]


class TaskError(Exception):
    """A task's environment cannot be used; the message says what to change."""


class Agent:
    """A policy together with its training.

    Collecting:

        carry = agent.init_policy(len(envs))
        while True:
          carry, actions, outputs = agent.policy(carry, obs, mode='train')
          obs = [env.step(action) for env, action in zip(envs, unstack(actions))]

    Training:

        batches = agent.stream(make_stream(replay, 'train'))
        carry = agent.init_train(batch_size)
        for batch in batches:
          carry, outputs, metrics = agent.train(carry, batch)
          if 'replay' in outputs:
            replay.update(outputs['replay'])

    Reporting is the same with `init_report` and `report`. All methods may be called
    from several threads; `policy` never waits for `train`. If the agent has an
    attribute `obs_space`, actors reject observations that do not match it.
    """

    def __init__(self, obs_space: Spaces, act_space: Spaces, config: Any = None):
        raise NotImplementedError(f"{type(self).__name__}.__init__")

    def init_policy(self, batch_size: int) -> Tree:
        """Returns the carry of `batch_size` environments before their first step."""
        raise NotImplementedError(f"{type(self).__name__}.init_policy")

    def init_train(self, batch_size: int) -> Tree:
        """Returns the carry before the first training batch."""
        raise NotImplementedError(f"{type(self).__name__}.init_train")

    def init_report(self, batch_size: int) -> Tree:
        """Returns the carry before the first batch of a report."""
        raise NotImplementedError(f"{type(self).__name__}.init_report")

    def policy(
        self, carry: Tree, obs: dict[str, Array], mode: str = "train"
    ) -> tuple[Tree, dict[str, Array], dict[str, Array]]:
        """Chooses actions for a batch of observations.

        Args:
          carry: recurrent state of the envs, from `init_policy` or the last call.
          obs: arrays of shape [B, ...], one per key of the observation space.
          mode: 'train' or 'eval'.

        Returns:
          The new carry, the actions [B, ...] by key of the action space, and outputs
          [B, ...] to be stored with the transition.
        """
        raise NotImplementedError(f"{type(self).__name__}.policy")

    def train(
        self, carry: Tree, batch: dict[str, Array]
    ) -> tuple[Tree, dict[str, Any], dict[str, Array]]:
        """Makes one update from a batch [B, T, ...].

        Returns:
          The new carry, outputs (of which `replay` goes back to the replay buffer),
          and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__}.train")

    def flush(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Waits for pending updates; returns outputs and metrics still outstanding.

        For agents whose `train` returns before the update is done.
        """
        return {}, {}

    def report(
        self, carry: Tree, batch: dict[str, Array]
    ) -> tuple[Tree, dict[str, Array]]:
        """Computes metrics and videos on a batch [B, T, ...] without training."""
        raise NotImplementedError(f"{type(self).__name__}.report")

    def stream(self, st: Iterator[dict[str, Array]]) -> Iterator[dict[str, Array]]:
        """Wraps a stream of batches: moves them to the device, adds `seed`."""
        raise NotImplementedError(f"{type(self).__name__}.stream")

    def save(self) -> Tree:
        """Returns all state as arrays and plain values."""
        raise NotImplementedError(f"{type(self).__name__}.save")

    def load(self, data: Tree, regex: str | None = None) -> None:
        """Restores a saved state, or with `regex` only entries whose names match."""
        raise NotImplementedError(f"{type(self).__name__}.load")


class Env:
    """An environment.

        obs = env.step({'reset': True, **zeros})   # The first step must reset.
        while True:
          action = policy(obs)
          obs = env.step({'reset': obs['is_last'], **action})

    Observations hold every key of `obs_space`, among them `reward` (float32),
    `is_first`, `is_last`, `is_terminal` (bool). The observation after a reset has
    `is_first` set and reward zero; a step with `reset` ignores the other actions.
    Keys that start with `log/` are for the logger and never reach the agent.
    """

    @property
    def obs_space(self) -> Spaces:
        """Spaces by key, including reward, is_first, is_last and is_terminal."""
        raise NotImplementedError(f"{type(self).__name__}.obs_space")

    @property
    def act_space(self) -> Spaces:
        """Spaces by key, including `reset`."""
        raise NotImplementedError(f"{type(self).__name__}.act_space")

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Takes one step, or starts an episode where `action['reset']` is set."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def close(self) -> None:
        """Frees resources. May be called more than once."""


class BatchEnv:
    """Several environments that step together, in one call.

        obs = envs.step({'reset': ones, **zeros})
        while True:
          actions = policy(obs)                          # {key: [n, ...]}
          obs = envs.step({'reset': obs['is_last'], **actions})

    Each environment behaves like an `Env`, with one exception: resetting one whose
    episode has not ended starts new episodes in all of them.
    """

    @property
    def obs_space(self) -> Spaces:
        """Observation spaces of one environment by key."""
        raise NotImplementedError(f"{type(self).__name__}.obs_space")

    @property
    def act_space(self) -> Spaces:
        """Action spaces of one environment by key, including `reset`."""
        raise NotImplementedError(f"{type(self).__name__}.act_space")

    def __len__(self) -> int:
        """Returns the number of environments."""
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def step(self, actions: dict[str, Array]) -> dict[str, Array]:
        """Steps all environments; actions and observations are [n, ...] by key."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def close(self) -> None:
        """Frees resources. May be called more than once."""


class Stream:
    """An iterator that can be saved and restored.

    Loading a saved position continues with the item after it:

        stream = iter(make_stream(replay, 'train'))
        batch = next(stream)
        data = stream.save()
        ...
        stream.load(data)    # `next` returns what follows `batch`.
    """

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.__next__")

    def save(self) -> Tree:
        """Returns the position in the stream as arrays and plain values."""
        raise NotImplementedError(f"{type(self).__name__}.save")

    def load(self, data: Tree) -> None:
        """Moves to a position that `save` returned."""
        raise NotImplementedError(f"{type(self).__name__}.load")

    def close(self) -> None:
        """Ends background work, if there is any. May be called more than once."""
