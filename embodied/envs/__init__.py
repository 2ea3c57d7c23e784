"""Environments, each in its own module and imported only when one is made."""

from embodied.envs.registry import MissingExtra, UnknownTask, env_seed, make
from embodied.envs.suites import SUITES, Suite

__all__ = ["SUITES", "MissingExtra", "Suite", "UnknownTask", "env_seed", "make"]
