"""The command line: builds what a program needs and runs it, in the main process.

    python -m dreamerv3.main --configs demo --script rollout --logdir logdir/demo

Everything heavy is imported where it is used, so that help and errors come at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import elements

from dreamerv3.config import ConfigError, load_config, make_args, prepare_logdir
from embodied import logger as loggers
from embodied.base import Agent, Env
from embodied.envs import registry

if TYPE_CHECKING:
    from dreamerv3.rollout import Result

PACKAGE = "dreamerv3-parallel"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program that the arguments ask for.

    Args:
      argv: see `dreamerv3 --help`; by default the arguments of the process.

    Returns:
      The exit code: 2 if the configuration cannot be used, else 0.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--help" in argv or "-h" in argv:
        from dreamerv3.help import help_text

        print(help_text(), end="")
        return 0
    if "--version" in argv:
        print(f"dreamerv3 {metadata.version(PACKAGE)}")
        return 0
    try:
        config = load_config(argv)
        if config.script not in SCRIPTS:
            raise ConfigError(
                f"script: expected one of those that this version offers "
                f"({', '.join(SCRIPTS)}), got {config.script!r}."
            )
        SCRIPTS[config.script](config)
    except ConfigError as error:
        return _fail(error.problems)
    except (
        registry.UnknownTask,
        registry.MissingExtra,
        loggers.MissingPackageError,
    ) as error:
        return _fail([str(error)])
    return 0


def make_env(config: elements.Config, index: int, **overrides: Any) -> Env:
    """Makes environment `index` of the task, wrapped so that any agent can use it.

    Args:
      config: the whole configuration.
      index: number of the environment within the run, which decides its seed.
      **overrides: options of the suite that replace those in `config.env`.
    """
    from embodied import wrappers

    suite = config.task.partition("_")[0]
    options = {**config.env.get(suite, {}), **overrides}
    env = registry.make(config.task, index=index, seed=config.seed, **options)
    return wrappers.wrap(env)


def make_agent(config: elements.Config) -> Agent:
    """Makes the agent for the spaces of the task."""
    if not config.random_agent:
        raise ConfigError(
            "random_agent: expected True, got False. This version has no agent that "
            "learns; add --random_agent True."
        )
    from embodied.random_agent import RandomAgent

    env = make_env(config, 0)
    try:
        obs_space = {
            key: space
            for key, space in env.obs_space.items()
            if not key.startswith("log/")
        }
        act_space = {key: env.act_space[key] for key in env.act_space if key != "reset"}
    finally:
        env.close()
    return RandomAgent(obs_space, act_space, config, seed=config.seed)


def make_logger(config: elements.Config) -> loggers.Logger:
    """Makes the logger with the outputs of `config.logger`.

    Its step counts agent steps; outputs get it times the action repeat of the task.
    """
    logdir, settings = config.logdir, config.logger
    suite = config.task.partition("_")[0]
    repeat = config.env.get(suite, {}).get("repeat", 1)

    def wandb() -> loggers.Output:
        return loggers.WandbOutput(
            f"{config.task}/{config.method}/{config.seed}",
            logdir,
            config=dict(config),
            fps=settings.fps,
            group=config.method,
            entity=settings.user or None,
        )

    makers: dict[str, list[Callable[[], loggers.Output]]] = {
        "jsonl": [
            functools.partial(loggers.JSONLOutput, logdir, "metrics.jsonl"),
            functools.partial(
                loggers.JSONLOutput, logdir, "scores.jsonl", "episode/score"
            ),
        ],
        "tensorboard": [
            functools.partial(loggers.TensorBoardOutput, logdir, settings.fps)
        ],
        "terminal": [
            functools.partial(
                loggers.TerminalOutput,
                settings.filter,
                config.task,
                total_steps=config.run.steps * repeat,
            )
        ],
        "scope": [functools.partial(loggers.ScopeOutput, logdir, settings.fps)],
        "wandb": [wandb],
    }
    outputs = [make() for name in settings.outputs for make in makers[name]]
    return loggers.Logger(elements.Counter(), outputs, multiplier=repeat)


def run_rollout(config: elements.Config) -> None:
    """Steps the task's environments, and prints what was done and where it lies."""
    from dreamerv3.rollout import rollout, stop_on_signals

    with stop_on_signals() as stop:
        # The agent first: a task that cannot be made should not claim the logdir.
        agent = make_agent(config)
        prepare_logdir(config)
        print(
            f"Stepping {config.run.envs} environments of {config.task} "
            f"(Ctrl-C stops) ...",
            flush=True,
        )
        with make_logger(config) as logger:
            args = make_args(config)
            make = functools.partial(make_env, config)
            result = rollout(agent, make, logger, args, stop)
        print(_summary(config, result))


SCRIPTS: dict[str, Callable[[elements.Config], None]] = {"rollout": run_rollout}


def _summary(config: elements.Config, result: Result) -> str:
    rate = result.steps / result.seconds if result.seconds else 0.0
    score = "" if result.mean_score is None else f", mean score {result.mean_score:.3g}"
    logdir = config.logdir
    lines = [
        f"{result.steps} steps in {result.seconds:.1f} s ({rate:.0f} steps/s), "
        f"{result.episodes} episodes{score}.",
        f"Written to {logdir}:",
        "  config.yaml     the configuration",
    ]
    if "jsonl" in config.logger.outputs:
        lines.append("  metrics.jsonl   all metrics, a JSON object per line")
        lines.append("  scores.jsonl    the score of every episode")
    if "tensorboard" in config.logger.outputs:
        lines.append(
            f"  events.*        curves and videos: tensorboard --logdir {logdir}"
        )
    if "scope" in config.logger.outputs:
        lines.append("  scope           metrics and videos for Scope")
    return "\n".join(lines)


def _fail(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"dreamerv3: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
