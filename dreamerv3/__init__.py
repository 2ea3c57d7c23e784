"""The DreamerV3 algorithm on top of the embodied framework.

`dreamerv3.load(logdir)` returns the policy of a run, to act with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreamerv3.policies.inference import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # Here, because most importers of this package do not need the libraries behind it.
    if name == "load":
        from dreamerv3.policies.inference import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
