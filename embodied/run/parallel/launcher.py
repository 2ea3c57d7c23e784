"""Starts, supervises and ends all roles of a run. The launching process."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from embodied.checkpoint import write_file
from embodied.run.console import SAVING, show_messages, stop_on_signals
from embodied.run.live import RESTART, record_events, record_run
from embodied.run.parallel import agent, env, replay, wiring
from embodied.run.parallel import logger as loggers
from embodied.run.parallel.env_usage import report_env_usage
from embodied.run.parallel.stopping import StopDeadline, StopTimeout
from embodied.run.settings import RunSettings
from embodied.workers import (
    Process,
    Progress,
    RestartPolicy,
    RunFailed,
    Supervisor,
    Thread,
    WorkerError,
)
from embodied.workers.thread import Worker

GRACE = 10.0  # Seconds for roles to end after the agent.
# Seconds that the launcher gives the agent to notice by itself that a stop does not get
# on, and to say who is waited for.
AGENT_FIRST = 10.0
# Errors, by name, that an agent in its own process would only make again.
_FINAL = ("ConfigError", "DiskTooSmallError", "ReplayMemoryError", "SetupError")
AGENT_LIMITS = dict.fromkeys((*_FINAL, StopTimeout.__name__), 0)

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
      StopTimeout: the end could not be saved, as somebody does not answer.
      RoleError: the arguments do not fit together.
    """
    settings = prepare(RunSettings.from_args(args))
    with (
        show_messages(),
        record_run(settings.logdir, "A parallel run"),
        stop_on_signals(SAVING) as stop,
    ):
        done = threading.Event()
        supervisor = Supervisor(
            grace=GRACE,
            stall_timeout=settings.stall_timeout,
            on_restart=functools.partial(_before_restart, settings, stop, done),
            on_failure=functools.partial(_save_first, stop, done),
        )
        dumps = cloudpickle.dumps
        with supervisor:
            _add_process(
                supervisor,
                "logger",
                settings,
                loggers.parallel_logger,
                [dumps(make_logger), settings],
            )
            if not settings.remote_replay:
                factories = (make_replay_train, make_replay_eval, make_stream)
                _add_process(
                    supervisor,
                    "replay",
                    settings,
                    replay.parallel_replay,
                    [*map(dumps, factories), settings],
                )
            _add_agent(supervisor, make_agent, settings, stop, done)
            workers = 0
            if not settings.remote_envs:
                makers = (dumps(make_env_train), dumps(make_env_eval))
                workers = env.add_workers(supervisor, *makers, settings)
            _tell_start(settings, workers)
            try:
                with _bounded_stop(settings, stop, done):
                    with report_env_usage(supervisor, settings):
                        supervisor.run(until=done)
            except RunFailed as error:
                _write_error(settings, error)
                raise


def prepare(settings: RunSettings) -> RunSettings:
    """Returns the settings with addresses filled in, checked; makes the logdir."""
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
    role: str,
    settings: RunSettings,
    function: Any,
    arguments: list[Any],
) -> None:
    supervisor.add(
        role,
        role,
        lambda: Process(function, *arguments, name=role),
        # It ends well when somebody else ends it, and is needed all the same.
        RestartPolicy(settings.restarts[role], restart_on_success=True),
    )


def _add_agent(
    supervisor: Supervisor,
    make_agent: Callable[[], Any],
    settings: RunSettings,
    stop: threading.Event,
    done: threading.Event,
) -> None:
    """Adds the agent, whose good end is the end of the run."""
    progress = Progress()
    current: list[Process] = []

    def end_if_well(worker: Worker) -> None:
        # Before it can save and leave on SIGTERM, it just leaves.
        code = worker.exitcode if isinstance(worker, Process) else None
        if worker.error is None or (stop.is_set() and code == -signal.SIGTERM):
            done.set()

    def make_process() -> Process:
        process = Process(
            _agent_process,
            *(cloudpickle.dumps(make_agent), settings, progress),
            name="agent",
            fds=[progress.fd],
        )
        process.on_exit(end_if_well)
        current[:] = [process]
        return process

    def make_thread() -> Thread:
        # The supervisor sets `done`, too, when it stops the other roles.
        thread = Thread(
            *(agent.run_agent, make_agent, settings, stop, progress, done), name="agent"
        )
        thread.on_exit(end_if_well)
        return thread

    if settings.agent_process:
        policy = RestartPolicy(settings.restarts["agent"], limits=AGENT_LIMITS)
        supervisor.add("agent", "agent", make_process, policy, progress)
        threading.Thread(
            target=_pass_on,
            args=(stop, done, current),
            name="pass on the stop",
            daemon=True,
        ).start()
    else:
        supervisor.add("agent", "agent", make_thread, RestartPolicy(0), progress)


def _agent_process(
    make_agent: bytes, settings: RunSettings, progress: Progress
) -> None:
    with (
        show_messages(),
        record_events(settings.logdir),
        stop_on_signals() as stop,
    ):
        agent.run_agent(make_agent, settings, stop, progress)


def _pass_on(
    stop: threading.Event, done: threading.Event, current: list[Process]
) -> None:
    """Tells the agent's process to save and leave once `stop` is set."""
    stop.wait()
    if done.is_set():
        return
    pid = current[0].pid if current and current[0].running else None
    if pid is None:
        done.set()  # It has failed and is not back yet: there is nothing to save.
    else:
        os.kill(pid, signal.SIGTERM)


def _tell_start(settings: RunSettings, workers: int) -> None:
    parts = ["logger"]
    parts += ["replay"] if not settings.remote_replay else ["replay elsewhere"]
    parts += ["agent in its own process" if settings.agent_process else "agent"]
    parts += [f"{workers} env workers" if workers else "env workers elsewhere"]
    log.info("Starting: %s.", ", ".join(parts))
    log.info(
        "Addresses: actor %s, replay %s, logger %s.",
        *(getattr(settings, key) for key in wiring.ADDRESSES),
    )


def _before_restart(
    settings: RunSettings,
    stop: threading.Event,
    done: threading.Event,
    name: str,
    error: WorkerError | None,
) -> None:
    """Logs why a role is restarted; raises its error if the run was to end."""
    if done.is_set():
        return
    if stop.is_set() and name == "agent" and error is not None:
        raise RunFailed(name, error.reason, error.traceback, "agent")
    _tell_restart(settings, name, error)


@contextlib.contextmanager
def _bounded_stop(
    settings: RunSettings, stop: threading.Event, done: threading.Event
) -> Iterator[None]:
    """Ends a stop of the body, by `done`, that even the agent does not end.

    Raises:
      StopTimeout: it was so.
    """
    seconds, late = settings.stop_timeout + AGENT_FIRST, threading.Event()

    def give_up() -> None:
        late.set()
        done.set()

    with StopDeadline(stop, settings.logdir, seconds, give_up):
        yield
    if late.is_set():
        raise StopTimeout.after(seconds, settings.logdir, "the agent")


def _save_first(stop: threading.Event, done: threading.Event, error: RunFailed) -> None:
    """Lets the agent save what it has learned before a run ends for its envs."""
    if error.role == "env" and not stop.is_set():
        log.warning("Worker %s failed for good. Saving before the end ...", error.name)
        stop.set()
        done.wait()  # Which comes at the latest when the stop does not get on.


def _tell_restart(settings: RunSettings, name: str, error: WorkerError | None) -> None:
    reason = "it ended." if error is None else error.reason
    event = {"kind": RESTART, "role": name}
    log.warning("Role %s is restarted: %s", name, reason, extra={"event": event})
    if error is not None:
        _write_error(settings, error)


def _write_error(settings: RunSettings, error: WorkerError) -> None:
    if settings.errfile:
        write_file(
            Path(settings.logdir), f"error-{error.name}.txt", str(error).encode()
        )
