"""Walkers in mazes: locomotion and navigation at once; in the process that steps them.

The mazes are made here; the walkers and the physics are those of dm_control.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

import numpy as np

from embodied.base import Array, Spaces
from embodied.envs import rendering
from embodied.envs.from_dm import FromDM
from embodied.envs.keys import check_at_least
from embodied.envs.registry import check_task
from embodied.space import Space

# Modules and classes of dm_control.locomotion.walkers, and the width of corridors for
# them in metres.
WALKERS = {
    "ant": ("ant", "Ant", 3.0),
    "ball": ("jumping_ball", "RollingBallWithHead", 2.0),
    "rodent": ("rodent", "Rat", 1.0),
}
SIZES = {"s": 2, "m": 3, "l": 5, "xl": 8}  # Crossings per side.
TASKS = tuple(
    f"{walker}_{layout}"
    for walker in WALKERS
    for layout in (*(f"maze_{size}" for size in SIZES), "empty")
)
_MAZE_SEED = 3  # Fixed, so that mazes are the same in all runs.
_EMPTY = 3  # Crossings per side of the room without inner walls.
_CAMERA_KEY = "walker/egocentric_camera"


class LocoNav(FromDM):
    """Control the joints of a walker, and find the target in a maze.

        *******     The maze_m. The walker starts at a P that is drawn anew in every
        *P.G*P*     episode, and the target is at one of the Gs. Reaching it gives
        *.*.*.*     reward 1 and puts the walker at another P, as often as time
        *G*P*G*     allows. All mazes are the same for every seed.
        *.*.*.*
        *P.G.P*
        *******

    `log/coverage` is the share of the maze's cells that were entered so far.

    Args:
      task: walker and maze: 'ant', 'ball' or 'rodent', and 'maze_s', 'maze_m',
        'maze_l', 'maze_xl' or 'empty', such as 'ant_maze_m'.
      size: height and width of images.
      repeat: number of steps that each action is repeated for.
      camera: index of the camera; -1 for the walker's view.
      length: steps, before repeats, after which an episode is cut.
      seed: decides the places of walkers and targets.
    """

    def __init__(
        self,
        task: str = "ant_maze_m",
        size: tuple[int, int] = (64, 64),
        repeat: int = 1,
        camera: int = -1,
        length: int = 3000,
        seed: int = 0,
    ):
        check_task("loconav task", task, TASKS)
        check_at_least(1, length=length)
        rendering.choose_backend(images=True)
        self._size = (int(size[0]), int(size[1]))
        self._camera = camera
        walker, layout = task.split("_", 1)
        env, self._walker, self._arena = _build(
            walker, layout, self._size, camera == -1, length, seed
        )
        super().__init__(env, repeat=repeat)
        # Fails now, not later.
        rendering.render(env.physics, self._size, max(0, camera))
        self._cells = sum(_draw(layout).count(token) for token in ".PG")
        self._visited: set[tuple[int, int]] = set()

    @property
    def obs_space(self) -> Spaces:
        """An image, joints and senses of the walker, and `log/coverage`."""
        spaces = super().obs_space
        spaces.pop(_CAMERA_KEY, None)
        return {
            **spaces,
            "image": Space(np.uint8, (*self._size, 3)),
            "log/coverage": Space(np.float32),
        }

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Steps, or starts an episode."""
        obs = super().step(action)
        physics = self.dm_env.physics
        if self._camera == -1:
            obs["image"] = obs.pop(_CAMERA_KEY)
        else:
            obs["image"] = rendering.render(physics, self._size, self._camera)
        if obs["is_first"]:
            self._visited.clear()
        position = physics.bind(self._walker.root_body).xpos
        cell = np.round(self._arena.world_to_grid_positions([position])[0])
        self._visited.add((int(cell[0]), int(cell[1])))
        coverage = len(self._visited) / self._cells
        return {**obs, "log/coverage": np.float32(coverage)}


def _build(
    walker_name: str,
    layout: str,
    size: tuple[int, int],
    egocentric: bool,
    length: int,
    seed: int,
) -> tuple[Any, Any, Any]:
    """Returns the environment of dm_control, its walker and its arena."""
    # Imported here, because it must come after the choice of the backend.
    try:
        import labmaze
        from dm_control import composer
        from dm_control.locomotion.arenas import mazes
        from dm_control.locomotion.tasks import random_goal_maze
    except (AttributeError, RuntimeError) as error:  # OpenGL cannot be loaded.
        raise rendering.failure(error) from error

    module, name, scale = WALKERS[walker_name]
    walkers = importlib.import_module(f"dm_control.locomotion.walkers.{module}")
    walker = getattr(walkers, name)()
    rng = np.random.RandomState(seed)
    maze = labmaze.FixedMazeWithRandomGoals(_draw(layout), random_state=rng)
    arena = mazes.MazeWithTargets(maze, xy_scale=scale, z_height=scale / 2)
    task = random_goal_maze.RepeatSingleGoalMaze(
        walker,
        arena,
        contact_termination=False,
        aliveness_threshold=-2.0,  # Never: a walker that fell may get up.
        max_repeats=length,
    )
    camera = walker.observables.egocentric_camera
    camera.enabled = egocentric
    camera.height, camera.width = size
    env = composer.Environment(
        task,
        # Half a step less, so that rounding does not add one.
        time_limit=(length - 0.5) * task.control_timestep,
        random_state=rng,
        strip_singleton_obs_buffer_dim=True,
    )
    return env, walker, arena


def _draw(layout: str) -> str:
    """Draws a maze: walls '*', starts 'P' and targets 'G' at every other crossing."""
    size = layout.removeprefix("maze_")
    side = SIZES.get(size, _EMPTY)
    width = 2 * side + 1
    cells = [["*"] * width for _ in range(width)]
    if layout == "empty":
        for row in range(1, width - 1):
            cells[row][1:-1] = "." * (width - 2)
    for row, column in _passages(side) if layout != "empty" else ():
        cells[row][column] = "."
    for row in range(side):
        for column in range(side):
            cells[2 * row + 1][2 * column + 1] = "PG"[(row + column) % 2]
    return "".join(f"{''.join(row)}\n" for row in cells)


def _passages(side: int) -> list[tuple[int, int]]:
    """Returns the open walls between crossings: a spanning tree, and some more."""
    rng = random.Random(_MAZE_SEED)
    crossings = [(row, column) for row in range(side) for column in range(side)]
    seen, stack, open_walls = {crossings[0]}, [crossings[0]], set()
    while stack:
        row, column = stack[-1]
        near = [
            (row + down, column + right)
            for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0))
        ]
        fresh = [cell for cell in near if cell in crossings and cell not in seen]
        if not fresh:
            stack.pop()
            continue
        cell = fresh[int(rng.random() * len(fresh))]
        seen.add(cell)
        stack.append(cell)
        open_walls.add((row + cell[0] + 1, column + cell[1] + 1))
    # More openings make loops, so that there is more than one way.
    inner = [
        (row, column)
        for row in range(1, 2 * side)
        for column in range(1, 2 * side)
        if (row + column) % 2
    ]
    for _ in range(side - 1):
        open_walls.add(inner[int(rng.random() * len(inner))])
    return sorted(open_walls)
