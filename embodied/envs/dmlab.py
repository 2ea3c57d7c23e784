"""Levels of DeepMind Lab, in the process that steps them."""

from __future__ import annotations

import deepmind_lab
import numpy as np

from embodied.base import Array, Spaces
from embodied.envs.game import Game
from embodied.envs.keys import (
    SIGNALS,
    WORD_CLASSES,
    WORDS,
    check_at_least,
    hash_words,
)
from embodied.space import Space

FOLDER = "contributed/dmlab30/"

# Look left or right and up or down (pixels), strafe, move, fire, jump, crouch: the
# nine actions of IMPALA.
ACTIONS = (
    (0, 0, 0, 1, 0, 0, 0),  # Forward.
    (0, 0, 0, -1, 0, 0, 0),  # Backward.
    (0, 0, -1, 0, 0, 0, 0),  # Strafe left.
    (0, 0, 1, 0, 0, 0, 0),  # Strafe right.
    (-20, 0, 0, 0, 0, 0, 0),  # Look left.
    (20, 0, 0, 0, 0, 0, 0),  # Look right.
    (-20, 0, 0, 1, 0, 0, 0),  # Forward and look left.
    (20, 0, 0, 1, 0, 0, 0),  # Forward and look right.
    (0, 0, 0, 0, 1, 0, 0),  # Fire.
)


class DMLab(Game):
    """A level of DMLab-30, or any other by its path.

    Args:
      task: level such as 'explore_goal_locations_small', or a path with a slash.
      size: height and width of images.
      repeat: number of frames that each action is repeated for.
      episodic: whether the end of a level is a terminal state.
      use_seed: whether `seed` decides the seeds of levels; if not, each run sees
        different levels.
      seed: see `use_seed`.
    """

    def __init__(
        self,
        task: str,
        size: tuple[int, int] = (64, 64),
        repeat: int = 4,
        episodic: bool = True,
        use_seed: bool = True,
        seed: int = 0,
    ):
        check_at_least(1, repeat=repeat)
        super().__init__(len(ACTIONS))
        self._size = (int(size[0]), int(size[1]))
        self._repeat = repeat
        self._episodic = episodic
        self._instructed = task.rpartition("/")[2].startswith("language_")
        self._rng = np.random.default_rng(seed) if use_seed else None
        sensors = ["RGB_INTERLEAVED"] + ["INSTR"] * self._instructed
        config = {"height": str(self._size[0]), "width": str(self._size[1])}
        level = task if "/" in task else FOLDER + task
        self._lab = deepmind_lab.Lab(level, sensors, config=config)
        self._seen: dict[str, Array] = {}
        self._closed = False

    @property
    def obs_space(self) -> Spaces:
        """An image, and in language levels the instruction as hashed words."""
        words = {"instruction": Space(np.int32, (WORDS,), 0, WORD_CLASSES)}
        return {
            "image": Space(np.uint8, (*self._size, 3)),
            **(words if self._instructed else {}),
            **SIGNALS,
        }

    def close(self) -> None:
        """Ends the level."""
        if not self._closed:
            self._closed = True
            self._lab.close()

    def _start(self) -> dict[str, Array]:
        if self._rng is None:
            self._lab.reset()
        else:
            self._lab.reset(seed=int(self._rng.integers(0, 2**31 - 1)))
        return self._observe()

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        raw = np.array(ACTIONS[action], np.intc)
        reward = self._lab.step(raw, num_steps=self._repeat)
        done = not self._lab.is_running()
        # A level that has ended has no observations.
        seen = self._seen if done else self._observe()
        return seen, reward, done, done and self._episodic

    def _observe(self) -> dict[str, Array]:
        raw = self._lab.observations()
        self._seen = {"image": np.array(raw["RGB_INTERLEAVED"], np.uint8)}
        if self._instructed:
            self._seen["instruction"] = hash_words(raw["INSTR"])
        return self._seen
