"""Parallel training: one module per role, and a launcher for all roles.

env -> actor -> replay -> learner, and all roles -> logger. Actor and learner are two
threads of the agent; the others are processes, on this machine or on others.
"""

from embodied.run.parallel.actor import parallel_actor
from embodied.run.parallel.agent import parallel_agent
from embodied.run.parallel.env import parallel_env, parallel_envs
from embodied.run.parallel.launcher import combined
from embodied.run.parallel.learner import parallel_learner
from embodied.run.parallel.logger import parallel_logger
from embodied.run.parallel.replay import parallel_replay

__all__ = [
    "combined",
    "parallel_actor",
    "parallel_agent",
    "parallel_env",
    "parallel_envs",
    "parallel_learner",
    "parallel_logger",
    "parallel_replay",
]
