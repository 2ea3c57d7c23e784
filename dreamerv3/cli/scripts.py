"""The programs of `--script`: training in one process, all roles, or one role.

In the main process. The roles are imported where they are used, so that help and errors
appear at once.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import elements

from dreamerv3 import plot
from dreamerv3.cli import check, host_command, texts
from dreamerv3.cli.config import FILENAME, ConfigError, make_args
from dreamerv3.cli.factories import (
    EnvFactory,
    Factory,
    check_outputs,
    make_acting_agent,
    make_agent,
    make_env,
    make_filmed_env,
    make_logger,
    make_replay,
    make_spaces,
    make_stream,
)
from dreamerv3.cli.logdir import check_logdir, prepare_logdir
from dreamerv3.policies.reference import import_checkpoint
from dreamerv3.view.background_view import background_view, check_view
from embodied import run
from embodied.base import Agent, Env, TaskError
from embodied.checkpoint import CheckpointError
from embodied.clock import LocalClock
from embodied.episodes import Episodes
from embodied.logger import Logger
from embodied.replay import ReplayMemoryError
from embodied.run.collecting import Collector
from embodied.run.console import STOPPING, stop_on_signals
from embodied.run.metrics import Meter
from embodied.run.training_run import Limit

# Errors of roles whose message the command line shows without a traceback.
SHOWN = (ConfigError, CheckpointError, ReplayMemoryError, TaskError)

Script = Callable[..., None]  # Takes the configuration.
Make = Callable[..., Any]


class RunError(RuntimeError):
    """A run has failed; the message says which role, and where.

    Args:
      text: the message.
      code: exit code of the program.
    """

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


@contextlib.contextmanager
def _as_run_errors() -> Iterator[None]:
    """Turns the errors of roles into errors whose message is all that users need.

    Raises:
      ConfigError: the arguments of a role do not fit together.
      RunError: a role has failed, the run has stalled, a key was refused, or another
        replica is lost.
    """
    from embodied.rpc import AuthError
    from embodied.run.parallel.observations import ObservationError
    from embodied.run.parallel.replicas import EXIT_START_AGAIN, ReplicaLost
    from embodied.run.parallel.wiring import RoleError
    from embodied.workers import RunFailed, RunStalled

    try:
        yield
    except (RoleError, ObservationError) as error:
        raise ConfigError(str(error)) from error
    except RunFailed as error:
        cause = error.__cause__  # Known if the agent is a thread of this process.
        if isinstance(cause, SHOWN):
            raise cause from error
        text, where = f"Worker {error.name!r} {error.reason}", error.traceback
        if error.role == "env":
            where = texts.trim_traceback(where)
        text = texts.with_traceback(text, error.kind, where)
        if error.kind in texts.USAGE_ERRORS:
            raise ConfigError(text) from error
        raise RunError(text) from error
    except (RunStalled, AuthError) as error:
        raise RunError(str(error)) from error
    except ReplicaLost as error:
        raise RunError(str(error), EXIT_START_AGAIN) from error


def run_rollout(config: elements.Config) -> None:
    """Steps the task's environments, and prints a summary and the files written."""
    with stop_on_signals(STOPPING) as stop:
        agent = _begin(config, "Stepping", "stops")
        with make_logger(config) as logger:
            make = functools.partial(make_env, config)
            result = rollout(agent, make, logger, make_args(config), stop)
    print(texts.summary(config, result))


def run_train(config: elements.Config, own: Factory | None = None) -> None:
    """Trains in this process, and prints a summary and the files written."""
    agent = _begin(config, "Training in", "saves and stops", own=own)
    replay, _, env, _, stream, logger = _factories(config, own)
    args = make_args(config)
    with background_view(config):
        result = run.train(lambda: agent, replay, env, stream, logger, args)
    print(texts.summary(config, result))


def run_train_eval(config: elements.Config, own: Factory | None = None) -> None:
    """Trains and evaluates in this process, and prints a summary."""
    if not config.run.eval_envs:
        raise ConfigError(
            "run.eval_envs: expected at least 1 for --script train_eval, got 0. "
            "Without evaluation, use --script train."
        )
    agent = _begin(config, "Training in", "saves and stops", own=own)
    factories = _factories(config, own)
    with background_view(config):
        result = run.train_eval(lambda: agent, *factories, make_args(config))
    print(texts.summary(config, result))


def run_eval_only(config: elements.Config) -> None:
    """Evaluates the agent of a checkpoint, and prints its score."""
    source = config.run.from_checkpoint or config.logdir
    envs = min(config.run.envs, config.run.eval_eps)
    config = config.update({"run.from_checkpoint": source, "run.envs": envs})
    agent = _begin(config, "Evaluating in", "stops", make_acting_agent)
    env = functools.partial(make_filmed_env, config)
    logger = functools.partial(make_logger, config)
    run.eval_only(lambda: agent, env, logger, make_args(config))


def run_import_checkpoint(config: elements.Config) -> None:
    """Converts a checkpoint of the reference implementation, and prints a report."""
    print(import_checkpoint(config))


def run_plot(config: elements.Config) -> None:
    """Draws the learning curves of runs, and prints the path of the picture."""
    given = [run for run in config.plot.runs if run != "none"]
    folder = "" if given else config.logdir
    out = config.plot.out or pathlib.Path(folder, "scores.png")
    try:
        path = plot.render(given or [config.logdir], out, metric=config.plot.metric)
    except plot.PlotError as error:
        raise ConfigError(f"plot: {error}") from error
    print(f"Written: {path}")


@_as_run_errors()
def run_parallel(
    config: elements.Config,
    own: Factory | None = None,
    host: Mapping[str, Any] | None = None,
) -> None:
    """Trains with all roles, on this machine unless some run elsewhere.

    Args:
      config: configuration of the run, which is stored in the logdir.
      own: the user's class or function that makes environments.
      host: keys of the `run` block that apply to this start alone, such as addresses.
    """
    check_logdir(config)
    check_outputs(config)
    # Before the logdir is claimed, so that an unusable task does not claim it.
    spaces = make_spaces(config, own)
    prepare_logdir(config)
    begin = time.monotonic()
    _announce(config, "Training in", "saves and stops")
    with background_view(config):
        run.parallel.combined(
            functools.partial(make_agent, config, spaces),
            *_factories(config, own),
            make_args(config).update(host or {}),
        )
    print(texts.parallel_summary(config, time.monotonic() - begin))


@_as_run_errors()
def run_agent(config: elements.Config) -> None:
    """Runs actor and learner; the other roles run elsewhere."""
    _check_address(config, "actor_addr")
    spaces = make_spaces(config)
    prepare_logdir(config)
    make = functools.partial(make_agent, config, spaces)
    with background_view(config):
        run.parallel.parallel_agent(make, make_args(config))


@_as_run_errors()
def run_replay(config: elements.Config) -> None:
    """Runs the replay."""
    _check_address(config, "replay_addr")
    replay, replay_eval, _, _, stream, _ = _factories(config)
    run.parallel.parallel_replay(replay, replay_eval, stream, make_args(config))


@_as_run_errors()
def run_logger(config: elements.Config) -> None:
    """Runs the logger."""
    _check_address(config, "logger_addr")
    run.parallel.parallel_logger(
        functools.partial(make_logger, config), make_args(config)
    )


def run_view(config: elements.Config) -> None:
    """Shows runs in the browser, until Ctrl-C."""
    further = [folder for folder in config.view.folders if folder != "none"]
    folders = [config.logdir, *further]
    for folder in folders:
        if not pathlib.Path(folder).is_dir():
            raise ConfigError(
                f"logdir: expected a run, or a folder of runs, got {folder}, which "
                "is no folder."
            )
    check_view()
    from dreamerv3.view.web_server import serve

    settings = config.view
    try:
        serve(folders, settings.host, settings.port, settings.sessions)
    except OSError as error:
        raise ConfigError(
            f"view.host, view.port: expected an address to listen at, got "
            f"{settings.host} and {settings.port} ({error})."
        ) from error


@_as_run_errors()
def run_env(config: elements.Config) -> None:
    """Runs the environment whose id is the replica's number."""
    make = EnvFactory(config)
    is_eval = config.replica >= config.run.envs
    run.parallel.parallel_env(make, config.replica, make_args(config), is_eval)


@_as_run_errors()
def run_envs(config: elements.Config) -> None:
    """Runs all environments of this host."""
    make = EnvFactory(config)
    run.parallel.parallel_envs(make, make, make_args(config))


def rollout(
    agent: Agent,
    make_env: Callable[[int], Env],
    logger: Logger,
    args: Any,
    stop: threading.Event,
) -> run.TrainResult:
    """Steps `args.envs` environments until `args.steps`, `args.duration` or `stop`.

    Args:
      agent: agent whose policy acts, in train mode.
      make_env: makes the environment of an index; with `args.debug` in this process,
        else in a process for each.
      logger: gets every episode, and statistics every `args.log_every` seconds.
      args: the `run` block of the configuration.
      stop: ends the rollout after the current step once it is set.
    """
    episodes = Episodes(args.episode_timeout)
    should_log = LocalClock(args.log_every)

    def log() -> None:
        logger.add(episodes.result())
        logger.add(meter.result())
        logger.write()

    replay: Any = _NoReplay()
    with Collector(agent, make_env, replay, logger, episodes, args) as collector:
        # From here on: starting environments takes a while.
        meter = Meter()
        limit = Limit(lambda: collector.steps, args.steps, args.duration, stop)
        while not limit.reached():
            meter.count("env", collector.collect())
            if should_log():
                log()
        seconds = limit.seconds
        log()
    scores, steps = collector.scores, collector.steps
    mean = sum(scores) / len(scores) if scores else None
    return run.TrainResult(steps, steps, 0, seconds, collector.episodes, mean)


class _NoReplay:
    """Replay that discards all steps."""

    def add(self, step: Any, worker: int = 0) -> None:
        """Discards the step."""


def _factories(
    config: elements.Config, own: Factory | None = None
) -> tuple[Make, Make, Make, Make, Make, Make]:
    """Returns the factories that `combined` takes after the agent's, in that order."""
    return (
        functools.partial(make_replay, config, "replay"),
        functools.partial(make_replay, config, "replay_eval", "eval"),
        EnvFactory(config, own),
        EnvFactory(config, own),
        functools.partial(make_stream, config),
        functools.partial(make_logger, config),
    )


def _begin(
    config: elements.Config,
    doing: str,
    interrupt: str,
    make: Make = make_agent,
    own: Factory | None = None,
) -> Agent:
    """Makes the agent, prepares the logdir and prints what is being done.

    Args:
      config: configuration of the program.
      doing: first words of the line that is printed.
      interrupt: what Ctrl-C does, for the same line.
      make: makes the agent from the configuration and spaces.
      own: the user's class or function that makes environments.
    """
    if config.replicas > 1:
        raise ConfigError(
            f"replicas: expected 1 for --script {config.script}, which runs on one "
            f"host, got {config.replicas}. For several, use --script parallel."
        )
    # An evaluation in the logdir of a run does not replace the run's configuration.
    found = pathlib.Path(config.logdir, FILENAME).exists()
    writes = not (found and config.script == "eval_only")
    # Quick checks come first, and making the weights comes last.
    if writes:
        check_logdir(config)
    check_outputs(config)
    agent = make(config, make_spaces(config, own))
    # Only now, so that an agent that cannot be made does not claim the logdir.
    if writes:
        prepare_logdir(config)
    _announce(config, doing, interrupt)
    return agent


def _announce(config: elements.Config, doing: str, interrupt: str) -> None:
    print(
        f"{doing} {config.run.envs} environments of {config.task} "
        f"(Ctrl-C {interrupt}) ...",
        flush=True,
    )


def _check_address(config: elements.Config, key: str) -> None:
    """Raises an error if a role started on its own cannot listen at its address."""
    args = make_args(config)
    run.parallel.wiring.check_addresses(args, key)
    run.parallel.wiring.check_servers(args, key)


SCRIPTS: dict[str, Script] = {
    "train": run_train,
    "train_eval": run_train_eval,
    "eval_only": run_eval_only,
    "import_checkpoint": run_import_checkpoint,
    "plot": run_plot,
    "check": check.run_check,
    "rollout": run_rollout,
    "view": run_view,
    "host_command": _as_run_errors()(host_command.run_host_command),
    "parallel": run_parallel,
    "parallel_agent": run_agent,
    "parallel_replay": run_replay,
    "parallel_logger": run_logger,
    "parallel_env": run_env,
    "parallel_envs": run_envs,
}
