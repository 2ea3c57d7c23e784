"""The command line: runs the program that is asked for, in the main process.

    python -m dreamerv3.main --configs demo --logdir logdir/demo

Everything heavy is imported where it is used, so that help and errors come at once.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

import elements

from dreamerv3 import parallel
from dreamerv3.config import ConfigError, load_config, make_args, prepare_logdir
from dreamerv3.factories import (
    make_acting_agent,
    make_agent,
    make_env,
    make_logger,
    make_replay,
    make_stream,
)
from dreamerv3.logdirs import FILENAME, kept_config
from dreamerv3.messages import summary
from embodied import logger as loggers
from embodied.base import Agent
from embodied.errors import TaskError
from embodied.replay import ReplayMemoryError

PACKAGE = "dreamerv3-parallel"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program that the arguments ask for.

    Args:
      argv: see `dreamerv3 --help`; by default the arguments of the process.

    Returns:
      The exit code: 2 if the configuration cannot be used, 1 if checkpoints cannot or
      an environment or a role has failed, 130 after a second Ctrl-C, else 0.
    """
    if argv is None:
        _import_from_here()
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if "--help" in argv or "-h" in argv:
            from dreamerv3.help import help_text

            print(help_text(), end="")
            return 0
        if "--version" in argv:
            print(f"dreamerv3 {metadata.version(PACKAGE)}")
            return 0
        config = load_config(argv)
        if config.script not in SCRIPTS:
            raise ConfigError(
                f"script: expected one of those that this version offers "
                f"({', '.join(SCRIPTS)}), got {config.script!r}."
            )
        script = SCRIPTS[config.script]
        if config.script == "suite":  # It passes the arguments on to its runs.
            script = functools.partial(script, argv=argv)
        return _run(script, config)
    except ConfigError as error:
        return _fail(error.problems)
    except (TaskError, loggers.MissingPackageError) as error:
        return _fail([str(error)])
    except ReplayMemoryError as error:
        flags = "The capacity is --replay.size, and bytes is --replay.bytes."
        return _fail([f"{error} {flags}"])
    except KeyboardInterrupt:
        return _fail(["left at once, without saving."], code=130)


def _run(script: Callable[[elements.Config], None], config: elements.Config) -> int:
    from dreamerv3 import failures
    from embodied.checkpoint import CheckpointError
    from embodied.driver import EnvError
    from embodied.run.messages import show_messages

    try:
        with show_messages(), kept_config(config.logdir):
            script(config)
    except (CheckpointError, parallel.RunError) as error:
        return _fail([str(error)], code=1)
    except EnvError as error:
        code = 2 if error.kind in failures.MISTAKES else 1
        return _fail([failures.env_failure(error)], code)
    return 0


def run_rollout(config: elements.Config) -> None:
    """Steps the task's environments, and prints what was done and where it lies."""
    from dreamerv3.rollout import rollout
    from embodied.run.signals import STOPPING, stop_on_signals

    with stop_on_signals(STOPPING) as stop:
        agent = _begin(config, "Stepping", "stops")
        with make_logger(config) as logger:
            make = functools.partial(make_env, config)
            result = rollout(agent, make, logger, make_args(config), stop)
    print(summary(config, result))


def run_train(config: elements.Config) -> None:
    """Trains in this process, and prints what was done and where it lies."""
    import embodied.run

    agent = _begin(config, "Training in", "saves and stops")
    result = embodied.run.train(
        lambda: agent,
        functools.partial(make_replay, config, "replay"),
        functools.partial(make_env, config),
        functools.partial(make_stream, config),
        functools.partial(make_logger, config),
        make_args(config),
    )
    print(summary(config, result))


def run_train_eval(config: elements.Config) -> None:
    """Trains and evaluates in this process, and prints what was done."""
    import embodied.run

    if not config.run.eval_envs:
        raise ConfigError(
            "run.eval_envs: expected at least 1 for --script train_eval, got 0. "
            "Without evaluation, use --script train."
        )
    agent = _begin(config, "Training in", "saves and stops")
    result = embodied.run.train_eval(
        lambda: agent,
        functools.partial(make_replay, config, "replay"),
        functools.partial(make_replay, config, "replay_eval", "eval"),
        functools.partial(make_env, config),
        functools.partial(make_env, config),
        functools.partial(make_stream, config),
        functools.partial(make_logger, config),
        make_args(config),
    )
    print(summary(config, result))


def run_eval_only(config: elements.Config) -> None:
    """Evaluates the agent of a checkpoint, and prints its score."""
    import embodied.run

    source = config.run.from_checkpoint or config.logdir
    envs = min(config.run.envs, config.run.eval_eps)
    config = config.update({"run.from_checkpoint": source, "run.envs": envs})
    agent = _begin(config, "Evaluating in", "stops", make_acting_agent)
    embodied.run.eval_only(
        lambda: agent,
        functools.partial(make_env, config),
        functools.partial(make_logger, config),
        make_args(config),
    )


def run_import_checkpoint(config: elements.Config) -> None:
    """Converts a checkpoint of the reference implementation, and prints what it had."""
    from dreamerv3.importing import import_checkpoint

    print(import_checkpoint(config))


def run_suite(config: elements.Config, argv: Sequence[str] = ()) -> None:
    """Trains on a list of tasks and seeds, and compares the scores."""
    from dreamerv3.suite import runner

    runner.run_suite(config, argv)


SCRIPTS: dict[str, Callable[..., None]] = {
    "train": run_train,
    "train_eval": run_train_eval,
    "eval_only": run_eval_only,
    "import_checkpoint": run_import_checkpoint,
    "rollout": run_rollout,
    "suite": run_suite,
    **parallel.SCRIPTS,
}


def _begin(
    config: elements.Config,
    doing: str,
    interrupt: str,
    make: Callable[[elements.Config], Agent] = make_agent,
) -> Agent:
    """Makes the agent, prepares the logdir and says what is being done."""
    if config.replicas > 1:
        raise ConfigError(
            f"replicas: expected 1 for --script {config.script}, which runs on one "
            f"host, got {config.replicas}. For several, use --script parallel."
        )
    # The agent first: a task that cannot be made should not claim the logdir.
    agent = make(config)
    # An evaluation within the logdir of a run leaves the configuration of the run.
    found = pathlib.Path(config.logdir, FILENAME).exists()
    if not (found and config.script == "eval_only"):
        prepare_logdir(config)
    print(
        f"{doing} {config.run.envs} environments of {config.task} "
        f"(Ctrl-C {interrupt}) ...",
        flush=True,
    )
    return agent


def _import_from_here() -> None:
    """Lets environments of one's own be found in this folder, as `python -m` does.

    The script that an installation makes has its own folder there instead. Processes
    that are started get the same.
    """
    here = os.getcwd()
    if here not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, here)


def _fail(problems: Sequence[str], code: int = 2) -> int:
    for problem in problems:
        print(f"dreamerv3: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
