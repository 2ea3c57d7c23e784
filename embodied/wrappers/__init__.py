"""Wrappers that fit environments to agents, in the process that steps them."""

from __future__ import annotations

from embodied.base import Env
from embodied.wrappers.actions import ClipAction, DiscretizeAction, NormalizeAction
from embodied.wrappers.base import SpaceError, Wrapper
from embodied.wrappers.checks import CheckSpaces
from embodied.wrappers.dtypes import UnifyDtypes
from embodied.wrappers.episodes import ActionRepeat, RestartOnException, TimeLimit
from embodied.wrappers.images import ResizeImage

__all__ = [
    "ActionRepeat",
    "CheckSpaces",
    "ClipAction",
    "DiscretizeAction",
    "NormalizeAction",
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

    From the environment outwards: what it returns is checked against its own spaces;
    [-1, 1] is scaled to the finite bounds of continuous actions; dtypes are unified;
    what the agent sees and does is checked; its continuous actions are clipped.

    Args:
      env: any Env, its spaces ours or `elements.Space`.
      nonfinite: 'raise' or 'pass', see `CheckSpaces`.
    """
    env = CheckSpaces(env, nonfinite)
    spaces = env.act_space.items()
    continuous = [key for key, space in spaces if not space.discrete]
    for key in continuous:
        env = NormalizeAction(env, key)
    env = UnifyDtypes(env)
    env = CheckSpaces(env, nonfinite)
    # Outside the check, because agents sample from unbounded distributions.
    for key in continuous:
        env = ClipAction(env, key)
    return env
