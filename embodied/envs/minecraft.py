"""Minecraft through MineRL, in the process that steps it."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.base import Array, Env, Spaces
from embodied.envs import minecraft_spec as spec
from embodied.envs.keys import SIGNALS
from embodied.envs.registry import UnknownTask
from embodied.space import Space

TASKS = ("diamond", "wood")

# What leads to a diamond; each is rewarded once per episode.
MILESTONES = (
    *("log", "planks", "stick", "crafting_table", "wooden_pickaxe", "cobblestone"),
    *("stone_pickaxe", "iron_ore", "furnace", "iron_ingot", "iron_pickaxe", "diamond"),
)
TURN = 15.0  # Degrees.
PITCH = 60.0  # Degrees that the view can go up or down.
_KEYS = ("attack", "back", "forward", "jump", "left", "right", "sneak", "sprint")
_NOTHING: dict[str, Any] = {
    **dict.fromkeys(_KEYS, 0),
    **dict.fromkeys(("place", "equip", "craft", "nearbyCraft", "nearbySmelt"), "none"),
}
_CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"attack": 1},
    {"camera": (-TURN, 0.0)},
    {"camera": (TURN, 0.0)},
    {"camera": (0.0, -TURN)},
    {"camera": (0.0, TURN)},
    {"forward": 1},
    {"back": 1},
    {"left": 1},
    {"right": 1},
    {"jump": 1, "forward": 1},
    *({"place": name} for name in spec.PLACED),
    *({"craft": name} for name in spec.CRAFTED),
    *({"nearbyCraft": name} for name in spec.CRAFTED_NEARBY),
    *({"nearbySmelt": name} for name in spec.SMELTED),
    *({"equip": name} for name in spec.EQUIPPED),
)


class Minecraft(Env):
    """Survive, and get wood or a diamond.

    Args:
      task: 'diamond' rewards each of the twelve milestones to it once; 'wood' rewards
        every log. Both add a hundredth of what is gained or lost in health.
      size: height and width of images.
      break_speed: how much faster than usual blocks break.
      logs: whether to return, as `log/NAME`, the most of each item that was held.
      length: steps after which an episode is cut.
      seed: decides the worlds.
    """

    def __init__(
        self,
        task: str = "diamond",
        size: tuple[int, int] = (64, 64),
        break_speed: float = 100.0,
        logs: bool = False,
        length: int = 36_000,
        seed: int = 0,
    ):
        if task not in TASKS:
            raise UnknownTask.named("minecraft task", task, TASKS)
        self._task = task
        self._size = (int(size[0]), int(size[1]))
        self._logs = logs
        self._length = length
        self._rng = np.random.default_rng(seed)
        # The server's own limit never comes first.
        self._env = spec.Survival(self._size, break_speed, length + 100).make()
        self._most = np.zeros(len(spec.ITEMS), np.float32)
        self._health = 0.0
        self._pitch = 0.0
        self._count = 0
        self._done = True
        self._closed = False

    @property
    def obs_space(self) -> Spaces:
        """An image, the inventory, the tool in hand, and how the player is."""
        items, tools = len(spec.ITEMS), len(spec.TOOLS)
        logs = {f"log/{item}": Space(np.float32) for item in spec.ITEMS}
        return {
            "image": Space(np.uint8, (*self._size, 3)),
            "inventory": Space(np.float32, (items,), 0),
            "inventory_max": Space(np.float32, (items,), 0),
            "equipped": Space(np.float32, (tools,), 0, 1),
            "health": Space(np.float32),
            "hunger": Space(np.float32),
            "breath": Space(np.float32),
            **SIGNALS,
            **(logs if self._logs else {}),
        }

    @property
    def act_space(self) -> Spaces:
        """One of the moves, turns and crafts of the diamond's recipe."""
        return {
            "reset": Space(bool),
            "action": Space(np.int32, (), 0, len(_CHOICES)),
        }

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Steps, or makes a new world."""
        if self._done or action["reset"]:
            self._env.seed(int(self._rng.integers(0, 2**31 - 1)))
            raw = self._env.reset()
            self._count = 0
            self._pitch = 0.0
            self._done = False
            self._most = _inventory(raw)
            self._health = float(raw["life_stats"]["life"])
            return self._observe(raw, 0.0, is_first=True)
        raw, _, over, _ = self._env.step(self._command(int(action["action"])))
        self._count += 1
        reward = self._reward(raw)
        self._done = bool(over) or self._count >= self._length
        return self._observe(raw, reward, is_terminal=bool(over))

    def close(self) -> None:
        """Ends the game."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _command(self, index: int) -> dict[str, Any]:
        """Returns what MineRL takes for one of our actions."""
        choice = dict(_CHOICES[index])
        down, right = choice.pop("camera", (0.0, 0.0))
        before, self._pitch = self._pitch, np.clip(self._pitch + down, -PITCH, PITCH)
        camera = np.array([self._pitch - before, right], np.float32)
        return {**_NOTHING, **choice, "camera": camera}

    def _reward(self, raw: dict[str, Any]) -> float:
        before, self._most = self._most, np.maximum(self._most, _inventory(raw))
        index = spec.ITEMS.index
        if self._task == "wood":
            reward = float(self._most[index("log")] - before[index("log")])
        else:
            places = [index(name) for name in MILESTONES]
            reward = float(((before[places] == 0) & (self._most[places] > 0)).sum())
        health = float(raw["life_stats"]["life"])
        reward += 0.01 * (health - self._health)
        self._health = health
        return reward

    def _observe(
        self,
        raw: dict[str, Any],
        reward: float,
        is_first: bool = False,
        is_terminal: bool = False,
    ) -> dict[str, Array]:
        tool = str(raw["equipped_items"]["mainhand"]["type"])
        tool = tool if tool in spec.TOOLS else "other"
        equipped = np.array([name == tool for name in spec.TOOLS], np.float32)
        stats = raw["life_stats"]
        logs = zip(spec.ITEMS, self._most if self._logs else ())
        return {
            "image": np.array(raw["pov"], np.uint8),
            "inventory": _inventory(raw),
            "inventory_max": self._most,
            "equipped": equipped,
            "health": np.float32(float(stats["life"]) / 20),
            "hunger": np.float32(float(stats["food"]) / 20),
            "breath": np.float32(float(stats["air"]) / 300),
            "reward": np.float32(reward),
            "is_first": np.bool_(is_first),
            "is_last": np.bool_(self._done),
            "is_terminal": np.bool_(is_terminal),
            **{f"log/{item}": most for item, most in logs},
        }


def _inventory(raw: dict[str, Any]) -> np.ndarray:
    """Returns how many of each item are held [ITEMS] float32."""
    held = raw["inventory"]
    return np.array([float(held.get(item, 0)) for item in spec.ITEMS], np.float32)
