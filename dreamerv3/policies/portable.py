"""Policies for other runtimes: one step as a function of arrays by name. Any process.

Inputs and outputs of a step are flat, and the same for every runtime:

    obs/KEY, obs/is_first      observations of a batch of environments, [B, ...]
    carry/deter, carry/stoch   recurrent state of the episodes, zeros at first
    carry/action/KEY           the last actions as they were returned, zeros at first
    noise/state                [B, S, C] Gumbel noise of the states
    noise/action/KEY           Gumbel noise of discrete, normal of continuous actions
    action/KEY                 returned: the actions; continuous ones must be clipped
    next/deter, next/stoch     returned: carry/deter and carry/stoch of the next step

With zeros for noise, states and actions are the most likely ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import elements
import jax
import jax.export
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from dreamerv3 import model
from dreamerv3.cli.config import run_config
from dreamerv3.policies.acting_agent import ActingAgent, on_one_device
from dreamerv3.policies.hub import to_json
from dreamerv3.policies.inference import agent_spaces, checkpoint_errors
from dreamerv3.policies.spaces import spaces_to_tree
from embodied.base import Array, Spaces
from embodied.checkpoint import CheckpointError
from embodied.run.saving import SavedAgent, read_agent

PLATFORMS = ("cpu", "cuda", "tpu")
SIGNATURE = "policy.json"
SHAPE = "B"  # Name of the number of environments, which can vary.

Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class PortablePolicy:
    """One step of a policy, with its weights.

    Attributes:
      params: the networks.
      config: the whole configuration of the run.
      saved: the checkpoint.
      obs_space: spaces of the observations of the agent, by key.
      act_space: spaces of the actions it chooses, by key.
      seen: keys of the observations that the policy reads, `is_first` included.
    """

    params: model.PolicyNetworks
    config: elements.Config
    saved: SavedAgent
    obs_space: Spaces
    act_space: Spaces
    seen: tuple[str, ...]

    def __call__(self, inputs: Mapping[str, Array]) -> Arrays:
        """Computes the outputs of a step from its inputs, by name; see the module."""
        carry = {
            "deter": inputs["carry/deter"],
            "stoch": inputs["carry/stoch"],
            "action": _inside(inputs, "carry/action/"),
        }
        noise = {
            "state": inputs["noise/state"],
            "action": _inside(inputs, "noise/action/"),
        }
        obs = _inside(inputs, "obs/")
        latent, actions = model.policy_step(self.params, carry, obs, noise)
        return {
            **{f"action/{key}": value for key, value in actions.items()},
            **{f"next/{key}": value for key, value in latent.items()},
        }

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Returns dtype and shape of the inputs, in the order that runtimes take them.

        Args:
          batch: number of environments, or a dimension of `jax.export`.
        """
        carry = jax.eval_shape(lambda: model.init_carry(self.params, batch))
        noise = jax.eval_shape(
            lambda: model.policy_noise(self.params, jnp.zeros(2, jnp.uint32), batch)
        )
        return {
            **{
                f"obs/{key}": jax.ShapeDtypeStruct((batch, *space.shape), space.dtype)
                for key, space in self._seen_spaces().items()
            },
            **{f"carry/{key}": carry[key] for key in ("deter", "stoch")},
            **{f"carry/action/{key}": x for key, x in carry["action"].items()},
            "noise/state": noise["state"],
            **{f"noise/action/{key}": x for key, x in noise["action"].items()},
        }

    def signature(self) -> dict[str, Any]:
        """Returns descriptions of the inputs, outputs and spaces, as JSON values."""
        one = self.inputs(1)
        spaces = to_json(spaces_to_tree(self._seen_spaces(), self.act_space))
        outputs = jax.eval_shape(self.__call__, one)
        return {
            "step": self.saved.step,
            "task": self.config.task,
            "inputs": {key: _described(x) for key, x in one.items()},
            "outputs": {key: _described(x) for key, x in outputs.items()},
            "obs_space": spaces["obs"],
            "act_space": spaces["act"],
        }

    def _seen_spaces(self) -> Spaces:
        return {key: self.obs_space[key] for key in sorted(self.seen)}


def load_portable(
    source: str | os.PathLike[str], task: str | None = None
) -> PortablePolicy:
    """Loads the policy of a run's newest checkpoint, in float32.

    Args:
      source: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it.
      task: task of the run; needed only if it names code, see `dreamerv3.load`.

    Raises:
      CheckpointError: there is no complete checkpoint, or it does not fit its config.
      ConfigError: there is no config, it cannot be used, or its task is not trusted.
    """
    saved = read_agent(source)
    config = run_config(saved.logdir)
    if config.random_agent:
        raise CheckpointError(
            f"export expected an agent with weights in {saved.logdir}."
        )
    obs_space, act_space = agent_spaces(config, saved, task)
    agent = ActingAgent(obs_space, act_space, on_one_device(config, "cpu"))
    with checkpoint_errors(saved):
        params = agent.params(saved.data)
    return PortablePolicy(params, config, saved, obs_space, act_space, agent.inputs)


def write_stablehlo(policy: PortablePolicy, folder: pathlib.Path) -> None:
    """Writes `policy.stablehlo`, for several platforms and any number of envs.

    It takes all inputs as one dict, and returns one. `jax.export.deserialize` reads it.
    """
    batch = jax.export.symbolic_shape(SHAPE.lower())[0]
    # For all platforms, because it is not known here where it will run.
    exported = jax.export.export(jax.jit(policy.__call__), platforms=PLATFORMS)(
        policy.inputs(batch)
    )
    (folder / "policy.stablehlo").write_bytes(exported.serialize())
    _write_signature(policy, folder)


def write_onnx(policy: PortablePolicy, folder: pathlib.Path) -> None:
    """Writes `policy.onnx`, for any number of environments.

    Raises:
      ImportError: the extra `onnx` is not installed.
    """
    try:
        import jax2onnx
    except ImportError as error:
        raise ImportError(
            f"--format onnx needs the package {error.name!r}, which is not installed. "
            "Run: pip install 'dreamerv3-parallel[onnx]'"
        ) from error

    specs = policy.inputs(jax.export.symbolic_shape(SHAPE)[0])
    outputs = list(jax.eval_shape(policy.__call__, specs))

    def step(*arrays: Array) -> tuple[Array, ...]:
        results = policy(dict(zip(specs, arrays)))
        return tuple(results[name] for name in outputs)

    # Traced before it is converted, because jax2onnx replaces functions of jax.numpy
    # while it traces, by others that promote dtypes as NumPy does.
    traced = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(step)(*specs.values()))
    jax2onnx.to_onnx(
        traced,
        list(specs.values()),
        model_name="policy",
        input_names=list(specs),
        output_names=outputs,
        return_mode="file",
        output_path=folder / "policy.onnx",
    )
    _write_signature(policy, folder)


WRITERS: dict[str, Callable[[PortablePolicy, pathlib.Path], None]] = {
    "stablehlo": write_stablehlo,
    "onnx": write_onnx,
}


def _write_signature(policy: PortablePolicy, folder: pathlib.Path) -> None:
    text = json.dumps(policy.signature(), indent=2)
    (folder / SIGNATURE).write_text(f"{text}\n", "utf-8")


def _inside(arrays: Mapping[str, Array], prefix: str) -> Arrays:
    return {
        key.removeprefix(prefix): value
        for key, value in arrays.items()
        if key.startswith(prefix)
    }


def _described(x: Any) -> dict[str, Any]:
    return {"dtype": np.dtype(x.dtype).name, "shape": [SHAPE, *x.shape[1:]]}
