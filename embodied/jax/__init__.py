"""Building blocks of agents in JAX: devices, compiled steps, networks, optimiser."""

from typing import Any

__all__ = ["Agent"]


def __getattr__(name: str) -> Any:
    # On first use, because submodules are also used where JAX is not set up.
    if name == "Agent":
        from embodied.jax.agent import JaxAgent

        return JaxAgent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
