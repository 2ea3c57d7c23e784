"""The list of suites, in any process: imports none of their environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Suite:
    """Where the environments of one suite come from.

    Attributes:
      name: what stands before the first underscore of a task.
      module: module that is imported when a task of the suite is made.
      factory: its attribute that is called with the rest of the task's name, `seed`,
        and the suite's options, and returns an Env.
      extra: the extra of this package to install; empty if none is needed.
      doc: one line for listings.
      install: how to install what the suite needs, where no extra can.
    """

    name: str
    module: str
    factory: str
    extra: str
    doc: str
    install: str = ""


_SUITES = (
    Suite(
        "atari",
        "embodied.envs.atari",
        "Atari",
        extra="atari",
        doc="Atari games, 200M protocol, such as atari_pong.",
    ),
    Suite(
        "atari100k",
        "embodied.envs.atari",
        "atari100k",
        extra="atari",
        doc="Atari games, 100k protocol, such as atari100k_boxing.",
    ),
    Suite(
        "bsuite",
        "embodied.envs.bsuite",
        "make_bsuite",
        extra="bsuite",
        doc="Small experiments of the Behaviour Suite, such as bsuite_catch/0.",
    ),
    Suite(
        "crafter",
        "embodied.envs.crafter",
        "Crafter",
        extra="crafter",
        doc="An open world of survival and crafting: reward, noreward.",
    ),
    Suite(
        "dm",
        "embodied.envs.from_dm",
        "FromDM",
        extra="",
        doc="Any dm_env environment, as dm_package.module:Name.",
    ),
    Suite(
        "dmc",
        "embodied.envs.dmc",
        "DMC",
        extra="dmc",
        doc="The DeepMind Control Suite, such as dmc_walker_walk.",
    ),
    Suite(
        "dmlab",
        "embodied.envs.dmlab",
        "DMLab",
        extra="",
        doc="Levels of DeepMind Lab, such as dmlab_explore_goal_locations_small.",
        install="Build it as https://github.com/google-deepmind/lab describes: there "
        "are no packages of it.",
    ),
    Suite(
        "dummy",
        "embodied.envs.dummy",
        "Dummy",
        extra="",
        doc="Cheap made-up observations of every kind: disc, cont, both.",
    ),
    Suite(
        "grid",
        "embodied.envs.grid",
        "Grid",
        extra="",
        doc="A small arena on images, learnable on a CPU in minutes: reach, avoid.",
    ),
    Suite(
        "gym",
        "embodied.envs.from_gym",
        "FromGym",
        extra="",
        doc="Any id that is registered with Gymnasium, such as gym_CartPole-v1.",
    ),
    Suite(
        "loconav",
        "embodied.envs.loconav",
        "LocoNav",
        extra="dmc",
        doc="Walkers in mazes, such as loconav_ant_maze_m.",
    ),
    Suite(
        "memmaze",
        "embodied.envs.memmaze",
        "make_memmaze",
        extra="memmaze",
        doc="Objects to find again in a 3D maze: 9x9, 11x11, 13x13, 15x15.",
    ),
    Suite(
        "minecraft",
        "embodied.envs.minecraft",
        "Minecraft",
        extra="",
        doc="Minecraft through MineRL: diamond, wood.",
        install="Install Java 8 and MineRL 0.4 as https://minerl.readthedocs.io "
        "describes.",
    ),
    Suite(
        "minigrid",
        "embodied.envs.minigrid",
        "MiniGrid",
        extra="minigrid",
        doc="Grid rooms with doors and keys, such as minigrid_DoorKey-5x5.",
    ),
    Suite(
        "pinpad",
        "embodied.envs.pinpad",
        "PinPad",
        extra="",
        doc="Pads to step on in the right order: three, four, ... eight.",
    ),
    Suite(
        "procgen",
        "embodied.envs.procgen",
        "ProcGen",
        extra="",
        doc="Games with levels that never repeat, such as procgen_coinrun.",
        install="Build it as https://github.com/openai/procgen describes: there are "
        "no packages of it for this Python.",
    ),
)
SUITES: Mapping[str, Suite] = MappingProxyType({suite.name: suite for suite in _SUITES})
