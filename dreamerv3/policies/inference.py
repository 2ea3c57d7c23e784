"""The policy of a run, to act with. Any process; it has JAX from `load` on.

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
      path: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it, or what
        `dreamerv3.export` wrote. The run's `config.yaml` has to lie in its logdir.
      mode: `eval` or `train`, which differ only with `agent.eval_mode mode`.
      batch: number of environments to act in at once; by default a single one, whose
        observations and actions have no batch axis.
      platform: `cpu`, `cuda`, `tpu`, or `auto` for the accelerator where there is
        one. JAX must not have been used with another before.
      sample: sample actions, or take the most likely ones; by default as `mode` and
        the run's `agent.eval_mode` say.
      seed: of sampled actions.
      act_space: spaces of an environment without our wrappers, such as the
        `action_space` of Gymnasium by key. Continuous actions are scaled to their
        bounds. By default they are as the wrapped environment takes them, in [-1, 1].
      task: of the run. It is needed only where it names code, as `module:Name` does,
        the checkpoint has no spaces, so that the environment has to be made, and it
        was not you who started the run.
      spaces: of observations and actions, for a checkpoint that has none, such as that
        of a random agent; by default those of the run's task.

    Raises:
      CheckpointError: there is no whole checkpoint, or it does not fit its config.
      ConfigError: there is no config, it cannot be used, or its task is not trusted.
      SetupError: there is no device of the platform.
      ValueError: an argument that cannot be used.
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

    It remembers what it has seen in the episode: call `reset` when one begins.

    Attributes:
      obs_space: what `act` needs of an observation, by key.
      act_space: what it returns, by key.
      step: of the run at which the agent was saved.
      logdir: of that run.
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
        self._first = np.ones(batch or 1, bool)  # Episodes that begin with `act`.
        self._carry = agent.init_policy(batch or 1)

    def reset(self, rows: Any = None) -> None:
        """Begins new episodes with the next observation.

        Args:
          rows: of a batch, those whose episodes begin: a mask [B] or indices. By
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
            given a number of environments. Of the others only `is_first` is read, if
            it is there: an episode begins where it is set, or after `reset`.

        Returns:
          A value for each key of `act_space`: an array, or a NumPy scalar where its
          shape is empty. Continuous ones are within bounds.

        Raises:
          ValueError: it is no dict, a key is missing, or its value does not fit its
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
        """Returns a value of the whole batch, if it fits its space."""
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
                inside |= cast == -1  # Missing.
            if not (np.array_equal(cast, array) and inside.all()):
                raise ValueError(
                    f"act expected {key!r} as {expected} within {low.min()} to "
                    f"{high.max()}, got {brief(array)}."
                )
        return cast if lead else cast[None]

    def _actions(self, actions: Mapping[str, Array]) -> dict[str, Array]:
        """Actions as the environment takes them."""
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
    """Returns the spaces of an agent: from its checkpoint, as known, or of its task.

    Args:
      config: of the run.
      saved: its agent.
      task: as the user has given it, if so.
      known: spaces of the environment, if the caller has them.

    Raises:
      ConfigError: the task of the run names code that nobody here has asked for.
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
def must_fit(saved: SavedAgent) -> Iterator[None]:
    """Names the checkpoint whose weights an agent refuses."""
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
    # Here, for random agents to need no JAX.
    from dreamerv3.policies.acting_agent import ActingAgent, on_one_device

    config = on_one_device(config, platform)
    agent = ActingAgent(obs_space, act_space, config, seed=seed)
    with must_fit(saved):
        agent.load(saved.data)
    return agent


class ActionConverter:
    """Converts actions as our wrappers of environments do.

    Args:
      inner: spaces of the agent.
      outer: spaces of the environment without wrappers. Those of discrete actions may
        be left out.

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
        self._env = env

    def __call__(self, actions: Mapping[str, Array]) -> dict[str, Array]:
        """Converts actions [B, ...]."""
        rows = len(next(iter(actions.values())))
        converted = [
            self._env.step({key: actions[key][row] for key in self._keys})
            for row in range(rows)
        ]
        changed = {key: np.stack([row[key] for row in converted]) for key in self._keys}
        return {**actions, **changed}


def _check_spaces(inner: Spaces, outer: Mapping[str, Any]) -> None:
    """Raises an error if spaces are not those of the actions of an agent."""
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


class _Echo(Env):
    """Returns actions as observations, to see what wrappers make of them."""

    def __init__(self, act_space: Spaces):
        self._act_space = act_space

    @property
    def obs_space(self) -> Spaces:
        """None, so that nothing is done to what is returned."""
        return {}

    @property
    def act_space(self) -> Spaces:
        """As given."""
        return dict(self._act_space)

    def step(self, action: dict[str, Array]) -> dict[str, Array]:
        """Returns the action."""
        return action
