"""An agent that acts at random, for tests and baselines. Any process."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from embodied.base import Agent, Array, Spaces, Tree
from embodied.space import Space


class RandomAgent(Agent):
    """Draws every action from its space and learns nothing, but counts its updates.

    Methods may be called from several threads: `_lock` guards the random state, the
    table of batched spaces and the count.

    Args:
      obs_space: observation spaces by key.
      act_space: action spaces by key; `reset` is left to the driver.
      config: kept for the `config.yaml` of the run; there is nothing to configure.
      seed: the same seed draws the same actions.
    """

    def __init__(
        self, obs_space: Spaces, act_space: Spaces, config: Any = None, seed: int = 0
    ):
        self.obs_space = {key: Space.of(space) for key, space in obs_space.items()}
        self.act_space = {
            key: Space.of(space) for key, space in act_space.items() if key != "reset"
        }
        self.config = config
        self._lock = threading.Lock()
        self._rng = np.random.default_rng(seed)
        self._batched: dict[int, Spaces] = {}
        self._updates = 0

    def init_policy(self, batch_size: int) -> Tree:
        """Returns an empty carry."""
        return ()

    def init_train(self, batch_size: int) -> Tree:
        """Returns an empty carry."""
        return ()

    def init_report(self, batch_size: int) -> Tree:
        """Returns an empty carry."""
        return ()

    def policy(
        self, carry: Tree, obs: dict[str, Array], mode: str = "train"
    ) -> tuple[Tree, dict[str, Array], dict[str, Array]]:
        """Draws actions [B, ...], in the same way in both modes."""
        batch_size = len(obs["is_first"])
        with self._lock:
            if batch_size not in self._batched:
                self._batched[batch_size] = self._stack_spaces(batch_size)
            spaces = self._batched[batch_size]
            actions = {key: space.sample(self._rng) for key, space in spaces.items()}
        return carry, actions, {}

    def train(
        self, carry: Tree, batch: dict[str, Array]
    ) -> tuple[Tree, dict[str, Any], dict[str, Array]]:
        """Returns statistics of the batch [B, T, ...], and counts an update."""
        with self._lock:
            self._updates += 1
        return carry, {}, self._measure(batch)

    def report(
        self, carry: Tree, batch: dict[str, Array]
    ) -> tuple[Tree, dict[str, Array]]:
        """Returns statistics of the batch [B, T, ...]."""
        return carry, self._measure(batch)

    def stream(self, st: Iterator[dict[str, Array]]) -> Iterator[dict[str, Array]]:
        """Passes the batches on unchanged."""
        return iter(st)

    def save(self) -> Tree:
        """Returns the random state and the number of updates."""
        with self._lock:
            rng = dict(self._rng.bit_generator.state)
            return {"rng": rng, "counters": {"updates": self._updates}}

    def load(self, data: Tree, regex: str | None = None) -> None:
        """Restores `rng` and `counters/updates`, or only names that `regex` matches.

        Raises:
          ValueError: the state belongs to another agent.
        """
        if "rng" not in data:
            raise ValueError(
                f"The random agent expected a state of its own, with rng, got "
                f"{', '.join(sorted(data)) or 'nothing'}. Leave out --random_agent, or "
                "choose the logdir of a run with it."
            )
        with self._lock:
            if regex is None or re.match(regex, "rng"):
                self._rng.bit_generator.state = data["rng"]
            if regex is None or re.match(regex, "counters/updates"):
                self._updates = int(data.get("counters", {}).get("updates", 0))

    def _stack_spaces(self, batch_size: int) -> Spaces:
        return {
            key: Space(space.dtype, (batch_size, *space.shape), space.low, space.high)
            for key, space in self.act_space.items()
        }

    def _measure(self, batch: dict[str, Array]) -> dict[str, Array]:
        rewards = np.asarray(batch["reward"], np.float32)
        return {
            "batch_size": np.float32(rewards.shape[0]),
            "batch_length": np.float32(rewards.shape[1]),
            "reward_mean": rewards.mean(),
            "reward_max": rewards.max(),
        }
