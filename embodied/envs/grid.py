"""A small arena seen as an image, a task that can be learned on a CPU in minutes.

Runs in the process that steps it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodied.base import Array, Spaces
from embodied.envs.game import Game
from embodied.envs.keys import SIGNALS, check_at_least
from embodied.envs.registry import check_task
from embodied.space import Space

TASKS = ("reach", "avoid")
CELLS = 4  # Per side.
MIN_DISTANCE = 3  # In moves, from the start to the goal.
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))  # Stay, up, down, left, right.

# Important cells are bright, so that they weigh more in a squared error.
_FLOOR = (32, 32, 40)
_LINE = (16, 16, 24)
_AGENT = (255, 255, 255)
_GOAL = (255, 255, 0)
_TRAP = (255, 0, 255)


class Grid(Game):
    """Walk to the yellow cell.

        . . . G      The agent A and the goal G are placed anew in every episode, at
        . . . .      least three moves apart. Reaching G gives reward 1 and ends the
        . A . .      episode, which is cut after `length` steps. In `avoid` there is
        . . T .      also a trap T in magenta, which ends it without reward.

    Everything is visible, and G can always be reached in time. A uniformly random
    policy reaches it in about 13% of its episodes, and in 9% with the trap.
    `log/success` is 1 at the step that reaches G, else 0.

    Args:
      task: 'reach' or 'avoid'.
      size: height and width of the image, multiples of 4.
      length: number of steps after which the episode is cut.
      seed: decides where agent, goal and trap are placed.
    """

    def __init__(
        self,
        task: str = "reach",
        size: Sequence[int] = (48, 48),
        length: int = 10,
        seed: int = 0,
    ):
        check_task("grid task", task, TASKS)
        check_at_least(1, length=length)
        if len(size) != 2 or any(side < 1 or side % CELLS for side in size):
            raise ValueError(
                f"Expected a size of two multiples of {CELLS}, the number of cells, "
                f"got {size}."
            )
        super().__init__(len(MOVES))
        self._traps = task == "avoid"
        self._length = length
        self._rng = np.random.default_rng(seed)
        self._height, self._width = (side // CELLS for side in size)  # Of a cell.
        self._floor = _render_floor(self._height, self._width)
        self._arena = self._floor
        self._agent = (0, 0)
        self._goal = (0, 0)
        self._trap: tuple[int, int] | None = None
        self._count = 0

    @property
    def obs_space(self) -> Spaces:
        """The image, and `log/success` for the logger."""
        return {
            "image": Space(np.uint8, self._floor.shape),
            **SIGNALS,
            "log/success": Space(np.float32, (), 0, 1),
        }

    def _start(self) -> dict[str, Array]:
        self._place()
        return self._observe(success=False)

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        """Moves by one cell; at the edge of the arena the agent stays."""
        down, right = MOVES[action]
        row, column = self._agent[0] + down, self._agent[1] + right
        if 0 <= row < CELLS and 0 <= column < CELLS:
            self._agent = (row, column)
        self._count += 1
        success = self._agent == self._goal
        terminal = success or self._agent == self._trap
        done = terminal or self._count >= self._length
        return self._observe(success), float(success), done, terminal

    def _place(self) -> None:
        self._count = 0
        self._agent, self._goal = self._cell(), self._cell()
        while _distance(self._agent, self._goal) < MIN_DISTANCE:
            self._agent, self._goal = self._cell(), self._cell()
        self._arena = self._floor.copy()
        self._draw(self._arena, self._goal, _GOAL)
        if self._traps:
            self._trap = self._cell()
            while self._trap in (self._agent, self._goal):
                self._trap = self._cell()
            self._draw(self._arena, self._trap, _TRAP)

    def _observe(self, success: bool) -> dict[str, Array]:
        image = self._arena.copy()
        self._draw(image, self._agent, _AGENT)
        return {"image": image, "log/success": np.float32(success)}

    def _cell(self) -> tuple[int, int]:
        row, column = divmod(int(self._rng.integers(CELLS * CELLS)), CELLS)
        return row, column

    def _draw(
        self, image: np.ndarray, cell: tuple[int, int], color: tuple[int, int, int]
    ) -> None:
        row, column = cell[0] * self._height, cell[1] * self._width
        image[row : row + self._height, column : column + self._width] = color


def _distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _render_floor(height: int, width: int) -> np.ndarray:
    """Returns the empty arena, uint8, with cells of `height` by `width` pixels."""
    tile = np.full((height, width, 3), _LINE, np.uint8)
    tile[1:-1, 1:-1] = _FLOOR  # Leaves a line around the cell.
    return np.tile(tile, (CELLS, CELLS, 1))
