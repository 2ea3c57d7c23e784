"""Makes agent, environments, replay, streams and logger of a program. Any process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import elements
import numpy as np

from dreamerv3.cli.config import ConfigError, action_repeat
from dreamerv3.cli.schema import LARGEST_MAP, SMALLEST_MAP
from dreamerv3.cli.task_origin import suite_of
from embodied import logger as loggers
from embodied import streams, wrappers
from embodied.base import Agent, BatchEnv, Env, Spaces, Stream, TaskError
from embodied.driver import env_errors
from embodied.envs import registry
from embodied.random_agent import RandomAgent
from embodied.replay import Replay, selectors

EXTRA_OUTPUTS = ("scope", "wandb")  # Each is a package and an extra of that name.
UNLIMITED = 10**10  # Default of run.steps, for which no total is shown.
FIRST_REPLICA = 2**20  # Above the index of any environment.
Factory = Callable[..., Any]

USUAL_SIZE = 64  # Side of images that must be resized for the networks.


def make_env(
    config: elements.Config, index: int, own: Factory | None = None, **overrides: Any
) -> Env:
    """Makes environment `index` of the task, wrapped so that any agent can use it.

    Args:
      config: the whole configuration.
      index: number of the environment within the run, which decides its seed.
      own: the user's class or function that makes it, see
        `embodied.envs.registry.adapt`. Default: that of the task, if it names one.
      **overrides: options of the suite that replace those in `config.env`; for your
        own environment, arguments, of which those it has no parameter for are dropped.
    """
    own = own or registry.own_factory(config.task)
    if own is not None:
        known = {key: x for key, x in overrides.items() if registry.takes(own, key)}
        seed = registry.env_seed(_env_seed(config), index)
        factory = functools.partial(own, **known)
        env = registry.adapt(config.task, factory, seed, config.env.gym)
    else:
        suite = config.task.partition("_")[0]
        options = {**config.env.get(suite, {}), **overrides}
        env = registry.make(config.task, index=index, seed=_env_seed(config), **options)
    size = image_size(config, env.obs_space)
    if size is not None:
        env = wrappers.ResizeImage(env, size)
    # The agent replaces values that are not finite, and reports them.
    return wrappers.wrap(env, nonfinite="pass")


def _env_seed(config: elements.Config) -> int:
    """Returns the base seed of this host's environments.

    It differs between replicas, whose environments have the same indices.
    """
    if config.replicas == 1 or config.replica == 0:
        return config.seed
    return registry.env_seed(config.seed, FIRST_REPLICA + config.replica)


def make_filmed_env(config: elements.Config, index: int) -> Env:
    """Makes environment `index` for a video: with frames, if the agent sees no image.

    Only the first environment is rendered.
    """
    suite = suite_of(config.task)
    drawn: dict[str, Any] = {}
    if suite == "gym":
        drawn = {"render_mode": "rgb_array"}
    try:
        env = make_env(config, index, **drawn)
    except TypeError:  # It takes no render_mode.
        env = make_env(config, index)
    shapes = [x.shape for x in env.obs_space.values() if x.dtype == np.uint8]
    if any(len(shape) == 3 and shape[2] in (1, 3) for shape in shapes):
        return env
    first = index == config.run.env_offset
    try:
        return wrappers.AddFrames(env, active=first)
    except wrappers.NotRenderable as error:
        if first:
            logging.getLogger("embodied.run").warning(
                "There will be no video: %s cannot be drawn (%s).", config.task, error
            )
        return env


@dataclasses.dataclass(frozen=True)
class EnvFactory:
    """Makes the environments of a run: one by one, or several that step together.

    Attributes:
      config: the whole configuration.
      own: see `make_env`.
    """

    config: elements.Config
    own: Factory | None = None

    def __call__(self, index: int) -> Env:
        """Makes environment `index`."""
        return make_env(self.config, index, self.own)

    def make_batch(self, indices: Sequence[int]) -> BatchEnv | None:
        """Makes several that step together; returns None if the task cannot."""
        config, seed = self.config, _env_seed(self.config)
        own = self.own or registry.own_factory(config.task)
        if own is not None:
            seeds = [registry.env_seed(seed, index) for index in indices]
            envs = registry.adapt_batch(own, seeds, config.env.gym)
        else:
            options = config.env.get(config.task.partition("_")[0], {})
            envs = registry.make_batch(
                config.task, indices=indices, seed=seed, **options
            )
        if envs is None:
            return None
        size = image_size(config, envs.obs_space)
        return wrappers.FitBatch(envs, size, nonfinite="pass")


def image_size(
    config: elements.Config, spaces: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Returns the size to which images must be resized for the networks.

    Returns None if there are no images, or if the networks can take all of them as they
    are. Also returns None for suites whose option `size` holds for all of their tasks,
    and for images of the size of `env.gym`, because that option has been checked.
    """
    suite = suite_of(config.task)
    images = [
        tuple(space.shape[:2])
        for key, space in spaces.items()
        if space.dtype == np.uint8 and len(space.shape) == 3 and "log/" not in key
    ]
    sized = suite not in ("gym", "envpool") and "size" in config.env.get(suite, {})
    if not images or sized:
        return None
    coder = config.agent.enc.simple
    factor = 2 ** (len(coder.mults) - coder.outer)
    low, high = SMALLEST_MAP * factor, LARGEST_MAP * factor
    fits = all(
        side % factor == 0 and low <= side <= high for size in images for side in size
    )
    if (fits and len(set(images)) == 1) or set(images) == {config.env.gym.size}:
        return None
    side = min(max(USUAL_SIZE // factor * factor, low), high)
    return side, side


def make_agent(
    config: elements.Config, spaces: tuple[Spaces, Spaces] | None = None
) -> Agent:
    """Makes the agent for the spaces of the task.

    Args:
      config: the whole configuration.
      spaces: from `make_spaces`, if the caller has called it already.

    Raises:
      ConfigError: the agent cannot work with these spaces, settings or devices.
    """
    obs_space, act_space = spaces or make_spaces(config)
    if config.random_agent:
        return RandomAgent(obs_space, act_space, config, seed=config.seed)
    from dreamerv3.agent import Agent as Dreamer

    with _as_config_errors():
        return Dreamer(obs_space, act_space, config)


def make_acting_agent(
    config: elements.Config, spaces: tuple[Spaces, Spaces] | None = None
) -> Agent:
    """Makes an agent that acts like that of `make_agent`, but cannot be trained."""
    if config.random_agent:
        return make_agent(config, spaces)
    from dreamerv3.policies.acting_agent import ActingAgent

    spaces = spaces or make_spaces(config)
    with _as_config_errors():
        return ActingAgent(*spaces, config, seed=config.seed)


def make_spaces(
    config: elements.Config, own: Factory | None = None
) -> tuple[Spaces, Spaces]:
    """Returns the observation and action spaces of an agent of the task.

    Args:
      config: the whole configuration.
      own: see `make_env`.

    Raises:
      TaskError: the task cannot be used.
      EnvError: the environment itself fails.
    """
    with env_errors(0, TaskError):
        env = make_env(config, 0, own)
    try:
        obs_space = {
            key: space
            for key, space in env.obs_space.items()
            if not key.startswith("log/")
        }
        act_space = {key: env.act_space[key] for key in env.act_space if key != "reset"}
    finally:
        env.close()
    return obs_space, act_space


def make_replay(config: elements.Config, folder: str, mode: str = "train") -> Replay:
    """Makes the replay buffer that saves to a folder of the logdir.

    Args:
      config: the whole configuration.
      folder: name of the folder; each of several replicas has its own inside it.
      mode: 'train', or 'eval' for a tenth of the capacity, and sequences of the length
        of reports.
    """
    training = mode == "train"
    steps = (
        config.consec_train * config.batch_length
        if training
        else config.consec_report * config.report_length
    )
    directory = pathlib.Path(config.logdir, folder)
    if config.replicas > 1:
        directory /= f"{config.replica:05}"
    settings = config.replay
    capacity = settings.size if training else settings.size // 10
    return Replay(
        length=steps + config.replay_context,
        capacity=capacity,
        directory=directory,
        chunksize=settings.chunksize,
        online=settings.online and training,
        selector=_make_selector(config, capacity) if training else None,
        name=folder,
        seed=config.seed,
        context=config.replay_context,
        bytes=settings.bytes,
        compress=settings.compress,
        latent_save_bytes=settings.latent_save_bytes,
    )


def make_stream(config: elements.Config, replay: Replay, mode: str) -> Stream:
    """Makes the stream of batches that are sampled from a replay.

    Args:
      config: the whole configuration.
      replay: a replay whose sequences are long enough.
      mode: 'train', 'report' or 'eval'; decides the length of the sequences.
    """
    training = mode == "train"
    return streams.Consec(
        streams.Stateless(replay.sample, config.batch_size, mode),
        length=config.batch_length if training else config.report_length,
        consec=config.consec_train if training else config.consec_report,
        prefix=config.replay_context,
        strict=training,
        contiguous=True,
    )


def check_outputs(config: elements.Config) -> None:
    """Raises MissingPackageError if an output's package is not installed."""
    for name in EXTRA_OUTPUTS:
        if name in config.logger.outputs and importlib.util.find_spec(name) is None:
            raise loggers.MissingPackageError(name, name)


def make_logger(config: elements.Config) -> loggers.Logger:
    """Makes the logger with the outputs of `config.logger`.

    Its step counts agent steps; outputs get the step times the task's action repeat.
    """
    logdir, settings = config.logdir, config.logger
    if config.replica:  # The curves of the run are those of replica 0.
        logdir = str(pathlib.Path(logdir, "replicas", f"{config.replica:05}"))
    repeat = action_repeat(config.flat)
    pattern = ".*" if settings.timer else r"(?!timer/).*"
    step = elements.Counter()
    endless = config.run.steps >= UNLIMITED

    outputs: list[loggers.Output] = []
    for name in settings.outputs:
        match name:
            case "jsonl":
                outputs += [
                    loggers.JSONLOutput(logdir, "metrics.jsonl", pattern),
                    loggers.JSONLOutput(logdir, "scores.jsonl", "episode/score"),
                ]
            case "tensorboard" if loggers.TensorBoardOutput.available():
                outputs.append(loggers.TensorBoardOutput(logdir, settings.fps, pattern))
            case "tensorboard":  # Missing metrics are no reason to end a run.
                logging.getLogger("embodied.logger").warning(
                    "No events for TensorBoard are written, since the package "
                    "tensorboardX is not installed. Run: pip install tensorboardX"
                )
            case "terminal":
                terminal = loggers.TerminalOutput(
                    settings.filter,
                    total_steps=None if endless else config.run.steps * repeat,
                    total_seconds=config.run.duration or None,
                    step=lambda: int(step) * repeat,
                )
                outputs.append(terminal)
            case "scope":
                outputs.append(loggers.ScopeOutput(logdir, settings.fps, pattern))
            case "wandb":
                wandb = loggers.WandbOutput(
                    f"{config.task}/{config.method}/{config.seed}",
                    logdir,
                    config=dict(config),
                    fps=settings.fps,
                    group=config.method,
                    entity=settings.user or None,
                    pattern=pattern,
                )
                outputs.append(wandb)
    return loggers.Logger(step, outputs, multiplier=repeat)


@contextlib.contextmanager
def _as_config_errors() -> Iterator[None]:
    """Turns errors of an agent about its settings into errors of the configuration."""
    from embodied.jax.setup import SetupError

    try:
        yield
    except (SetupError, ValueError) as error:
        # On one line, although messages of JAX about devices may have several.
        raise ConfigError(" ".join(str(error).split())) from error


def _make_selector(config: elements.Config, capacity: int) -> selectors.Selector:
    settings, seed = config.replay, config.seed
    makers: dict[str, Callable[[], selectors.Selector]] = {
        "uniform": lambda: selectors.Uniform(seed),
        "priority": lambda: selectors.Prioritized(**settings.prio, seed=seed),
        "recency": lambda: selectors.Recency(
            np.arange(1.0, capacity + 1) ** -settings.recexp, seed
        ),
    }
    fractions = {name: share for name, share in settings.fracs.items() if share}
    members = {name: makers[name]() for name in fractions}
    if len(members) == 1:
        return members.popitem()[1]
    return selectors.Mixture(members, fractions, seed)
