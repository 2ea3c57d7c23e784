"""The programs of parallel training: all roles, or one of them. The main process."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import elements

from dreamerv3.config import ConfigError, make_args, prepare_logdir
from dreamerv3.factories import (
    make_agent,
    make_env,
    make_logger,
    make_replay,
    make_spaces,
    make_stream,
)
from dreamerv3.messages import parallel_summary
from embodied.base import TaskError
from embodied.checkpoint import CheckpointError
from embodied.replay import ReplayMemoryError

# What the command line shows as it is.
SHOWN = (
    ConfigError,
    CheckpointError,
    ReplayMemoryError,
    TaskError,
)


# At which roles that are commands of their own listen.
SERVED_ADDRESSES = {
    "parallel_agent": "actor_addr",
    "parallel_replay": "replay_addr",
    "parallel_logger": "logger_addr",
}


class RunError(RuntimeError):
    """A run has failed; the message says which role, and where."""


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """Makes the errors of roles such that they can be shown as they are.

    Raises:
      ConfigError: the arguments of a role do not fit together.
      RunError: a role has failed, everything stands still, or a key was refused.
    """
    from dreamerv3 import failures
    from embodied.rpc import AuthError
    from embodied.run.parallel.observations import ObservationError
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
            where = failures.foreign_part(where)
        text = failures.with_traceback(text, error.kind, where)
        if error.kind in failures.MISTAKES:
            raise ConfigError(text) from error
        raise RunError(text) from error
    except (RunStalled, AuthError) as error:
        raise RunError(str(error)) from error


def run_parallel(config: elements.Config) -> None:
    """Trains with all roles, on this machine unless some run elsewhere."""
    from embodied.run import parallel

    # First, since a task that cannot be made should not claim the logdir.
    spaces = make_spaces(config)
    prepare_logdir(config)
    begin = time.monotonic()
    print(
        f"Training in {config.run.envs} environments of {config.task} "
        f"(Ctrl-C saves and stops) ...",
        flush=True,
    )
    parallel.combined(
        functools.partial(make_agent, config, spaces),
        functools.partial(make_replay, config, "replay"),
        functools.partial(make_replay, config, "replay_eval", "eval"),
        functools.partial(make_env, config),
        functools.partial(make_env, config),
        functools.partial(make_stream, config),
        functools.partial(make_logger, config),
        make_args(config),
    )
    print(parallel_summary(config, time.monotonic() - begin))


def run_agent(config: elements.Config) -> None:
    """Runs actor and learner; the other roles run elsewhere."""
    from embodied.run import parallel

    spaces = make_spaces(config)
    prepare_logdir(config)
    make = functools.partial(make_agent, config, spaces)
    parallel.parallel_agent(make, make_args(config))


def run_replay(config: elements.Config) -> None:
    """Runs the replay."""
    from embodied.run import parallel

    parallel.parallel_replay(
        functools.partial(make_replay, config, "replay"),
        functools.partial(make_replay, config, "replay_eval", "eval"),
        functools.partial(make_stream, config),
        make_args(config),
    )


def run_logger(config: elements.Config) -> None:
    """Runs the logger."""
    from embodied.run import parallel

    parallel.parallel_logger(functools.partial(make_logger, config), make_args(config))


def run_env(config: elements.Config) -> None:
    """Runs the environment whose id is the replica's number."""
    from embodied.run import parallel

    make = functools.partial(make_env, config)
    is_eval = config.replica >= config.run.envs
    parallel.parallel_env(make, config.replica, make_args(config), is_eval)


def run_envs(config: elements.Config) -> None:
    """Runs all environments of this host."""
    from embodied.run import parallel

    make: Callable[..., Any] = functools.partial(make_env, config)
    parallel.parallel_envs(make, make, make_args(config))


def _with_clear_errors(
    script: Callable[[elements.Config], None],
) -> Callable[[elements.Config], None]:
    @functools.wraps(script)
    def run(config: elements.Config) -> None:
        with _clear_errors():
            _check_address(config)
            script(config)

    return run


def _check_address(config: elements.Config) -> None:
    """Raises an error if a role that starts by itself cannot listen where it should."""
    from embodied.run.parallel import wiring

    if config.script in SERVED_ADDRESSES:
        args, key = make_args(config), SERVED_ADDRESSES[config.script]
        wiring.check_addresses(args, key)
        wiring.check_servers(args, key)


SCRIPTS: dict[str, Callable[[elements.Config], None]] = {
    name: _with_clear_errors(script)
    for name, script in {
        "parallel": run_parallel,
        "parallel_agent": run_agent,
        "parallel_replay": run_replay,
        "parallel_logger": run_logger,
        "parallel_env": run_env,
        "parallel_envs": run_envs,
    }.items()
}
