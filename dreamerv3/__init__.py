"""The DreamerV3 algorithm on top of the embodied framework.

`dreamerv3.train(env, steps, logdir)` trains an agent and returns its policy,
`dreamerv3.load(logdir)` returns the policy of a run, to act with. `dreamerv3.Agent` is
the agent itself.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # Without `typing`, whose import is slow.
if TYPE_CHECKING:
    from typing import Any

    from dreamerv3.agent import Agent
    from dreamerv3.api import train
    from dreamerv3.policies.inference import load

__all__ = ["Agent", "load", "train"]

# Modules to import on first use, because most importers of this package do not need
# them.
_HOMES = {
    "Agent": "dreamerv3.agent",
    "load": "dreamerv3.policies.inference",
    "train": "dreamerv3.api",
}


def __getattr__(name: str) -> Any:
    if name in ("export", "plot"):
        return importlib.import_module(f"dreamerv3.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
