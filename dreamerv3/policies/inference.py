"""The policy of a run, to act with. Any process; `load` imports JAX.

policy = dreamerv3.load('logdir/run')
obs = env.step(reset)
policy.reset()
while not obs['is_last']:
    obs = env.step({'reset': False, **policy.act(obs)})
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import elements
import numpy as np

from dreamerv3.cli.config import ConfigError, run_config
from dreamerv3.cli.task_origin import find_task_problem
from dreamerv3.policies.hub import is_hub, read_hub
from dreamerv3.policies.spaces import spaces_from_tree
from embodied import wrappers
from embodied.base import Agent, Array, Env, Spaces, Tree
from embodied.checkpoint import CheckpointError
from embodied.envs.keys import SIGNALS
from embodied.run.saving import SavedAgent, read_agent
from embodied.space import Space
from embodied.wrappers.batch_wrappers import ActionSpaces
from embodied.wrappers.checking import brief

MODES = ("eval", "train")


def load(
    path: str | os.PathLike[str],
    mode: str = "eval",
    *,
    batch: int | None = None,
    platform: str = "auto",
    sample: bool | None = None,
    seed: int = 0,
    act_space: Mapping[str, Any] | None = None,
    task: str | None = None,
    spaces: tuple[Spaces, Spaces] | None = None,
) -> LoadedPolicy:
    """Loads the policy of a run's newest checkpoint.

    It needs neither the replay nor the environments of the run, and no memory for an
    optimiser.

    Args:
      path: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it, or a
        folder from `dreamerv3.export` of format `policy` or `hub`. The run's
        `config.yaml` must be in its logdir.
      mode: `eval` or `train`, which differ only with `agent.eval_mode mode`.
      batch: number of environments to act in at once; by default a single one, whose
        observations and actions have no batch axis.
      platform: `cpu`, `cuda`, `tpu`, or `auto` for the accelerator if there is one.
        JAX must not have been used with another platform before.
      sample: sample actions, or take the most likely ones; by default as `mode` and
        the run's `agent.eval_mode` say.
      seed: of sampled actions.
      act_space: action spaces by key of an environment without wrappers, such as the
        `action_space` of Gymnasium. Continuous actions are scaled to their bounds. By
        default they are in [-1, 1], as the wrapped environment takes them.
      task: task of the run. It is needed only if it names code, as `module:Name` does,
        this user has not started the run on this machine, and the checkpoint has no
        spaces, so that the environment has to be made.
      spaces: of observations and actions, for a checkpoint that has none, such as that
        of a random agent; by default those of the run's task.

    Raises:
      CheckpointError: there is no complete checkpoint, or it does not fit its config.
      ConfigError: there is no config, it cannot be used, or its task is not trusted.
      SetupError: there is no device of the platform.
      ValueError: an argument cannot be used.
    """
    if mode not in MODES:
        raise ValueError(f"load expected mode {' or '.join(MODES)}, got {mode!r}.")
    whole = isinstance(batch, int | np.integer)
    if batch is not None and not (whole and batch >= 1):
        raise ValueError(
            f"load expected batch of at least 1, or None, got {brief(batch)}."
        )
    saved = read_hub(path) if is_hub(path) else read_agent(path)
    config = run_config(saved.logdir)
    if sample is not None:
        mode = "eval"
        config = config.update({"agent.eval_mode": "sample" if sample else "mode"})
    obs_space, act_spaces = agent_spaces(config, saved, task, spaces)
    converter = None if act_space is None else ActionConverter(act_spaces, act_space)
    agent = _make_agent(config, saved, platform, obs_space, act_spaces, seed)
    return LoadedPolicy(
        *(agent, obs_space, act_spaces, mode, batch, saved.step, converter),
        logdir=saved.logdir,
    )


class LoadedPolicy:
    """Chooses actions for the environments of one thread.

    It carries a recurrent state through each episode: call `reset` when one begins.

    Attributes:
      obs_space: spaces of the observations that `act` needs, by key.
      act_space: spaces of the actions that `act` returns, by key.
      step: step of the run at which the agent was saved.
      logdir: logdir of that run.
    """

    def __init__(
        self,
        agent: Agent,
        obs_space: Spaces,
        act_space: Spaces,
        mode: str = "eval",
        batch: int | None = None,
        step: int = 0,
        converter: ActionConverter | None = None,
        logdir: str | os.PathLike[str] = "",
    ):
        # Signals about the episode need not be given.
        self.obs_space = {k: v for k, v in obs_space.items() if k not in SIGNALS}
        self.act_space = dict(converter.spaces if converter else act_space)
        self.step = step
        self.logdir = os.fspath(logdir)
        self._agent = agent
        self._clip = {k: v for k, v in act_space.items() if not v.discrete}
        self._converter = converter
        self._mode = mode
        self._batch = batch
        self._first = np.ones(batch or 1, bool)  # Rows whose episode begins.
        self._carry = agent.init_policy(batch or 1)

    def reset(self, rows: Any = None) -> None:
        """Begins new episodes with the next observation.

        Args:
          rows: rows of a batch whose episodes begin, as a mask [B] or indices. By
            default all.
        """
        if rows is None:
            self._first[:] = True
            return
        rows = np.asarray(rows)
        count = self._batch or 0
        mask = rows.dtype == bool and rows.shape == (count,)
        indices = rows.dtype.kind in "iu" and np.all((rows >= 0) & (rows < count))
        if not (mask or indices) and rows.size:
            raise ValueError(
                f"reset expected a mask or indices of a batch of {count}, got "
                f"{brief(rows)}."
                + ("" if count else " With a single environment, give no rows.")
            )
        self._first[rows if rows.size else []] = True

    def act(self, obs: Mapping[str, Any]) -> dict[str, Array]:
        """Chooses actions.

        Args:
          obs: a value for each key of `obs_space`, with a batch axis if `load` was
            given a number of environments. Of other keys only `is_first` is read, if
            given: an episode begins where it is set, or after `reset`.

        Returns:
          A value for each key of `act_space`: an array, or a NumPy scalar where its
          shape is empty. Continuous ones are within bounds.

        Raises:
          ValueError: `obs` is not a dict, a key is missing, or a value does not fit its
            space.
        """
        if not isinstance(obs, Mapping):
            keys = ", ".join(self.obs_space)
            raise ValueError(
                f"act expected a dict of observations by key, {keys}, got {brief(obs)}."
            )
        missing = sorted(set(self.obs_space) - set(obs))
        if missing:
            raise ValueError(
                f"act expected observations {', '.join(self.obs_space)}, got "
                f"{', '.join(sorted(obs)) or 'none'}: {', '.join(missing)} is missing."
            )
        inputs = {k: self._value(k, obs[k], v) for k, v in self.obs_space.items()}
        if "is_first" in obs:
            first = self._value("is_first", obs["is_first"], Space(bool))
            self._first |= first
        inputs["is_first"] = self._first.copy()
        self._carry, actions, _ = self._agent.policy(
            self._carry, inputs, mode=self._mode
        )
        self._first[:] = False
        return self._actions(actions)

    def _value(self, key: str, value: Any, space: Space) -> np.ndarray:
        """Returns a value as an array [B, ...]; raises unless it fits its space."""
        array = np.asarray(value)
        lead = () if self._batch is None else (self._batch,)
        expected = f"{space.dtype} of shape {(*lead, *space.shape)}"
        if array.shape != (*lead, *space.shape) or array.dtype.kind not in "biuf":
            raise ValueError(f"act expected {key!r} as {expected}, got {brief(array)}.")
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(space.dtype)
        if space.discrete:
            low, high = space.limits
            inside = (low <= cast) & (cast <= high)
            if space.dtype.kind == "i":
                inside |= cast == -1  # Stands for missing.
            if not (np.array_equal(cast, array) and inside.all()):
                raise ValueError(
                    f"act expected {key!r} as {expected} within {low.min()} to "
                    f"{high.max()}, got {brief(array)}."
                )
        return cast if lead else cast[None]

    def _actions(self, actions: Mapping[str, Array]) -> dict[str, Array]:
        """Clips and converts actions to those that the environment takes."""
        clipped = {
            # Policies sample without bounds; wrapped environments would clip, too.
            key: np.clip(x, self._clip[key].low, self._clip[key].high).astype(x.dtype)
            if key in self._clip
            else x
            for key, x in actions.items()
        }
        if self._converter is not None:
            clipped = self._converter(clipped)
        if self._batch is None:
            return {key: value[0] for key, value in clipped.items()}
        return clipped


def agent_spaces(
    config: elements.Config,
    saved: SavedAgent,
    task: str | None = None,
    known: tuple[Spaces, Spaces] | None = None,
) -> tuple[Spaces, Spaces]:
    """Returns an agent's spaces: from its checkpoint, else `known`, else of its task.

    Args:
      config: configuration of the run.
      saved: its agent.
      task: task that the user has given, if any.
      known: spaces of the environment, if the caller has them.

    Raises:
      ConfigError: the run's task names code, and this user has neither started the run
        nor given the task.
    """
    found: Tree = saved.data.get("spaces")
    if found is not None:
        return spaces_from_tree(found["obs"]), spaces_from_tree(found["act"])
    if known is not None:
        return known
    if task is not None:
        config = config.update(task=task)
    elif problem := find_task_problem(saved.logdir, config.task, "task={task!r}"):
        raise ConfigError(problem)
    from dreamerv3.cli.factories import make_spaces

    return make_spaces(config)


@contextlib.contextmanager
def checkpoint_errors(saved: SavedAgent) -> Iterator[None]:
    """Turns a ValueError about weights into an error that names the checkpoint."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(
            f"Checkpoint {saved.tag} in {saved.logdir} does not fit the configuration "
            f"there. {error}"
        ) from error


def _make_agent(
    config: elements.Config,
    saved: SavedAgent,
    platform: str,
    obs_space: Spaces,
    act_space: Spaces,
    seed: int,
) -> Agent:
    if config.random_agent:
        from embodied.random_agent import RandomAgent

        return RandomAgent(obs_space, act_space, seed=seed)
    # Imported here, because random agents do not need JAX.
    from dreamerv3.policies.acting_agent import ActingAgent, on_one_device

    config = on_one_device(config, platform)
    agent = ActingAgent(obs_space, act_space, config, seed=seed)
    with checkpoint_errors(saved):
        agent.load(saved.data)
    return agent


class ActionConverter:
    """Converts actions as the wrappers of environments do.

    Args:
      inner: action spaces of the agent.
      outer: action spaces of the environment without wrappers. Those of discrete
        actions may be left out.

    Raises:
      ValueError: a continuous action has no space, or a space does not fit.
    """

    def __init__(self, inner: Spaces, outer: Mapping[str, Any]):
        _check_spaces(inner, outer)
        self._keys = [key for key, space in inner.items() if not space.discrete]
        missing = [key for key in self._keys if key not in outer]
        if missing:
            raise ValueError(
                f"act_space expected the spaces of {', '.join(self._keys)}, got "
                f"{', '.join(outer) or 'none'}: {', '.join(missing)} is missing."
            )
        spaces = {key: _continuous(key, outer[key]) for key in self._keys}
        env: Env = _Echo(spaces)
        for key in self._keys:
            env = wrappers.NormalizeAction(env, key)
        env = wrappers.UnifyDtypes(env)
        for key in self._keys:
            env = wrappers.ClipAction(env, key)
            if env.act_space[key].shape != inner[key].shape:
                raise ValueError(
                    f"act_space expected {key!r} of shape {inner[key].shape}, as the "
                    f"agent was trained with, got {spaces[key]}."
                )
        self.spaces = {**inner, **spaces}
        self._leaves = _shifted_leaves(inner, outer)
        for key, leaf in self._leaves.items():
            shape, low, high = (
                inner[key].shape,
                leaf.start,
                leaf.start + inner[key].classes,
            )
            self.spaces[key] = Space(leaf.source.dtype, shape, low, high)
        self._env = env

    def __call__(self, actions: Mapping[str, Array]) -> dict[str, Array]:
        """Converts actions [B, ...]."""
        rows = len(next(iter(actions.values())))
        converted = [
            self._env.step({key: actions[key][row] for key in self._keys})
            for row in range(rows)
        ]
        changed = {key: np.stack([row[key] for row in converted]) for key in self._keys}
        shifted = {key: x.decode(actions[key]) for key, x in self._leaves.items()}
        return {**actions, **changed, **shifted}


def _shifted_leaves(inner: Spaces, outer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `SpaceLeaf` of each discrete action that does not begin at 0."""
    import gymnasium

    from embodied.envs.gym_spaces import act_leaf

    leaves = {
        key: act_leaf(key, (), outer[key])
        for key, space in inner.items()
        if space.discrete and isinstance(outer.get(key), gymnasium.Space)
    }
    return {key: leaf for key, leaf in leaves.items() if leaf.start is not None}


def _check_spaces(inner: Spaces, outer: Mapping[str, Any]) -> None:
    """Raises ValueError if spaces of an environment do not fit those of an agent."""
    if not isinstance(outer, Mapping):
        example = f"{{{next(iter(inner))!r}: env.action_space}}"
        raise ValueError(
            f"act_space expected a dict of spaces by key, such as {example}, got "
            f"{outer!r}."
        )
    unknown = [key for key in outer if key not in inner and key != "reset"]
    if unknown:
        raise ValueError(
            f"act_space expected keys of the agent's actions, {', '.join(inner)}, got "
            f"{', '.join(map(repr, unknown))}."
        )
    for key, space in inner.items():
        if space.discrete and key in outer:
            found = _classes(outer[key])
            if not np.array_equal(found, space.classes):
                raise ValueError(
                    f"act_space expected {key!r} with {space.classes} classes, as the "
                    f"agent was trained with, got {outer[key]!r}."
                )


def _classes(space: Any) -> Any:
    """Returns numbers of classes like `Space.classes`; None where there are none."""
    shape = getattr(space, "shape", None)
    if isinstance(space, Space | elements.Space):
        return space.classes if space.discrete else None
    if hasattr(space, "nvec"):  # Gymnasium's MultiDiscrete.
        return space.nvec
    if hasattr(space, "n"):  # Its Discrete and, with any shape, MultiBinary.
        return np.full(shape, 2) if shape else int(space.n)
    if hasattr(space, "high") and np.dtype(space.dtype).kind in "iu":  # Its Box.
        return space.high.astype(object) - space.low.astype(object) + 1
    return None


def _continuous(key: str, space: Any) -> Space:
    try:
        found = Space.of(space)
    except (TypeError, ValueError):
        found = None
    if found is None or found.discrete:
        raise ValueError(
            f"act_space expected {key!r} as a space of floats, such as a Box of "
            f"Gymnasium, got {space!r}."
        )
    return found


class _Echo(ActionSpaces):
    """Returns actions as observations, to get them as wrappers convert them."""

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Returns the action."""
        return action
