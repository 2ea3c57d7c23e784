"""An agent that only acts: no optimiser, no decoder, no values. Agent process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import elements
import jax
import numpy as np

from dreamerv3.agent import make_algorithm, set_up_devices
from embodied.base import Agent, Array, Spaces, Tree
from embodied.jax import devices
from embodied.jax.param_names import (
    choose_arrays,
    flat_params,
    name_matches,
    with_flat_params,
)
from embodied.jax.policy_runner import Parameters, PolicyRunner


def on_one_device(config: elements.Config, platform: str) -> elements.Config:
    """Returns the configuration of a run for a program that does not train.

    Args:
      config: the whole configuration.
      platform: `cpu`, `cuda`, `tpu`, or `auto`.
    """
    return config.update(
        {
            "replica": 0,
            "replicas": 1,
            "jax.platform": platform,
            "jax.policy_devices": (0,),
            "jax.policy_mesh": "-1,1,1",
            "jax.train_devices": (0,),
            "jax.train_mesh": "-1,1,1",
            "jax.mock_devices": 0,
            "jax.expect_devices": 0,
            "jax.prealloc": False,
        }
    )


class ActingAgent(Agent):
    """Acts like the agent that it is loaded from, with a third of its memory or less.

    It has the methods that collecting needs: `load`, `init_policy` and `policy`. Only
    the weights of encoder, dynamics and policy are on the device.

    Args:
      obs_space: observation space of the saved agent.
      act_space: action space of the saved agent.
      config: the whole configuration of its run.
      seed: seed of the actions; with the seed of the saved agent, it acts the same.
    """

    def __init__(
        self, obs_space: Spaces, act_space: Spaces, config: Any, *, seed: int = 0
    ):
        given = config["jax"]
        backend = set_up_devices(config)
        # Without context, the policy returns no latents for a replay. `_no_losses` lets
        # the configuration have scales of extra losses, which acting does not need.
        algorithm = make_algorithm(
            *(obs_space, act_space, {**config, "replay_context": 0}, backend),
            extra_losses=_no_losses,
        )
        self._algorithm = algorithm
        self._seed = seed
        self._layout = devices.policy_layout(
            given["policy_devices"], given["policy_mesh"]
        )
        params = jax.eval_shape(self._init, jax.random.key(seed))
        self._shapes, self._leaves = params, flat_params(params)
        self._shardings = jax.tree.leaves(self._layout.weights(params))
        self._parameters = Parameters(None, wait=True)
        # The seeds of the full agent, for the same actions.
        seeds = (seed, jax.process_index())
        self._runner = PolicyRunner(
            algorithm, self._layout, params, self._parameters, seeds
        )
        self._loaded = False

    def load(self, data: Tree, regex: str | None = None) -> None:
        """Loads the weights that acting needs from the result of an agent's `save`.

        Args:
          data: from `save`.
          regex: load only weights whose flat name begins with a match; the others are
            random.

        Raises:
          ValueError: weights are missing or have other shapes, or nothing matches.
        """
        chosen = self.weights(data, regex)
        if len(chosen) < len(self._leaves):
            fresh = jax.jit(self._init)(jax.random.key(self._seed))
            chosen = {**dict(zip(self._leaves, jax.tree.leaves(fresh))), **chosen}
        values = [np.asarray(chosen[name]) for name in self._leaves]
        self._parameters.publish(devices.put(values, self._shardings))
        self._loaded = True

    @property
    def inputs(self) -> tuple[str, ...]:
        """Keys of the observations that acting reads."""
        return tuple(self._algorithm.observations)

    def params(self, data: Tree) -> Tree:
        """Returns the networks that acting needs, with the weights of a saved agent.

        Errors are those of `load`.
        """
        return with_flat_params(self._shapes, self.weights(data))

    def weights(self, data: Tree, regex: str | None = None) -> dict[str, Array]:
        """Returns the weights that acting needs, in the dtypes that it uses.

        Arguments and errors are those of `load`.
        """
        names = [name for name in self._leaves if name_matches(regex, name)]
        if not names:
            raise ValueError(
                "run.from_checkpoint_regex: expected to match names such as "
                f"{min(self._leaves)!r}, got {regex!r}, which matches none."
            )
        shapes = {name: self._leaves[name].shape for name in names}
        given = {name: data["params"][name] for name in names if name in data["params"]}
        return {
            name: np.asarray(value).astype(self._leaves[name].dtype)
            for name, value in choose_arrays(given, shapes, None).items()
        }

    def init_policy(self, batch_size: int) -> Tree:
        """Returns the carry of environments before their first step, on the device."""
        return self._runner.init_carry(batch_size)

    def policy(
        self, carry: Tree, obs: Mapping[str, Array], mode: str = "eval"
    ) -> tuple[Tree, dict[str, Array], dict[str, Array]]:
        """Chooses actions [B, ...]; the carry stays on the device.

        Raises:
          RuntimeError: no weights were loaded yet.
        """
        if not self._loaded:
            raise RuntimeError(
                "policy expected weights, but there are none. Call load first."
            )
        carry, actions, _ = self._runner.policy(carry, obs, mode)
        return carry, actions, {}

    def _init(self, key: Array) -> Tree:
        return self._algorithm.policy_params(self._algorithm.init(key))


def _no_losses(*_: Any) -> dict[str, Array]:
    return {}
