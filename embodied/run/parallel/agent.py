"""The agent: actor and learner as two threads that share it. Agent process."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from embodied.base import Agent
from embodied.run.console import SAVING, show_messages, stop_on_signals
from embodied.run.live import record_run
from embodied.run.parallel import wiring
from embodied.run.parallel.actor import run_actor
from embodied.run.parallel.learner import run_learner
from embodied.run.parallel.rendezvous import Rendezvous
from embodied.run.parallel.replicas import join_replicas
from embodied.run.saving import describe_run
from embodied.run.settings import RunSettings
from embodied.workers import Progress, Thread

LEAVE_SECONDS = 30.0  # For the actor to end after the learner.
ABANDON_SECONDS = 3.0  # For both to end if nobody is to wait any more.


def parallel_agent(make_agent: bytes | Callable[[], Agent], args: Any) -> None:
    """Acts and learns until `args.steps`, `args.duration`, or a signal; then saves.

    Args:
      make_agent: makes the agent; may be cloudpickled.
      args: the `run` block of the configuration and what belongs to it.

    Raises:
      Exception: that of the actor or the learner, whichever failed first.
    """
    settings = RunSettings.from_args(args)
    wiring.check_addresses(settings, "actor_addr", "replay_addr", "logger_addr")
    with (
        show_messages(),
        record_run(settings.logdir, "The agent"),
        stop_on_signals(SAVING) as stop,
    ):
        # Nobody here starts environments.
        run_agent(make_agent, dataclasses.replace(settings, remote_envs=True), stop)


def run_agent(
    make_agent: bytes | Callable[[], Agent],
    settings: RunSettings,
    stop: threading.Event,
    progress: Progress | None = None,
    abandon: threading.Event | None = None,
) -> None:
    """Acts and learns until the end of the run, or until `stop` is set; then saves.

    Args:
      make_agent: makes the agent; may be cloudpickled.
      settings: of the run.
      stop: ends the run well.
      progress: told of every batch and update.
      abandon: ends it at once and without a save, since other roles are gone.
    """
    agent = wiring.load_factory(make_agent)()
    if settings.replica == 0:
        describe_run(settings.logdir, agent)
    barrier = threading.Barrier(2)
    step = progress.step if progress else lambda: None
    actor = Thread(_act, agent, barrier, settings, step, name="actor")
    learner = Thread(_learn, agent, barrier, settings, stop, step, name="learner")
    if abandon is not None:
        threading.Thread(
            target=_abandon, args=(abandon, barrier), name="abandon", daemon=True
        ).start()
    actor.start()
    learner.start()
    rendezvous = Rendezvous(barrier, "agent", "launcher")
    while not learner.join(ABANDON_SECONDS):
        if rendezvous.abandoned:
            break  # It may wait for who does not answer, until the process ends.
    actor.join(ABANDON_SECONDS if rendezvous.abandoned else LEAVE_SECONDS)
    failure = rendezvous.failure
    if failure is not None:
        raise failure


def _abandon(abandon: threading.Event, barrier: threading.Barrier) -> None:
    abandon.wait()
    Rendezvous(barrier, "launcher", "agent").abandon()


def _act(
    agent: Agent,
    barrier: threading.Barrier,
    settings: RunSettings,
    progress: Callable[[], None],
) -> None:
    with Rendezvous(barrier, "actor", "learner") as rendezvous:
        if rendezvous.meet():
            run_actor(agent, rendezvous, settings, progress)


def _learn(
    agent: Agent,
    barrier: threading.Barrier,
    settings: RunSettings,
    stop: threading.Event,
    progress: Callable[[], None],
) -> None:
    with (
        Rendezvous(barrier, "learner", "actor") as rendezvous,
        join_replicas(settings) as replicas,
    ):
        run_learner(agent, rendezvous, settings, stop, progress, replicas)
