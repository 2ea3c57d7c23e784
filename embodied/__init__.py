"""A framework for training world-model agents; importing it imports no JAX."""

from embodied.base import Agent, Env, Stream
from embodied.space import Space

__all__ = ["Agent", "Env", "Space", "Stream"]
