"""Minecraft through MineRL, in the process that steps it."""

from __future__ import annotations

from typing import Any

import numpy as np
from minerl.herobraine.env_specs.simple_embodiment import SimpleEmbodimentEnvSpec
from minerl.herobraine.hero import handlers, mc

from embodied.base import Array, Spaces
from embodied.envs.game import Game
from embodied.envs.keys import SIGNALS
from embodied.envs.registry import check_task
from embodied.space import Space

TASKS = ("diamond", "wood")

ITEMS = (
    *("log", "planks", "stick", "crafting_table", "wooden_pickaxe", "dirt"),
    *("cobblestone", "stone", "stone_pickaxe", "furnace", "coal", "torch"),
    *("iron_ore", "iron_ingot", "iron_pickaxe", "diamond"),
)
TOOLS = ("air", "wooden_pickaxe", "stone_pickaxe", "iron_pickaxe", "other")
PLACED = ("dirt", "cobblestone", "crafting_table", "furnace", "torch")
CRAFTED = ("planks", "stick", "crafting_table", "torch")
CRAFTED_NEARBY = ("wooden_pickaxe", "stone_pickaxe", "iron_pickaxe", "furnace")
SMELTED = ("iron_ingot", "coal")
EQUIPPED = ("wooden_pickaxe", "stone_pickaxe", "iron_pickaxe")

# Items on the way to a diamond; each is rewarded once per episode.
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
    *({"place": name} for name in PLACED),
    *({"craft": name} for name in CRAFTED),
    *({"nearbyCraft": name} for name in CRAFTED_NEARBY),
    *({"nearbySmelt": name} for name in SMELTED),
    *({"equip": name} for name in EQUIPPED),
)


class Minecraft(Game):
    """Survive, and get wood or a diamond.

    Args:
      task: 'diamond' rewards each of the twelve milestones to it once; 'wood' rewards
        every log. Both add a hundredth of the change in health.
      size: height and width of images.
      break_speed: how much faster than usual blocks break.
      logs: whether to return the most of each item held so far, as `log/NAME`.
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
        check_task("minecraft task", task, TASKS)
        super().__init__(len(_CHOICES))
        self._task = task
        self._size = (int(size[0]), int(size[1]))
        self._logs = logs
        self._length = length
        self._rng = np.random.default_rng(seed)
        # The limit of the server is higher, so that it is never reached.
        self._env = _Survival(self._size, break_speed, length + 100).make()
        self._most = np.zeros(len(ITEMS), np.float32)
        self._health = 0.0
        self._pitch = 0.0
        self._count = 0
        self._closed = False

    @property
    def obs_space(self) -> Spaces:
        """An image, the inventory, the tool in hand, and the state of the player."""
        items, tools = len(ITEMS), len(TOOLS)
        logs = {f"log/{item}": Space(np.float32) for item in ITEMS}
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

    def close(self) -> None:
        """Ends the game."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _start(self) -> dict[str, Array]:
        self._env.seed(int(self._rng.integers(0, 2**31 - 1)))
        raw = self._env.reset()
        self._count = 0
        self._pitch = 0.0
        self._most = _inventory(raw)
        self._health = float(raw["life_stats"]["life"])
        return self._observe(raw)

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        raw, _, over, _ = self._env.step(self._command(action))
        self._count += 1
        reward = self._reward(raw)
        done = bool(over) or self._count >= self._length
        return self._observe(raw), reward, done, bool(over)

    def _command(self, index: int) -> dict[str, Any]:
        """Returns the MineRL command of the action with this index."""
        choice = dict(_CHOICES[index])
        down, right = choice.pop("camera", (0.0, 0.0))
        before, self._pitch = self._pitch, np.clip(self._pitch + down, -PITCH, PITCH)
        camera = np.array([self._pitch - before, right], np.float32)
        return {**_NOTHING, **choice, "camera": camera}

    def _reward(self, raw: dict[str, Any]) -> float:
        before, self._most = self._most, np.maximum(self._most, _inventory(raw))
        index = ITEMS.index
        if self._task == "wood":
            reward = float(self._most[index("log")] - before[index("log")])
        else:
            places = [index(name) for name in MILESTONES]
            reward = float(((before[places] == 0) & (self._most[places] > 0)).sum())
        health = float(raw["life_stats"]["life"])
        reward += 0.01 * (health - self._health)
        self._health = health
        return reward

    def _observe(self, raw: dict[str, Any]) -> dict[str, Array]:
        tool = str(raw["equipped_items"]["mainhand"]["type"])
        tool = tool if tool in TOOLS else "other"
        equipped = np.array([name == tool for name in TOOLS], np.float32)
        stats = raw["life_stats"]
        logs = zip(ITEMS, self._most if self._logs else ())
        return {
            "image": np.array(raw["pov"], np.uint8),
            "inventory": _inventory(raw),
            "inventory_max": self._most,
            "equipped": equipped,
            "health": np.float32(float(stats["life"]) / 20),
            "hunger": np.float32(float(stats["food"]) / 20),
            "breath": np.float32(float(stats["air"]) / 300),
            **{f"log/{item}": most for item, most in logs},
        }


def _inventory(raw: dict[str, Any]) -> np.ndarray:
    """Returns how many of each item are held [ITEMS] float32."""
    held = raw["inventory"]
    return np.array([float(held.get(item, 0)) for item in ITEMS], np.float32)


class _Survival(SimpleEmbodimentEnvSpec):
    """The usual world, in which blocks break fast and crafting needs no windows.

    Args:
      size: height and width of images.
      break_speed: how much faster than usual blocks break.
      length: steps after which the server ends the episode.
    """

    def __init__(self, size: tuple[int, int], break_speed: float, length: int):
        self._break_speed = break_speed
        super().__init__(
            "DreamerSurvival-v0",
            resolution=(size[1], size[0]),
            max_episode_steps=length,
        )

    def create_observables(self) -> list[Any]:
        """Adds inventory, tool in hand, health, food and air to the image."""
        return [
            *super().create_observables(),
            handlers.FlatInventoryObservation(list(ITEMS)),
            handlers.EquippedItemObservation(
                list(TOOLS), _default="air", _other="other"
            ),
            handlers.ObservationFromLifeStats(),
        ]

    def create_actionables(self) -> list[Any]:
        """Adds placing, crafting, smelting and equipping to moving and looking."""
        none = {"_other": "none", "_default": "none"}
        return [
            *super().create_actionables(),
            handlers.PlaceBlock(["none", *PLACED], **none),
            handlers.EquipAction(["none", "air", *EQUIPPED], **none),
            handlers.CraftAction(["none", *CRAFTED], **none),
            handlers.CraftNearbyAction(["none", *CRAFTED_NEARBY], **none),
            handlers.SmeltItemNearby(["none", *SMELTED], **none),
        ]

    def create_agent_start(self) -> list[Any]:
        """Makes blocks break faster."""
        return [handlers.AgentStartBreakSpeedMultiplier(self._break_speed)]

    def create_server_world_generators(self) -> list[Any]:
        """Makes a new world in every episode."""
        return [handlers.DefaultWorldGenerator(force_reset=True)]

    def create_server_quit_producers(self) -> list[Any]:
        """Ends when time is up or the player is dead."""
        limit = self.max_episode_steps * mc.MS_PER_STEP
        return [
            handlers.ServerQuitFromTimeUp(time_limit_ms=limit),
            handlers.ServerQuitWhenAnyAgentFinishes(),
        ]

    def create_server_initial_conditions(self) -> list[Any]:
        """Starts at noon, with monsters."""
        return [
            handlers.TimeInitialCondition(allow_passage_of_time=True, start_time=6000),
            handlers.SpawningInitialCondition(allow_spawning=True),
        ]

    def create_rewardables(self) -> list[Any]:
        """Returns none: rewards are computed from the inventory."""
        return []

    def create_agent_handlers(self) -> list[Any]:
        """Returns none."""
        return []

    def create_server_decorators(self) -> list[Any]:
        """Returns none."""
        return []

    def is_from_folder(self, folder: str) -> bool:
        """Returns False: there are no recordings of this task."""
        return False

    def determine_success_from_rewards(self, rewards: list[float]) -> bool:
        """Returns False: success is not defined."""
        return False

    def get_docstring(self) -> str:
        """Returns the docstring of the class."""
        return type(self).__doc__ or ""
