"""Runs an algorithm's pure functions as an agent: devices, threads, checkpoints.

Agent process. The learner's thread calls train, report, save and load; the actor's
threads call policy and policy_table. They meet only where an update hands the policy
its new parameters.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from embodied.base import Agent, Array, Tree
from embodied.jax import devices
from embodied.jax.algorithm import Algorithm
from embodied.jax.compiling import compiles, is_compiling
from embodied.jax.device_stream import Placer, open_stream
from embodied.jax.devices import Layout
from embodied.jax.param_names import OPT, choose_arrays, name_matches
from embodied.jax.policy_runner import Parameters, PolicyRunner
from embodied.jax.second_client import second_client
from embodied.jax.train_runner import NonfiniteWatch, TrainRunner

STREAM_SEED = 0


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """Options of an agent: seeds, devices, limits.

    Attributes:
      seed: of weights, training and actions.
      train_devices: indices of each host's devices that train.
      train_mesh: how they are arranged; see `embodied.jax.devices`.
      policy_devices: indices of this host's devices that run the policy.
      policy_mesh: how they are arranged.
      enable_policy: whether there is a policy; a host that only trains needs none.
      policy_beside: run the policy beside updates on the same device, instead of
        between them.
      deterministic: act with the newest parameters, even if that means waiting.
      actor_batch: how many environments usually step together.
      max_nonfinite: non-finite updates in a row at which to end; 0 for never.
      folder: where to write the batch of the last one.
      compiler: options of the compiler.
    """

    seed: int = 0
    train_devices: Sequence[int] = (0,)
    train_mesh: str = "-1,1,1"
    policy_devices: Sequence[int] = (0,)
    policy_mesh: str = "-1,1,1"
    enable_policy: bool = True
    policy_beside: bool = False
    deterministic: bool = False
    actor_batch: int = 0
    max_nonfinite: int = 0
    folder: str | os.PathLike[str] = "."
    compiler: Mapping[str, Any] | None = None


class JaxAgent(Agent):
    """Runs an algorithm. JAX must have been set up before; see `embodied.jax.setup`.

    Beside the methods of every agent it has `flush`, and for actors the policy over a
    table of carries that stays on the device:

        agent.init_table(slots)
        actions, outputs = agent.policy_table([3, 0], obs, mode='train')
        agent.reset_slots([3])

    `_lock` guards the number of streams that were opened.

    Args:
      algorithm: the pure functions.
      options: how to run them.
      facts: plain values that belong to the agent and are saved with its state.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        options: AgentOptions,
        facts: Mapping[str, Tree] | None = None,
    ):
        self.options = options
        self._facts = dict(facts or {})
        self._lock = threading.Lock()
        self._streams = 0
        train = devices.train_layout(options.train_devices, options.train_mesh)
        self._placer = Placer(train, algorithm.batch_keys)
        acting = None
        if options.enable_policy:
            acting = devices.policy_layout(options.policy_devices, options.policy_mesh)
        # Platform of the devices that act: cpu, gpu or tpu.
        self.platform = (acting or train).mesh.devices.flat[0].platform
        same = acting is not None and acting.mesh == train.mesh
        parameters = None
        if acting is not None:
            target, other = None if same else acting, None
            if options.policy_beside:
                other = second_client(_only_device(acting))
                acting = devices.single_layout(other)
            wait = options.deterministic or _overlap(train, acting)
            parameters = Parameters(target, wait, other)
        self._trainer = TrainRunner(
            algorithm,
            train,
            self._placer,
            options.seed,
            NonfiniteWatch(options.max_nonfinite, options.folder),
            parameters.publish if parameters else None,
            same,
            options.compiler,
        )
        self._policy_runner: PolicyRunner | None = None
        if acting is not None and parameters is not None:
            params = jax.eval_shape(algorithm.policy_params, self._trainer.shapes)
            seed = (options.seed, jax.process_index())
            self._policy_runner = PolicyRunner(
                algorithm, acting, params, parameters, seed, options.compiler
            )

    def init_policy(self, batch_size: int) -> Tree:
        """Returns the carry of environments before their first step, on the device."""
        return self._runner.init_carry(batch_size)

    def init_train(self, batch_size: int) -> Tree:
        """Returns the carry of this host's rows before the first batch."""
        return self._trainer.init_carry(batch_size)

    @property
    def compiling(self) -> bool:
        """Whether this process compiles a function, which can take minutes."""
        return is_compiling()

    def init_report(self, batch_size: int) -> Tree:
        """Returns the carry of this host's rows before the first batch of a report."""
        return self._trainer.init_carry(batch_size)

    def policy(
        self, carry: Tree, obs: Mapping[str, Array], mode: str = "train"
    ) -> tuple[Tree, dict[str, Array], dict[str, Array]]:
        """Chooses actions [B, ...]; the carry stays on the device.

        Observations that are not finite are treated as missing, counted and reported,
        with their `envid` if the observations have this key.
        """
        return self._runner.policy(carry, obs, mode, obs.get("envid"))

    def init_table(self, slots: int) -> None:
        """Makes the table of carries for `policy_table`, with all slots reset."""
        self._runner.init_table(slots, self.options.actor_batch)

    def policy_table(
        self,
        slots: Sequence[int] | Array,
        obs: Mapping[str, Array],
        mode: str = "train",
        envids: Any = None,
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Chooses actions for some slots of the table, in one call of the device.

        Args:
          slots: [B] different indices into the table.
          obs: [B, ...] by key.
          mode: `train` or `eval`.
          envids: [B], named in messages; by default the key `envid` of `obs`.

        Returns:
          Actions and outputs [B, ...]. The carries of the slots have moved on.
        """
        envids = obs.get("envid") if envids is None else envids
        return self._runner.table_step(slots, obs, mode, envids)

    def reset_slots(self, slots: Sequence[int] | Array) -> None:
        """Resets slots of the table, for other environments."""
        self._runner.reset(slots)

    def train(
        self, carry: Tree, batch: Mapping[str, Array]
    ) -> tuple[Tree, dict[str, Any], dict[str, Array]]:
        """Starts an update from a batch [B, T, ...].

        Outputs and metrics are those of the previous call, so that the caller does not
        wait for the devices; those of the first call are empty. The given carry cannot
        be used again.
        """
        carry, outputs, metrics = self._trainer.train(carry, batch)
        return carry, outputs, {**metrics, **self._counts()}

    def flush(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Waits for the last update, and returns its outputs and metrics."""
        return self._trainer.flush()

    def report(
        self, carry: Tree, batch: Mapping[str, Array]
    ) -> tuple[Tree, dict[str, Array]]:
        """Computes metrics and videos on a batch [B, T, ...] without training."""
        return self._trainer.report(carry, batch)

    def stream(self, st: Iterable[dict[str, Array]]) -> Iterator[dict[str, Array]]:
        """Adds `seed` to batches, and moves them to the devices ahead, in a thread.

        Saving, loading and closing are passed on to `st`, and lose no batch. Streams
        that are opened in the same order in another run have the same seeds.
        """
        with self._lock:
            index, self._streams = self._streams, self._streams + 1
        seed, updates = self.options.seed, self._trainer.updates
        return open_stream(st, self._placer, seed, STREAM_SEED, updates, index)

    def save(self) -> Tree:
        """Returns all state as NumPy arrays by flat name, counters, and the facts."""
        calls = self._policy_runner.calls if self._policy_runner else 0
        counters = {"updates": self._trainer.updates, "policy_calls": calls}
        arrays = split_parts(self._trainer.arrays())
        return {**arrays, "counters": counters, **self._facts}

    def load(self, data: Tree, regex: str | None = None) -> None:
        """Restores what `save` returned.

        Args:
          data: from `save`.
          regex: load only entries whose flat name it matches at the beginning; names
            of the optimiser's state begin with `opt/`, counters with `counters/`.
            Names that only `data` or only this agent has are logged then; without a
            regex they are an error.

        Raises:
          ValueError: shapes differ, names differ, or nothing matches.
        """
        leaves = jax.tree.leaves(self._trainer.shapes)
        shapes = {name: x.shape for name, x in zip(self._trainer.names, leaves)}
        self._trainer.replace(choose_arrays(join_parts(data), shapes, regex))
        counters = {
            name: int(value)
            for name, value in data.get("counters", {}).items()
            if name_matches(regex, f"counters/{name}")
        }
        self._trainer.updates = counters.get("updates", self._trainer.updates)
        if self._policy_runner:
            self._policy_runner.calls = counters.get(
                "policy_calls", self._policy_runner.calls
            )

    def _counts(self) -> dict[str, Any]:
        """Returns how many non-finite values have been replaced, by key."""
        counts: dict[str, int] = {}
        if self._policy_runner:
            counts.update(self._policy_runner.observations.counts())
        if self._placer.bad_rewards:
            counts["reward"] = self._placer.bad_rewards
        return {f"nonfinite/{key}": np.float32(n) for key, n in counts.items()}

    @property
    def _runner(self) -> PolicyRunner:
        if self._policy_runner is None:
            raise RuntimeError(
                "The agent expected to act, but jax.enable_policy is False."
            )
        return self._policy_runner


def join_parts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a saved agent by flat name, the optimiser's included."""
    opt = {OPT + name: value for name, value in data.get("opt", {}).items()}
    return {**data["params"], **opt}


def split_parts(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Inverse of `join_parts`: the parts `params` and `opt` of a saved agent."""
    opt = {k.removeprefix(OPT): v for k, v in arrays.items() if k.startswith(OPT)}
    params = {k: v for k, v in arrays.items() if not k.startswith(OPT)}
    return {"params": params, "opt": opt}


def _only_device(acting: Layout) -> jax.Device:
    if acting.mesh.size > 1:
        raise ValueError(
            f"jax.policy_beside: expected one policy device, got {acting.mesh.size}."
        )
    if not compiles():  # The end of one operation says nothing about the others.
        raise ValueError("jax.policy_beside: expected False with jax.jit False.")
    return acting.mesh.devices.flat[0]


def _overlap(one: Layout, other: Layout) -> bool:
    return bool(set(one.mesh.devices.flat) & set(other.mesh.devices.flat))
