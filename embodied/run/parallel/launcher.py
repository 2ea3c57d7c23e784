"""Starts, supervises and ends all roles of a run. The launching process."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cloudpickle import dumps

from embodied.checkpoint import write_file
from embodied.rpc.threads import raise_descriptor_limit
from embodied.run.console import SAVING, show_messages, stop_on_signals
from embodied.run.live import RESTART, record_run
from embodied.run.parallel import agent, env, replay, wiring
from embodied.run.parallel import logger as loggers
from embodied.run.parallel.replicas import watch_replicas
from embodied.run.parallel.reports import report_workers
from embodied.run.parallel.stopping import StopDeadline
from embodied.run.settings import RunSettings
from embodied.workers import (
    Process,
    Progress,
    RestartPolicy,
    RunFailed,
    Supervisor,
    WorkerError,
)

# Seconds that the launcher leaves the agent to notice by itself that a stop makes no
# progress, and to report which role it waits for.
AGENT_FIRST = 10.0

log = logging.getLogger("embodied.run")


def combined(
    make_agent: Callable[[], Any],
    make_replay_train: Callable[[], Any],
    make_replay_eval: Callable[[], Any],
    make_env_train: Callable[[int], Any],
    make_env_eval: Callable[[int], Any],
    make_stream: Callable[[Any, str], Any],
    make_logger: Callable[[], Any],
    args: Any,
) -> None:
    """Trains with all roles, until `args.steps` or `args.duration`, or Ctrl-C.

    The next call with the same `args.logdir` continues there.

    Args:
      make_agent: makes the agent.
      make_replay_train: makes the replay of training envs.
      make_replay_eval: makes the replay of evaluation envs.
      make_env_train: makes the training env of an id.
      make_env_eval: makes the evaluation env of an id.
      make_stream: makes the stream of batches of a replay and a mode.
      make_logger: makes the logger.
      args: the `run` block of the configuration and what belongs to it.

    Raises:
      RunFailed: a role has failed for good; names it, with its traceback.
      RunStalled: nothing has progressed for `args.stall_timeout`.
      StopTimeout: the end could not be saved, as a role does not answer.
      ReplicaLost: another replica is gone; all of them have to be started again.
      RoleError: the arguments do not fit together.
    """
    settings = prepare(RunSettings.from_args(args))
    done, progress = threading.Event(), Progress()  # Of the agent.
    with (
        show_messages(),
        record_run(settings.logdir, "A parallel run"),
        stop_on_signals(SAVING) as stop,
        watch_replicas(settings, on_lost=done.set) as report_failure,
        _supervise(settings, stop, done, report_failure) as supervisor,
    ):
        add = functools.partial(_add_process, supervisor, settings)
        add("logger", loggers.parallel_logger, make_logger)
        if not settings.remote_replay:
            factories = (make_replay_train, make_replay_eval, make_stream)
            add("replay", replay.parallel_replay, *factories)
        agent.add_agent(supervisor, make_agent, settings, stop, done, progress)
        workers = 0
        if not settings.remote_envs:
            makers = (dumps(make_env_train), dumps(make_env_eval))
            workers = env.add_workers(supervisor, *makers, settings)
        _tell_start(settings, workers)
        deadline = StopDeadline(
            *(stop, settings.logdir, settings.stop_timeout + AGENT_FIRST),
            give_up=lambda error: done.set(),
            awaited=lambda: "the agent",
            # All that the agent does, since it watches its end itself.
            progress=lambda: progress.stepped,
        )
        with deadline, report_workers(supervisor, settings):
            supervisor.run(until=done)


@contextlib.contextmanager
def _supervise(
    settings: RunSettings,
    stop: threading.Event,
    done: threading.Event,
    report_failure: Callable[[str], None],
) -> Iterator[Supervisor]:
    """Makes the supervisor of all roles, which are stopped when the body ends."""

    def on_failure(error: RunFailed) -> None:
        if error.role == "env" and not stop.is_set():
            log.warning(
                "Worker %s failed for good. Saving before the end ...", error.name
            )
            stop.set()
            done.wait()  # Set at the latest by the StopDeadline.
        report_failure(f"Worker {error.name!r} {error.reason}")

    def on_restart(name: str, error: WorkerError | None) -> None:
        if done.is_set():
            return
        if stop.is_set() and name == "agent" and error is not None:
            raise RunFailed(name, error.reason, error.traceback, "agent")
        reason = "it ended." if error is None else error.reason
        event = {"kind": RESTART, "role": name}
        log.warning("Role %s is restarted: %s", name, reason, extra={"event": event})
        if error is not None:
            _write_error(settings, error)

    try:
        with Supervisor(
            grace=agent.GRACE,
            stall_timeout=settings.stall_timeout,
            on_restart=on_restart,
            on_failure=on_failure,
        ) as supervisor:
            yield supervisor
    except RunFailed as error:
        _write_error(settings, error)
        raise


def prepare(settings: RunSettings) -> RunSettings:
    """Returns the settings with addresses filled in, checked; makes the logdir."""
    raise_descriptor_limit()  # Every worker of an environment takes a few.
    if settings.actor_batch > settings.envs:
        raise wiring.RoleError(
            f"run.actor_batch: expected at most run.envs ({settings.envs}), got "
            f"{settings.actor_batch}: such a batch would never be full."
        )
    if settings.remote_replay:
        wiring.check_addresses(settings, "replay_addr", "logger_addr")
    if settings.remote_envs:
        wiring.check_addresses(settings, "actor_addr")
    settings = wiring.resolve_addresses(settings)
    replay_addr = () if settings.remote_replay else ("replay_addr",)
    wiring.check_servers(settings, "actor_addr", "logger_addr", *replay_addr)
    Path(settings.logdir).mkdir(parents=True, exist_ok=True)
    return settings


def _add_process(
    supervisor: Supervisor,
    settings: RunSettings,
    role: str,
    function: Any,
    *factories: Callable[..., Any],
) -> None:
    arguments = [*map(dumps, factories), settings]
    supervisor.add(
        role,
        role,
        lambda: Process(function, *arguments, name=role, shielded=True),
        # Even if it was ended from outside, without an error, the run needs it.
        RestartPolicy(settings.restarts[role], restart_on_success=True),
    )


def _tell_start(settings: RunSettings, workers: int) -> None:
    parts = ["logger"]
    parts += ["replay"] if not settings.remote_replay else ["replay elsewhere"]
    apart = agent.is_apart(settings)
    parts += ["agent in its own process" if apart else "agent"]
    parts += [f"{workers} env workers" if workers else "env workers elsewhere"]
    log.info("Starting: %s.", ", ".join(parts))
    log.info(
        "Addresses: actor %s, replay %s, logger %s.",
        *(getattr(settings, key) for key in wiring.ADDRESSES),
    )


def _write_error(settings: RunSettings, error: WorkerError) -> None:
    if settings.errfile:
        write_file(
            Path(settings.logdir), f"error-{error.name}.txt", str(error).encode()
        )
