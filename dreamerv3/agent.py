"""The DreamerV3 agent: its functions on the configured devices. Agent process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import elements

from dreamerv3 import model
from dreamerv3.cli.config import read_blocks
from dreamerv3.policies.spaces import spaces_to_tree
from dreamerv3.report import parameter_summary, report_step
from dreamerv3.training import train_step
from embodied.base import Array, Spaces, Tree
from embodied.envs.keys import SIGNALS
from embodied.jax.agent import AgentOptions, JaxAgent
from embodied.jax.algorithm import Algorithm
from embodied.jax.setup import Backend, setup

logger = logging.getLogger("embodied.agent")

# Keys of batches beside observations and actions.
BATCH_KEYS = ("consec", "stepid")
LATENT_KEYS = (model.DETER, model.STOCH)


class Agent(JaxAgent):
    """Learns a world model, and a policy in it. See `embodied.Agent` for its use.

    Subclasses may add losses; `examples/own_loss.py` shows how.

    Args:
      obs_space: spaces by key, `reward`, `is_first`, `is_last` and `is_terminal`
        among them; keys that start with `log/` are left out.
      act_space: spaces by key; `reset` is left out.
      config: the whole configuration, or its `agent` block with other keys beside it,
        such as `jax` and `logdir`. Missing groups are taken from the defaults.
      compiler: options of the compiler.

    Raises:
      ValueError: spaces or settings that the agent cannot work with.
      SetupError: the devices are not those that the settings ask for.
    """

    # Set by subclasses, as a static method; each loss needs a scale of the same name.
    extra_losses: model.ExtraLosses | None = None

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: Mapping[str, Any],
        *,
        compiler: Mapping[str, Any] | None = None,
    ):
        config = whole_config(config)
        self.config = elements.Config(config)
        self._report = config["agent"]["report"]
        backend = set_up_devices(config)
        extra = type(self).extra_losses
        algorithm = make_algorithm(obs_space, act_space, config, backend, extra)
        options = _options(config, compiler)
        self.obs_space = agent_observations(obs_space)
        # `dreamerv3.load` needs them.
        spaces = spaces_to_tree(self.obs_space, agent_actions(act_space))
        super().__init__(algorithm, options, {"spaces": spaces})
        logger.info(
            "The agent computes in %s on %s. It has %s",
            backend.compute_dtype,
            backend.platform,
            parameter_summary(self._trainer.shapes.model),
        )

    def report(
        self, carry: Tree, batch: Mapping[str, Array]
    ) -> tuple[Tree, dict[str, Array]]:
        """Computes metrics and videos, unless `agent.report` is off."""
        return super().report(carry, batch) if self._report else (carry, {})


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the whole configuration, with defaults for groups that are missing."""
    defaults = read_blocks()["defaults"]
    inner = {}
    if "agent" not in config:
        inner = {key: config[key] for key in defaults["agent"] if key in config}
    given = {key: value for key, value in config.items() if key not in inner}
    # Agents do not need the task, so it may not have been given.
    defaults["task"] = "unknown"
    return {**defaults, "agent": {**defaults["agent"], **inner}, **given}


def make_algorithm(
    obs_space: Spaces,
    act_space: Spaces,
    config: Mapping[str, Any],
    backend: Backend,
    extra_losses: model.ExtraLosses | None = None,
) -> Algorithm:
    """Assembles the agent's functions."""
    settings = config["agent"]
    context = config["replay_context"]
    observations = agent_observations(obs_space)
    missing = [key for key in SIGNALS if key not in observations]
    if missing:
        raise ValueError(
            f"The agent expected observations {', '.join(SIGNALS)}, got "
            f"{', '.join(observations)}. Add {', '.join(missing)} to the environment."
        )
    actions = agent_actions(act_space)
    init = functools.partial(
        model.init,
        obs_space=observations,
        act_space=actions,
        config=settings,
        compute_dtype=backend.compute_dtype,
        replay_context=context,
        priority=config["replay"]["fracs"]["priority"] > 0,
        tuning=model.CPU if backend.platform == "cpu" else model.ACCELERATOR,
        extra_losses=extra_losses,
    )
    same = settings["eval_mode"] == "sample"
    return Algorithm(
        init=init,
        carry=_carry,
        train=train_step,
        report=functools.partial(report_step, gradients=settings["report_gradnorms"]),
        policy_params=_policy_params,
        policy=model.policy,
        observations={
            key: space
            for key, space in observations.items()
            if key not in SIGNALS or key == "is_first"
        },
        batch_keys=(
            *observations,
            *actions,
            *BATCH_KEYS,
            *(LATENT_KEYS if context else ()),
        ),
        modes={"train": "train", "eval": "train" if same else "eval"},
    )


def agent_observations(obs_space: Spaces) -> Spaces:
    """Returns the spaces of observations that reach the agent, sorted by key."""
    return dict(model.named_spaces(obs_space, ()))


def agent_actions(act_space: Spaces) -> Spaces:
    """Returns the spaces of actions that the agent chooses, sorted by key."""
    return dict(model.named_spaces(act_space, ("reset",)))


def set_up_devices(config: Mapping[str, Any]) -> Backend:
    """Prepares JAX as the configuration says; see `embodied.jax.setup`."""
    given = config["jax"]
    same = (
        *("platform", "compute_dtype", "mock_devices", "prealloc", "jit", "debug"),
        *("deterministic", "concurrent", "expect_devices", "coordinator_address"),
    )
    return setup(
        **{name: given[name] for name in same},
        replica=config["replica"],
        replicas=config["replicas"],
        train_devices=len(given["train_devices"]),
    )


def _options(
    config: Mapping[str, Any], compiler: Mapping[str, Any] | None
) -> AgentOptions:
    run, given = config["run"], config["jax"]
    batch = run["actor_batch"]
    return AgentOptions(
        seed=config["seed"],
        train_devices=tuple(given["train_devices"]),
        train_mesh=given["train_mesh"],
        policy_devices=tuple(given["policy_devices"]),
        policy_mesh=given["policy_mesh"],
        enable_policy=given["enable_policy"],
        policy_beside=given["policy_beside"],
        deterministic=given["deterministic"],
        actor_batch=batch if batch > 0 else max(1, run["envs"] // 2),
        max_nonfinite=run["max_nonfinite"],
        folder=config["logdir"],
        compiler=compiler,
    )


def _carry(params: Any, rows: int) -> model.Carry:
    return model.init_carry(getattr(params, "model", params), rows)


def _policy_params(state: model.State) -> model.PolicyNetworks:
    return model.policy_params(state.model)
