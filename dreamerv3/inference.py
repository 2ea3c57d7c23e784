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

from dreamerv3.config import run_config
from dreamerv3.conversion import ActionConverter
from dreamerv3.spaces import spaces_from_tree
from embodied.base import Agent, Array, Spaces, Tree
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
) -> Policy:
    """Loads the policy of a run's newest checkpoint.

    It needs neither the replay nor the environments of the run, and no memory for an
    optimiser.

    Args:
      path: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it. The run's
        `config.yaml` has to lie in its logdir.
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

    Raises:
      CheckpointError: there is no whole checkpoint, or it does not fit its config.
      ConfigError: there is no config, or it cannot be used.
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
    saved = read_agent(path)
    config = run_config(saved.logdir)
    if sample is not None:
        mode = "eval"
        config = config.update({"agent.eval_mode": "sample" if sample else "mode"})
    obs_space, act_spaces = agent_spaces(config, saved)
    converter = None if act_space is None else ActionConverter(act_spaces, act_space)
    agent = _make_agent(config, saved, platform, obs_space, act_spaces, seed)
    return Policy(agent, obs_space, act_spaces, mode, batch, saved.step, converter)


class Policy:
    """Chooses actions for the environments of one thread.

    It remembers what it has seen in the episode: call `reset` when one begins.

    Attributes:
      obs_space: what `act` needs of an observation, by key.
      act_space: what it returns, by key.
      step: of the run at which the agent was saved.
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
    ):
        # The policy need not be given what tells about the episode.
        self.obs_space = {k: v for k, v in obs_space.items() if k not in SIGNALS}
        self.act_space = dict(converter.spaces if converter else act_space)
        self.step = step
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


def agent_spaces(config: elements.Config, saved: SavedAgent) -> tuple[Spaces, Spaces]:
    """Returns the spaces of an agent: from its checkpoint, else from its task."""
    found: Tree = saved.data.get("spaces")
    if found is not None:
        return spaces_from_tree(found["obs"]), spaces_from_tree(found["act"])
    from dreamerv3.factories import make_spaces

    return make_spaces(config)


@contextlib.contextmanager
def must_fit(saved: SavedAgent) -> Iterator[None]:
    """Says which checkpoint it is whose weights an agent refuses."""
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
    from dreamerv3.acting import ActingAgent, on_one_device

    config = on_one_device(config, platform)
    agent = ActingAgent(obs_space, act_space, config, seed=seed)
    with must_fit(saved):
        agent.load(saved.data)
    return agent
