"""What MineRL is asked for: sensors, commands and world; in the env's process."""

from __future__ import annotations

from typing import Any

from minerl.herobraine.env_specs.simple_embodiment import SimpleEmbodimentEnvSpec
from minerl.herobraine.hero import handlers, mc

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


class Survival(SimpleEmbodimentEnvSpec):
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
        """Lets blocks break faster."""
        return [handlers.AgentStartBreakSpeedMultiplier(self._break_speed)]

    def create_server_world_generators(self) -> list[Any]:
        """A new world in every episode."""
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
        """None: rewards are made from the inventory."""
        return []

    def create_agent_handlers(self) -> list[Any]:
        """None."""
        return []

    def create_server_decorators(self) -> list[Any]:
        """None."""
        return []

    def is_from_folder(self, folder: str) -> bool:
        """There are no recordings of this task."""
        return False

    def determine_success_from_rewards(self, rewards: list[float]) -> bool:
        """Success is not defined."""
        return False

    def get_docstring(self) -> str:
        """Returns what the class says."""
        return type(self).__doc__ or ""
