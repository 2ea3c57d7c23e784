"""Wrappers that fit environments to agents, in the process that steps them."""

from __future__ import annotations

from embodied.base import Env
from embodied.wrappers.batch_wrappers import FitBatch
from embodied.wrappers.checking import CheckSpaces, SpaceError, Wrapper
from embodied.wrappers.episode_wrappers import (
    ActionRepeat,
    AddFrames,
    NotRenderable,
    RestartOnException,
    TimeLimit,
)
from embodied.wrappers.value_wrappers import (
    ClipAction,
    DiscretizeAction,
    NormalizeAction,
    ResizeImage,
    UnifyDtypes,
)

__all__ = [
    "ActionRepeat",
    "AddFrames",
    "CheckSpaces",
    "ClipAction",
    "DiscretizeAction",
    "FitBatch",
    "NormalizeAction",
    "NotRenderable",
    "ResizeImage",
    "RestartOnException",
    "SpaceError",
    "TimeLimit",
    "UnifyDtypes",
    "Wrapper",
    "wrap",
]


def wrap(env: Env, nonfinite: str = "raise") -> Env:
    """Applies the standard stack, after which any agent can use the environment.

    From the environment outwards: [-1, 1] is scaled to the finite bounds of continuous
    actions; dtypes are unified; observations and actions are checked against the
    spaces that the agent sees; its continuous actions are clipped.

    Args:
      env: any Env, with spaces of type `embodied.Space` or `elements.Space`.
      nonfinite: 'raise' or 'pass', see `CheckSpaces`.
    """
    spaces = Wrapper(env).act_space.items()
    continuous = [key for key, space in spaces if space.dtype.kind == "f"]
    for key in continuous:
        env = NormalizeAction(env, key)
    unified = UnifyDtypes(env)
    if unified.converts:
        env = unified
    env = CheckSpaces(env, nonfinite)
    # Outside the check, because agents sample from unbounded distributions.
    for key in continuous:
        env = ClipAction(env, key)
    return env
