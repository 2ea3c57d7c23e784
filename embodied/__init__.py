"""A framework for training world-model agents; importing it imports no JAX."""

from embodied import clock, envs, replay, run, streams, wrappers
from embodied.base import Agent, BatchEnv, Env, Stream
from embodied.clock import GlobalClock, LocalClock
from embodied.driver import Driver
from embodied.random_agent import RandomAgent
from embodied.replay import Replay, limiters, selectors
from embodied.space import Space
from embodied.wrappers import Wrapper

__all__ = [
    "Agent",
    "BatchEnv",
    "Driver",
    "Env",
    "GlobalClock",
    "LocalClock",
    "RandomAgent",
    "Replay",
    "Space",
    "Stream",
    "Wrapper",
    "clock",
    "envs",
    "limiters",
    "replay",
    "run",
    "selectors",
    "streams",
    "wrappers",
]
