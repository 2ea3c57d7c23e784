"""Environments, each in its own module and imported only when one is made."""

from embodied.envs.registry import (
    SUITES,
    MissingExtra,
    Suite,
    UnknownTask,
    env_seed,
    make,
)

__all__ = ["SUITES", "MissingExtra", "Suite", "UnknownTask", "env_seed", "make"]
