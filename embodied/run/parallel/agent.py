"""The agent: actor and learner as two threads that share it. Agent process.

The launching process adds it to its supervisor with `add_agent`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from embodied.base import Agent
from embodied.run.console import SAVING, show_messages, stop_on_signals
from embodied.run.live import record_events, record_run
from embodied.run.parallel import wiring
from embodied.run.parallel.actor import parallel_actor
from embodied.run.parallel.learner import run_learner
from embodied.run.parallel.rendezvous import Rendezvous
from embodied.run.parallel.replicas import watch_replicas
from embodied.run.parallel.stopping import StopTimeout
from embodied.run.saving import write_config
from embodied.run.settings import RunSettings
from embodied.workers import Process, Progress, RestartPolicy, Supervisor, Thread
from embodied.workers.child import STOP
from embodied.workers.thread import Worker

GRACE = 10.0  # Seconds for roles to end after the agent.
LEAVE_SECONDS = 30.0  # For the actor to end after the learner.
ABANDON_SECONDS = 3.0  # For both to end once the run is abandoned.
# Names of errors that an agent would only raise again if its process were restarted.
_FINAL = ("ConfigError", "DiskTooSmallError", "ReplayMemoryError", "SetupError")
LIMITS = dict.fromkeys((*_FINAL, StopTimeout.__name__), 0)


def parallel_agent(make_agent: bytes | Callable[[], Agent], args: Any) -> None:
    """Acts and learns until `args.steps`, `args.duration`, or a signal; then saves.

    Args:
      make_agent: makes the agent; may be cloudpickled.
      args: the `run` block of the configuration and what belongs to it.

    Raises:
      Exception: that of the actor or the learner, whichever failed first.
      ReplicaLost: another replica is gone; all of them have to be started again.
    """
    settings = RunSettings.from_args(args)
    wiring.check_addresses(settings, "actor_addr", "replay_addr", "logger_addr")
    # This process does not start environments.
    settings = dataclasses.replace(settings, remote_envs=True)
    with (
        show_messages(),
        record_run(settings.logdir, "The agent"),
        stop_on_signals(SAVING) as stop,
    ):
        if settings.replicas > 1:
            _run_replica(make_agent, settings, stop)
        else:
            run_agent(make_agent, settings, stop)


def _run_replica(
    make_agent: bytes | Callable[[], Agent],
    settings: RunSettings,
    stop: threading.Event,
) -> None:
    """Runs the agent in a process of its own, and watches the other replicas."""
    done = threading.Event()
    with watch_replicas(settings, on_lost=done.set) as report_failure:
        supervisor = Supervisor(
            grace=GRACE,
            stall_timeout=settings.stall_timeout,
            on_failure=lambda error: report_failure(error.reason),
        )
        with supervisor:
            add_agent(supervisor, make_agent, settings, stop, done, Progress())
            supervisor.run(until=done)


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
      stop: when set, ends the run with a save.
      progress: notified of every batch and update.
      abandon: when set, ends the run at once without a save, as other roles are gone.
    """
    agent = wiring.load_factory(make_agent)()
    if settings.replica == 0:
        write_config(settings.logdir, agent)
        wiring.write_addresses(settings)
    barrier = threading.Barrier(2)
    step = progress.step if progress else lambda: None
    actor = Thread(parallel_actor, agent, barrier, settings, step, name="actor")
    learner = Thread(run_learner, agent, barrier, settings, stop, step, name="learner")
    actor.start()
    learner.start()
    rendezvous = Rendezvous(barrier, "agent", "launcher")
    if abandon is not None:
        threading.Thread(
            target=_abandon, args=(abandon, rendezvous), name="abandon", daemon=True
        ).start()
    while not learner.join(ABANDON_SECONDS):
        if rendezvous.abandoned:
            break  # It may wait for a silent role until the process ends.
    actor.join(ABANDON_SECONDS if rendezvous.abandoned else LEAVE_SECONDS)
    failure = rendezvous.failure
    if failure is not None:
        raise failure


def add_agent(
    supervisor: Supervisor,
    make_agent: bytes | Callable[[], Agent],
    settings: RunSettings,
    stop: threading.Event,
    done: threading.Event,
    progress: Progress,
) -> None:
    """Adds the agent to a supervisor; the run is over when it ends without an error.

    Args:
      supervisor: of the run.
      make_agent: makes the agent; may be cloudpickled.
      settings: of the run.
      stop: when set, ends the run with a save.
      done: set at the end of the run.
      progress: of the agent.
    """
    started = time.monotonic()
    current: list[Process] = []
    factory = make_agent if isinstance(make_agent, bytes) else None

    def end_if_well(worker: Worker) -> None:
        # Before its handler is installed, the signal ends it without a save.
        code = worker.exitcode if isinstance(worker, Process) else None
        if worker.error is None or (stop.is_set() and code == -signal.SIGTERM):
            done.set()

    def make_process() -> Process:
        # A restarted agent has what is left of the duration.
        left = max(0.001, settings.duration - (time.monotonic() - started))
        duration = left if settings.duration else 0.0
        process = Process(
            _agent_process,
            factory or cloudpickle.dumps(make_agent),
            dataclasses.replace(settings, duration=duration),
            progress,
            name="agent",
            fds=[progress.fd],
            shielded=True,
        )
        process.on_exit(end_if_well)
        current[:] = [process]
        return process

    def make_thread() -> Thread:
        # The supervisor also sets `done` when it stops the other roles.
        thread = Thread(
            *(run_agent, make_agent, settings, stop, progress, done), name="agent"
        )
        thread.on_exit(end_if_well)
        return thread

    if is_apart(settings):
        # A single replica cannot rejoin the others.
        restarts = settings.restarts["agent"] if settings.replicas == 1 else 0
        policy = RestartPolicy(restarts, limits=LIMITS)
        supervisor.add("agent", "agent", make_process, policy, progress)
        threading.Thread(
            target=_pass_on,
            args=(stop, done, current),
            name="pass on the stop",
            daemon=True,
        ).start()
    else:
        supervisor.add("agent", "agent", make_thread, RestartPolicy(0), progress)


def is_apart(settings: RunSettings) -> bool:
    """Returns whether the launcher runs the agent in a process of its own.

    With several replicas it always does: if the first replica is gone, JAX aborts the
    agent's process, and if another one is gone, the agent hangs.
    """
    return settings.agent_process or settings.replicas > 1


def _agent_process(
    make_agent: bytes, settings: RunSettings, progress: Progress
) -> None:
    with (
        show_messages(),
        record_events(settings.logdir),
        stop_on_signals() as stop,
    ):
        run_agent(make_agent, settings, stop, progress)


def _pass_on(
    stop: threading.Event, done: threading.Event, current: list[Process]
) -> None:
    """Tells the agent's process to save and exit once `stop` is set."""
    stop.wait()
    if done.is_set():
        return
    pid = current[0].pid if current and current[0].running else None
    if pid is None:
        done.set()  # It has failed and was not restarted yet: nothing to save.
    else:
        os.kill(pid, STOP)


def _abandon(abandon: threading.Event, rendezvous: Rendezvous) -> None:
    abandon.wait()
    rendezvous.abandon()
