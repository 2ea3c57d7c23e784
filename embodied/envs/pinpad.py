"""Pin pad: a room where pads are to be stepped on in the right order.

Runs in the process that steps it.
"""

from __future__ import annotations

import numpy as np

from embodied.base import Array, Spaces
from embodied.envs.game import Game
from embodied.envs.keys import SIGNALS, check_at_least
from embodied.envs.registry import check_task
from embodied.space import Space

WIDTH, HEIGHT = 16, 14  # Of the room in cells, walls included.
HISTORY = 2  # Rows of cells below the room, which show the history.
PAD = 3  # Side of a pad in cells.
REWARD = 10.0
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))  # Stay, up, down, left, right.

# Top left cells of the pads, which are around the room.
_PLACES = {
    "top": (1, 6),
    "top_left": (1, 1),
    "top_right": (1, 12),
    "left": (5, 1),
    "right": (5, 12),
    "bottom_left": (10, 1),
    "bottom": (10, 6),
    "bottom_right": (10, 12),
}
# Orders in which pads are to be stepped on, never from one place to the one beside it.
_ORDERS = {
    "three": "top_left bottom_right top_right",
    "four": "top_left bottom_right bottom_left top_right",
    "five": "top_left bottom_right top bottom_left top_right",
    "six": "top_left bottom top_right bottom_left top bottom_right",
    "seven": "top_left bottom top_right left bottom_right top bottom_left",
    "eight": "top_left bottom top_right left bottom_right top bottom_left right",
}
TASKS = tuple(_ORDERS)

_COLORS = np.array(
    [
        (230, 60, 60),
        (60, 190, 80),
        (70, 100, 240),
        (240, 210, 60),
        (200, 80, 220),
        (60, 210, 220),
        (245, 150, 50),
        (150, 100, 60),
    ],
    np.uint8,
)
_WALL = (110, 110, 110)
_FLOOR = (255, 255, 255)
_AGENT = (0, 0, 0)


class PinPad(Game):
    """Step on all pads, each of another colour, in an order to be found out.

    Stepping on a pad activates it and adds it to the history, which is drawn below the
    room and holds as many entries as there are pads. When it shows the right order, the
    agent gets a reward of 10 and starts from another place, and the history is cleared.
    Nothing else is rewarded.

    Args:
      task: number of pads as a word, from 'three' to 'eight'.
      size: height and width of images, multiples of 16.
      length: steps after which an episode is cut.
      seed: decides where the agent starts.
    """

    def __init__(
        self,
        task: str = "three",
        size: tuple[int, int] = (64, 64),
        length: int = 10_000,
        seed: int = 0,
    ):
        check_task("pinpad task", task, TASKS)
        check_at_least(1, length=length)
        rows, columns = HEIGHT + HISTORY, WIDTH
        if size[0] < 1 or size[0] % rows or size[1] < 1 or size[1] % columns:
            raise ValueError(
                f"Expected a size of multiples of {rows} and {columns}, got {size}."
            )
        super().__init__(len(MOVES))
        self._scale = (int(size[0]) // rows, int(size[1]) // columns)
        self._length = length
        self._rng = np.random.default_rng(seed)
        self._places = [_PLACES[place] for place in _ORDERS[task].split()]
        self._pads = _pads(self._places)
        self._room = _room(self._pads)
        self._free = np.argwhere(self._pads[1:-1, 1:-1] < 0) + 1
        self._history: list[int] = []
        self._agent = (0, 0)
        self._count = 0

    @property
    def obs_space(self) -> Spaces:
        """An image."""
        height, width = self._scale
        shape = ((HEIGHT + HISTORY) * height, WIDTH * width, 3)
        return {"image": Space(np.uint8, shape), **SIGNALS}

    def _start(self) -> dict[str, Array]:
        self._count = 0
        self._place()
        return self._observe()

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        """Moves by one cell, unless a wall is there."""
        down, right = MOVES[action]
        row, column = self._agent[0] + down, self._agent[1] + right
        if 0 < row < HEIGHT - 1 and 0 < column < WIDTH - 1:
            self._agent = (row, column)
        pad = int(self._pads[self._agent])
        if pad >= 0 and self._history[-1:] != [pad]:
            self._history = [*self._history, pad][-len(self._places) :]
        solved = self._history == list(range(len(self._places)))
        if solved:
            self._place()
        self._count += 1
        return self._observe(), REWARD * solved, self._count >= self._length, False

    def _place(self) -> None:
        row, column = self._free[self._rng.integers(len(self._free))]
        self._agent = (int(row), int(column))
        self._history = []

    def _observe(self) -> dict[str, Array]:
        cells = self._room.copy()
        # A pad under the agent can still be seen from its other cells.
        cells[self._agent] = _AGENT
        for index, pad in enumerate(self._history):
            cells[HEIGHT:, 2 * index : 2 * index + 2] = _COLORS[pad]
        return {"image": cells.repeat(self._scale[0], 0).repeat(self._scale[1], 1)}


def _pads(places: list[tuple[int, int]]) -> np.ndarray:
    """Returns the index of the pad of every cell [HEIGHT, WIDTH], -1 for none."""
    pads = np.full((HEIGHT, WIDTH), -1)
    for index, (row, column) in enumerate(places):
        pads[row : row + PAD, column : column + PAD] = index
    return pads


def _room(pads: np.ndarray) -> np.ndarray:
    """Draws all but the agent and the history, a pixel per cell."""
    cells = np.zeros((HEIGHT + HISTORY, WIDTH, 3), np.uint8)
    cells[:HEIGHT] = _WALL
    cells[1 : HEIGHT - 1, 1:-1] = _FLOOR
    for index, color in enumerate(_COLORS[: pads.max() + 1]):
        cells[:HEIGHT][pads == index] = color
    return cells
