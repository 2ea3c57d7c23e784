"""The agent: actor and learner as two threads that share it. Agent process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from embodied.base import Agent
from embodied.run.console import SAVING, show_messages, stop_on_signals
from embodied.run.parallel import wiring
from embodied.run.parallel.actor import run_actor
from embodied.run.parallel.ending import Ending
from embodied.run.parallel.learner import run_learner
from embodied.run.parallel.replicas import join_replicas
from embodied.run.saving import describe_run
from embodied.workers import Progress, Thread

LEAVE_SECONDS = 30.0  # For the actor to end after the learner.


def parallel_agent(make_agent: bytes | Callable[[], Agent], args: Any) -> None:
    """Acts and learns until `args.steps`, `args.duration`, or a signal; then saves.

    Args:
      make_agent: makes the agent; may be cloudpickled.
      args: the `run` block of the configuration and what belongs to it.

    Raises:
      Exception: that of the actor or the learner, whichever failed first.
    """
    wiring.check_addresses(args, "actor_addr", "replay_addr", "logger_addr")
    with show_messages(), stop_on_signals(SAVING) as stop:
        # Nobody here starts environments.
        run_agent(make_agent, args.update(remote_envs=True), stop)


def run_agent(
    make_agent: bytes | Callable[[], Agent],
    args: Any,
    stop: threading.Event,
    progress: Progress | None = None,
    abandon: threading.Event | None = None,
) -> None:
    """Acts and learns until the end of the run, or until `stop` is set; then saves.

    Args:
      make_agent: makes the agent; may be cloudpickled.
      args: the `run` block of the configuration and what belongs to it.
      stop: ends the run well.
      progress: told of every batch and update.
      abandon: ends it at once and without a save, since other roles are gone.
    """
    agent = wiring.load_factory(make_agent)()
    if args.replica == 0:
        describe_run(args.logdir, agent)
    barrier = threading.Barrier(2)
    step = progress.step if progress else lambda: None
    actor = Thread(_act, agent, barrier, args, step, name="actor")
    learner = Thread(_learn, agent, barrier, args, stop, step, name="learner")
    if abandon is not None:
        threading.Thread(
            target=_abandon, args=(abandon, barrier), name="abandon", daemon=True
        ).start()
    actor.start()
    learner.start()
    learner.join()
    actor.join(LEAVE_SECONDS)
    failure = Ending(barrier, "agent", "launcher").failure
    if failure is not None:
        raise failure


def _abandon(abandon: threading.Event, barrier: threading.Barrier) -> None:
    abandon.wait()
    Ending(barrier, "launcher", "agent").abandon()


def _act(
    agent: Agent, barrier: threading.Barrier, args: Any, progress: Callable[[], None]
) -> None:
    with Ending(barrier, "actor", "learner") as ending:
        if ending.meet():
            run_actor(agent, ending, args, progress)


def _learn(
    agent: Agent,
    barrier: threading.Barrier,
    args: Any,
    stop: threading.Event,
    progress: Callable[[], None],
) -> None:
    with Ending(barrier, "learner", "actor") as ending, join_replicas(args) as replicas:
        run_learner(agent, ending, args, stop, progress, replicas)
