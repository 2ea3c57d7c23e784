"""The base of environments whose action is a choice; in the process that steps them."""

from __future__ import annotations

import numpy as np

from embodied.base import Array, Env, Spaces
from embodied.envs.keys import signals
from embodied.space import Space


class Game(Env):
    """An environment whose only action is a class, such as a key to press.

    Subclasses implement `obs_space`, `_start` and `_play`.

    Args:
      actions: number of classes.
    """

    def __init__(self, actions: int):
        self._act_space = {
            "reset": Space(bool),
            "action": Space(np.int32, (), 0, actions),
        }
        self._done = True

    @property
    def act_space(self) -> Spaces:
        """The index of an action."""
        return dict(self._act_space)

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Plays one action, or starts an episode."""
        if self._done or action["reset"]:
            obs = self._start()
            self._done = False
            return {**obs, **signals(0.0, is_first=True)}
        obs, reward, self._done, terminal = self._play(int(action["action"]))
        return {**obs, **signals(reward, False, self._done, terminal)}

    def _start(self) -> dict[str, Array]:
        """Starts an episode; returns what is seen."""
        raise NotImplementedError(f"{type(self).__name__}._start")

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        """Plays an action.

        Returns:
          What is seen, the reward, whether the episode ends, and whether in a terminal
          state.
        """
        raise NotImplementedError(f"{type(self).__name__}._play")
