"""Runs the policy on its own copy of the parameters. Agent process, actor's threads.

learner's thread       publish(params) ---+
                                          v
actor's threads        policy, table_step on the newest of them
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embodied.base import Array
from embodied.jax import devices, values
from embodied.jax.algorithm import Algorithm
from embodied.jax.compiling import compile_ahead
from embodied.jax.device_stream import seed_words
from embodied.jax.devices import Layout, Rows
from embodied.jax.nets import Tree
from embodied.jax.second_client import share
from embodied.space import Space

logger = logging.getLogger(__name__)

POLICY_SEED = 3
REWARD = "reward"
MISSING = -np.inf  # Marks a float that an environment could not observe.

Arrays = dict[str, np.ndarray]


class Parameters:
    """The policy's parameters, which change as a whole. `_lock` guards them.

    Args:
      layout: of the policy's devices, which published parameters are copied to; None
        if they are there already.
      wait: whether to take the newest parameters even if the update that computes them
        has not ended. A policy on its own devices would have to wait for training. A
        policy that shares them waits anyway, and becomes deterministic.
      other: the second client that the policy runs on, if it does.
    """

    def __init__(
        self, layout: Layout | None, wait: bool, other: jax.Device | None = None
    ):
        self._layout = layout
        self._shardings: list[Any] | None = None  # From the first parameters on.
        self._wait = wait
        self._other = other
        # Parameters, and the same as arrays of the second client.
        self._shared: tuple[list[Array], list[Array]] | None = None
        self._lock = threading.Lock()
        self._versions: collections.deque[list[Array]] = collections.deque()

    def publish(self, leaves: list[Array]) -> None:
        """Provides newer parameters, without waiting until they are computed."""
        if self._layout is not None:
            self._shardings = self._shardings or self._layout.weights(leaves)
            leaves = devices.copy_to_local(leaves, self._shardings)
        with self._lock:
            self._versions.append(leaves)
            self._drop_older()

    def newest(self) -> list[Array]:
        """Returns the parameters to act with.

        The caller keeps a reference to them until it has results of that step: without
        one, memory that a second client reads would be used for something else.
        """
        with self._lock:
            self._drop_older()
            newest = self._versions[0]
            if self._other is None:
                return newest
            if self._shared is None or self._shared[0] is not newest:
                self._shared = newest, [share(leaf, self._other) for leaf in newest]
            return self._shared[1]

    def _drop_older(self) -> None:
        """Drops versions before the newest one that can be used."""
        while len(self._versions) > 1:
            ready = self._wait or all(leaf.is_ready() for leaf in self._versions[1])
            if not ready:
                return
            self._versions.popleft()


class PolicyRunner:
    """Runs the policy, with carries of the caller or with its own table of carries.

    Methods may be called from several threads. `_count_lock` guards the count that
    seeds come from, `_compile_lock` the compiled functions, `_table_lock` the table
    and the order of the steps that change it. No thread waits for a device while it
    holds a lock, except for a CPU that computes parameters for a second client.

    Args:
      algorithm: the pure functions.
      layout: layout of the devices that run the policy.
      params: shapes and dtypes of the parameters.
      parameters: source of the parameters.
      seed: numbers that the seeds of actions depend on; they differ between hosts.
      options: options of the compiler.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        params: Tree,
        parameters: Parameters,
        seed: Sequence[int],
        options: Mapping[str, Any] | None = None,
    ):
        self.calls = 0
        self.observations = ObservationFilter(algorithm.observations)
        self._algorithm = algorithm
        self._layout = layout
        self._parameters = parameters
        self._shapes, self._treedef = jax.tree.flatten(params)
        self._seed = int(seed_words(*seed, POLICY_SEED)[0])
        self._options = options
        self._count_lock = threading.Lock()
        self._compile_lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._steps: dict[tuple[str, int, str, int], Callable[..., Any]] = {}
        self._table: Tree = None
        self._needs_reset = np.zeros(0, bool)  # By slot, before its next step.
        self._sizes: list[int] = []

    def init_carry(self, rows: int) -> Tree:
        """Carry of environments before their first step."""
        sharding = self._layout.batch(rows)

        def make() -> Tree:
            return self._algorithm.carry(self._params(self._shapes), rows)

        return jax.jit(make, out_shardings=sharding)()

    def policy(
        self, carry: Tree, obs: Mapping[str, Any], mode: str, envids: Any = None
    ) -> tuple[Tree, Arrays, Arrays]:
        """Steps environments whose carries the caller keeps."""
        inputs = self.observations(obs, envids)
        rows = len(inputs["is_first"])
        sharding = self._layout.batch(rows)
        arguments = (carry, self._place(inputs, sharding), self._next_seed())
        step = self._step("policy", self._policy, rows, mode, arguments)
        leaves = self._parameters.newest()  # A name, so that they live until the end.
        carry, actions, outputs = step(leaves, *arguments)
        devices.start_fetch((actions, outputs))
        return carry, devices.fetch(actions), devices.fetch(outputs)

    def init_table(self, slots: int, batch: int) -> None:
        """Makes a table of initial carries, and compiles its steps.

        Args:
          slots: number of environments.
          batch: how many of them usually step together.
        """
        if slots < 1:
            raise ValueError(f"init_table expected at least 1 slot, got {slots}.")
        with self._table_lock:
            self._table = jax.device_put(
                self.init_carry(slots), self._layout.everywhere
            )
            self._needs_reset = np.ones(slots, bool)
            self._sizes = batch_sizes(slots, batch, self._layout.parts)
            for size in self._sizes:
                for mode in self._algorithm.modes:
                    self._compile_table(size, mode)

    def reset(self, slots: Any) -> None:
        """Makes slots of the table begin anew with their next step."""
        with self._table_lock:
            self._needs_reset[self._check(slots)] = True

    def table_step(
        self, slots: Any, obs: Mapping[str, Any], mode: str, envids: Any = None
    ) -> tuple[Arrays, Arrays]:
        """Steps environments whose carries are in the table, by their slots.

        The devices are called once, get one array and return one. Short batches are
        padded to a compiled size, and the results of the padding are dropped.
        """
        inputs = self.observations(obs, envids)
        rows = len(inputs["is_first"])
        with self._table_lock:
            chosen = self._check(slots)
            if len(chosen) != rows:
                raise ValueError(
                    f"policy_table expected a slot for each of the {rows} rows, got "
                    f"{len(chosen)}."
                )
            size = next(size for size in self._sizes if size >= rows)
            inputs = {key: _padded(value, size, 0) for key, value in inputs.items()}
            # Slots beyond the table are neither read nor written.
            where = _padded(chosen, size, len(self._needs_reset))
            fresh = _padded(self._needs_reset[chosen], size, True)
            arguments = self._table_arguments(inputs, where, fresh, self._next_seed())
            step = self._step("policy_table", self._table_policy, size, mode, arguments)
            leaves = self._parameters.newest()  # As in `policy`.
            self._table, results = step(leaves, *arguments)
            self._needs_reset[chosen] = False
        devices.start_fetch(results)
        actions, outputs = devices.fetch(results).split()
        return jax.tree.map(lambda x: x[:rows], (actions, outputs))

    def _policy(
        self, leaves: list[Array], carry: Tree, obs: Any, seed: Array, *, mode: str
    ) -> tuple[Tree, Any, Any]:
        params = self._params(leaves)
        return self._algorithm.policy(params, carry, obs, seed, mode)

    def _table_arguments(
        self, inputs: Arrays, slots: Array, fresh: Array, seed: Array
    ) -> tuple[Tree, Rows]:
        """Returns the table, and everything else that a step of it needs."""
        seeds = np.broadcast_to(seed, (len(slots), *seed.shape))
        rows = Rows.join((inputs, slots, fresh, seeds))
        return self._table, self._place(rows, self._layout.batch(len(slots)))

    def _table_policy(
        self, leaves: list[Array], table: Tree, rows: Rows, *, mode: str
    ) -> tuple[Tree, Rows]:
        params = self._params(leaves)
        obs, slots, fresh, seeds = rows.split()

        def read(column: Array, begin: Array) -> Array:
            old = column.at[slots].get(mode="fill", fill_value=0)
            first = fresh.reshape((-1,) + (1,) * (old.ndim - 1))
            return jnp.where(first, begin, old)

        def write(column: Array, new: Array) -> Array:
            return column.at[slots].set(new, mode="drop")

        begin = self._algorithm.carry(params, len(slots))
        carry = jax.tree.map(read, table, begin)
        carry, *results = self._algorithm.policy(params, carry, obs, seeds[0], mode)
        return jax.tree.map(write, table, carry), Rows.join(results)

    def _compile_table(self, size: int, mode: str) -> None:
        """Compiles a step now, since all environments would wait for it later."""
        arguments = self._table_arguments(
            self.observations.zeros(size),
            np.zeros(size, np.int32),
            np.ones(size, bool),
            np.zeros(2, np.uint32),
        )
        self._step("policy_table", self._table_policy, size, mode, arguments)

    def _step(
        self, name: str, function: Any, rows: int, mode: str, arguments: tuple
    ) -> Callable[..., Any]:
        """Returns a function of the parameters, compiled for a number of rows."""
        modes = self._algorithm.modes
        if mode not in modes:
            raise ValueError(
                f"policy expected mode {' or '.join(modes)}, got {mode!r}."
            )
        mode = modes[mode]
        table = name == "policy_table"
        key = (name, rows, mode, len(self._needs_reset) if table else 0)
        with self._compile_lock:
            if key not in self._steps:

                def step(*arguments: Any) -> Any:
                    return function(*arguments, mode=mode)

                split = self._layout.batch(rows)
                shardings: tuple[Any, ...] = (split, split, split)
                if table:
                    shardings = (self._layout.everywhere, split)
                self._steps[key] = compile_ahead(
                    step,
                    (self._parameters.newest(), *arguments),
                    name=f"{name} for {rows} environments, mode {mode}",
                    donate=(1,) if table else (),
                    out_shardings=shardings,
                    options=self._options,
                )
            return self._steps[key]

    def _params(self, leaves: list[Any]) -> Tree:
        return jax.tree.unflatten(self._treedef, leaves)

    def _next_seed(self) -> np.ndarray:
        with self._count_lock:
            count, self.calls = self.calls, self.calls + 1
        return np.array([self._seed, count % 2**32], np.uint32)

    def _place(self, inputs: Tree, sharding: Any) -> Tree:
        # A single device takes arrays as they are, which is quicker.
        if self._layout.mesh.size == 1:
            return inputs
        return jax.device_put(inputs, sharding)

    def _check(self, slots: Any) -> np.ndarray:
        chosen = np.asarray(slots, np.int32).reshape(-1)
        count = len(self._needs_reset)
        inside = len(chosen) and chosen.min() >= 0 and chosen.max() < count
        if not inside or len(np.unique(chosen)) != len(chosen):
            raise ValueError(
                f"Expected distinct slots below {count}, the size of the table, got "
                f"{chosen.tolist()}. Use init_table to make it as large as needed."
            )
        return chosen


def batch_sizes(slots: int, batch: int, parts: int = 1) -> list[int]:
    """Sizes of batches to compile: the usual one, and all slots.

    Only two, since compiling another one delays all environments for longer than
    padded rows ever will.

    Args:
      slots: largest number of rows of a batch.
      batch: usual number of rows of a batch.
      parts: number that every size is a multiple of.
    """
    usual = [batch] if 0 < batch < slots else []
    return sorted({-(-size // parts) * parts for size in [*usual, slots]})


def _padded(x: np.ndarray, size: int, value: Any) -> np.ndarray:
    if len(x) == size:
        return x
    padding = np.full((size - len(x), *x.shape[1:]), value, x.dtype)
    return np.concatenate([x, padding])


class ObservationFilter:
    """Checks observations, and marks values that are not finite as missing.

    May be called from several threads: `_lock` guards the counts, and the
    keys and environments that were reported.

    Args:
      spaces: spaces of the observations that the policy reads, by key.
    """

    def __init__(self, spaces: Mapping[str, Space]):
        self._dtypes = {k: values.jax_dtype(space) for k, space in spaces.items()}
        self._shapes = {k: space.shape for k, space in spaces.items()}
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._reported: set[tuple[str, int]] = set()

    def __call__(
        self, obs: Mapping[str, Any], envids: Any = None
    ) -> dict[str, np.ndarray]:
        """Returns the inputs of the policy, [B, ...] by key, in its dtypes.

        Args:
          obs: may have further keys.
          envids: environment of each row, [B], for messages; by default the index of
            the row.

        Raises:
          ValueError: a key is missing, or its shape differs from that of its space.
        """
        missing = sorted(set(self._shapes) - set(obs))
        if missing:
            raise ValueError(
                f"policy expected observations {', '.join(self._shapes)}, got "
                f"{', '.join(sorted(obs))}: {', '.join(missing)} is missing."
            )
        rows = len(obs["is_first"])
        result = {}
        for key, shape in self._shapes.items():
            value = np.asarray(obs[key])
            if value.shape != (rows, *shape):
                raise ValueError(
                    f"policy expected observation {key!r} of shape "
                    f"{(rows, *shape)}, got {value.shape}. All rows of a batch "
                    "have the shapes of their spaces."
                )
            if value.dtype.kind == "f":
                value = self._clean(key, value, envids)
            result[key] = value.astype(self._dtypes[key], copy=False)
        if REWARD in obs:  # Not an input, but only here its environment is known.
            self._clean(REWARD, np.asarray(obs[REWARD]), envids)
        return result

    def zeros(self, rows: int) -> dict[str, np.ndarray]:
        """Returns zeros as inputs of the policy, for a number of rows."""
        return {
            key: np.zeros((rows, *shape), self._dtypes[key])
            for key, shape in self._shapes.items()
        }

    def counts(self) -> dict[str, int]:
        """Number of observations that were not finite, by key."""
        with self._lock:
            return dict(self._counts)

    def _clean(self, key: str, value: np.ndarray, envids: Array | None) -> np.ndarray:
        if np.isfinite(value).all():
            return value
        bad = np.isnan(value) | np.isposinf(value)  # Minus infinity means missing.
        rows = np.flatnonzero(bad.reshape((len(bad), -1)).any(-1))
        if not len(rows):
            return value
        envs = rows if envids is None else np.asarray(envids).reshape(-1)[rows]
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + len(rows)
            news = [env for env in envs.tolist() if (key, env) not in self._reported]
            self._reported.update((key, env) for env in news)
        if news:
            logger.warning(
                "Observation %r of environment %s is not finite (%s). It is taken as "
                "missing, a reward as zero; further ones are only counted. Check the "
                "environment.",
                key,
                ", ".join(map(str, news)),
                value[bad][0],
            )
        return np.where(bad, value.dtype.type(MISSING), value)
