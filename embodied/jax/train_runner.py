"""Holds the state of training and runs updates. Agent process, learner's thread."""

from __future__ import annotations

import logging
import os
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from embodied.base import Array
from embodied.jax import devices
from embodied.jax.algorithm import Algorithm
from embodied.jax.compiling import compile_ahead, compiles
from embodied.jax.device_stream import SEED, Placer, seed_words
from embodied.jax.devices import Layout, Packed, pack
from embodied.jax.nets import Tree
from embodied.jax.param_names import flat_name

logger = logging.getLogger(__name__)

NONFINITE = "opt/nonfinite"  # Metric: updates in a row that were not finite.
TRAIN_SEED, REPORT_SEED = 1, 2
BATCH_FILE = "nonfinite_batch.npz"


# An update's batch, outputs and metrics, of which the latter are still on the devices.
Update = tuple[Mapping[str, Array], dict[str, Any], Packed]


class TrainRunner:
    """Holds the state and compiles the functions that read or change it.

    Methods may be called from several threads. `_lock` guards the state, the update
    whose results were not returned yet, the count and the compiled functions: an
    update reuses the state's memory for the new state, so every other use of the old
    state must have been dispatched before.

    The state is kept as a flat list, since flattening its modules takes longer than a
    small update on the devices.

    Args:
      algorithm: the pure functions.
      layout: layout of the devices that train.
      placer: moves batches to these devices.
      seed: seed of the weights, and of batches that have no seed.
      watch: called after each update that was not finite, with the number of such
        updates in a row and the batch of this one.
      publish: gets the leaves of the policy's parameters after each update.
      publish_split: whether large ones of these parameters are split over devices, as
        the state is; otherwise they are whole on every device.
      options: options of the compiler.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        placer: Placer,
        seed: int,
        watch: Callable[[int, Mapping[str, Array]], None],
        publish: Callable[[list[Array]], None] | None = None,
        publish_split: bool = False,
        options: Mapping[str, Any] | None = None,
    ):
        self.updates = 0
        self._algorithm = algorithm
        self._layout = layout
        self._placer = placer
        self._seed = seed
        self._publish = publish
        self._watch = watch
        self._options = options
        self._lock = threading.Lock()
        self._pending: Update | None = None
        self._steps: dict[tuple[str, tuple], Callable[..., Any]] = {}
        self._carries: dict[int, Callable[[], Tree]] = {}  # By rows.
        key = jax.random.key(seed)
        shapes = jax.eval_shape(algorithm.init, key)
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(shapes)
        self.names = [flat_name(path) for path, _ in paths]
        self._shardings = jax.tree.leaves(layout.weights(shapes))
        self._leaves = self._init(key)
        self._params_shardings: Any = None
        if publish is not None:
            params = jax.eval_shape(algorithm.policy_params, shapes)
            leaves = jax.tree.leaves(params)
            self._params_shardings = (
                layout.weights(leaves)
                if publish_split
                else [layout.everywhere for _ in leaves]
            )
            self.publish()

    @property
    def shapes(self) -> Tree:
        """Shapes and dtypes of the state."""
        with self._lock:
            leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)

    def init_carry(self, rows: int) -> Tree:
        """Carry of this host's rows before the first batch.

        Raises:
          ValueError: the rows cannot be divided among the devices.
        """
        self._layout.check_rows(rows)
        total = rows * self._layout.hosts

        def make() -> Tree:
            return self._algorithm.carry(self.shapes, total)

        if rows not in self._carries:
            self._carries[rows] = jax.jit(make, out_shardings=self._layout.rows)
        return self._carries[rows]()

    def train(
        self, carry: Tree, batch: Mapping[str, Array]
    ) -> tuple[Tree, dict[str, Any], dict[str, np.ndarray]]:
        """Starts an update and returns the results of the previous one.

        So the devices have the next update to work on before the last one ends. The
        first call returns no results; `flush` returns those of the last update.

        Args:
          carry: from `init_carry` or the last call; it cannot be used again.
          batch: arrays on the devices or on the host; a missing seed is added.

        Raises:
          NonfiniteError: too many updates in a row were not finite.
        """
        batch, seed = self._inputs(batch, TRAIN_SEED)
        with self._lock:
            step = self._step("train", self._update, batch, (carry, batch, seed))
            results = step(self._leaves, carry, batch, seed)
            self._leaves, carry, outputs, metrics, params = results
            self.updates += 1
            devices.start_fetch((outputs, metrics))
            before, self._pending = self._pending, (batch, outputs, metrics)
            if self._publish is not None:
                self._publish(params)
        return carry, *self._finish(before)

    def flush(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Waits for the last update, and returns its outputs and metrics.

        Both are empty if there is none, or if they were returned before.
        """
        with self._lock:
            last, self._pending = self._pending, None
        return self._finish(last)

    def report(
        self, carry: Tree, batch: Mapping[str, Array]
    ) -> tuple[Tree, dict[str, np.ndarray]]:
        """Computes metrics of a batch without training on it, and waits for them."""
        batch, seed = self._inputs(batch, REPORT_SEED)
        with self._lock:
            step = self._step("report", self._report, batch, (carry, batch, seed))
            carry, metrics = step(self._leaves, carry, batch, seed)
        devices.start_fetch(metrics)
        return carry, devices.fetch_packed(metrics)

    def publish(self) -> None:
        """Hands the policy its parameters, outside of an update."""
        if self._publish is None:
            return

        def take(leaves: list[Array]) -> list[Array]:
            return _copies(self._params(leaves))

        with self._lock:
            take = jax.jit(take, out_shardings=self._params_shardings)
            self._publish(take(self._leaves))

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the whole state by flat name; all hosts must call it together.

        Raises:
          NonfiniteError: a part of it is not finite, and would spoil a checkpoint.
        """
        self._check_state()
        with self._lock:
            for leaf in self._leaves:
                leaf.copy_to_host_async()
            return dict(zip(self.names, map(_whole, self._leaves)))

    def replace(self, arrays: Mapping[str, Any]) -> None:
        """Replaces the named arrays of the state, and drops pending results."""
        with self._lock:
            for index, name in enumerate(self.names):
                if name in arrays:
                    old = self._leaves[index]
                    value = np.asarray(arrays[name]).astype(old.dtype)
                    self._leaves[index] = devices.put(value, self._shardings[index])
            self._pending = None
        self.publish()

    def _init(self, key: Array) -> list[Array]:
        def init(key: Array) -> list[Array]:
            return jax.tree.leaves(self._algorithm.init(key))

        make = compile_ahead(
            init,
            (key,),
            name="the initial weights",
            out_shardings=self._shardings,
            options=self._options,
            hosts=True,
        )
        leaves = make(key)
        if not compiles():  # Otherwise the compiled function has placed them.
            leaves = devices.put(leaves, self._shardings)
        return leaves

    def _step(
        self, name: str, function: Any, batch: Mapping[str, Array], arguments: tuple
    ) -> Callable[..., Any]:
        """Returns a function of the state, compiled for the shapes of a batch."""
        key = (name, _signature(batch))
        if key not in self._steps:
            rows, everywhere = self._layout.rows, self._layout.everywhere
            shardings: tuple[Any, ...] = (rows, everywhere)
            if name == "train":
                state, params = self._shardings, self._params_shardings
                shardings = (state, rows, rows, everywhere, params)
            first = next(iter(batch.values()))
            self._steps[key] = compile_ahead(
                function,
                (self._leaves, *arguments),
                name=f"{name} for batches of {' x '.join(map(str, first.shape[:2]))}",
                donate=(0, 1) if name == "train" else (),
                out_shardings=shardings,
                options=self._options,
                hosts=True,
            )
        return self._steps[key]

    def _update(
        self, leaves: list[Array], carry: Tree, batch: Mapping[str, Array], seed: Array
    ) -> tuple[list[Array], Tree, dict[str, Any], Packed, list[Array] | None]:
        state = jax.tree.unflatten(self._treedef, leaves)
        state, carry, outputs, metrics = self._algorithm.train(
            state, carry, batch, seed, self._layout.gather
        )
        leaves = jax.tree.leaves(state)
        params = None if self._publish is None else _copies(self._params(leaves))
        return leaves, carry, outputs, pack(metrics), params

    def _report(
        self, leaves: list[Array], carry: Tree, batch: Mapping[str, Array], seed: Array
    ) -> tuple[Tree, Packed]:
        state = self._layout.gather(jax.tree.unflatten(self._treedef, leaves))
        carry, metrics = self._algorithm.report(state, carry, batch, seed)
        return carry, pack(metrics)

    def _params(self, leaves: list[Array]) -> Tree:
        state = jax.tree.unflatten(self._treedef, leaves)
        return self._algorithm.policy_params(state)

    def _inputs(
        self, batch: Mapping[str, Array], purpose: int
    ) -> tuple[dict[str, Array], Array]:
        first = next(iter(batch.values()), None)
        if getattr(first, "sharding", None) != self._layout.rows:
            batch = self._placer(batch)
        batch = dict(batch)
        seed = batch.pop(SEED, None)
        if seed is None:
            words = seed_words(self._seed, purpose, self.updates)
            seed = self._layout.copy(words)
        return batch, seed

    def _finish(
        self, update: Update | None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Waits for an update; returns its outputs, if they are finite, and metrics."""
        if update is None:
            return {}, {}
        batch, outputs, packed = update
        metrics = devices.fetch_packed(packed)
        streak = int(metrics.get(NONFINITE, 0))
        if not streak:
            return devices.fetch(outputs), metrics
        if streak == 1:
            self._check_state()
        self._watch(streak, batch)
        return {}, metrics  # Recurrent states of such a batch are of no use.

    def _check_state(self) -> None:
        """Raises NonfiniteError if the state is not finite: no update can mend that."""
        with self._lock:
            finite = jax.device_get(_are_finite(self._leaves))
        damaged = [name for name, fine in zip(self.names, finite) if not fine]
        if damaged:
            raise NonfiniteError(
                f"The agent expected finite numbers in its state, got others in "
                f"{len(damaged)} of {len(finite)} arrays, such as "
                f"{', '.join(damaged[:3])}. No update can mend them, and they are not "
                "saved. The same command continues from the newest checkpoint."
            )


def _signature(arrays: Mapping[str, Any]) -> tuple:
    """Keys, shapes and dtypes, which a compiled function depends on."""
    return tuple(
        (key, value.shape, str(value.dtype)) for key, value in sorted(arrays.items())
    )


def _copies(tree: Tree) -> list[Array]:
    """Copies the leaves of a tree, so that they share no memory with other results.

    Call it within a compiled function whose other arguments or results are donated
    later: without a copy, a function may return the memory of its input.
    """
    return [jnp.copy(leaf) for leaf in jax.tree.leaves(tree)]


@jax.jit
def _are_finite(leaves: list[Array]) -> list[Array]:
    """Returns for each array whether all of it is finite."""
    return [jnp.isfinite(leaf).all() for leaf in leaves]


class NonfiniteError(RuntimeError):
    """Too many updates in a row were not finite, or the state is not."""


class NonfiniteWatch:
    """Counts updates that were skipped, and ends training after too many in a row.

    Args:
      limit: updates in a row at which to end; 0 for never.
      folder: where to write the batch of the last of them.
    """

    def __init__(self, limit: int, folder: str | os.PathLike[str]):
        self.skipped = 0
        self._limit = limit
        self._folder = pathlib.Path(folder)

    def __call__(self, streak: int, batch: Mapping[str, Array]) -> None:
        """Counts a skipped update.

        Args:
          streak: updates in a row that were skipped, this one included.
          batch: batch of the update.

        Raises:
          NonfiniteError: too many updates in a row were skipped.
        """
        self.skipped += 1
        if self.skipped.bit_count() == 1:  # At 1, 2, 4, 8 and so on.
            logger.warning(
                "Skipped an update that was not finite: %d in a row, %d in all.",
                streak,
                self.skipped,
            )
        if self._limit and streak >= self._limit:
            raise NonfiniteError(
                f"run.max_nonfinite: expected fewer than {self._limit} updates in a "
                f"row without finite loss and gradients, got {streak}. The batch of "
                f"the last one is in {self._write(batch)}. Look there for large "
                "values, lower agent.opt.lr, or go back to a checkpoint."
            )

    def _write(self, batch: Mapping[str, Array]) -> pathlib.Path:
        """Writes a batch, with types that NumPy itself lacks as float32."""
        arrays = devices.fetch(dict(batch))
        for key, value in arrays.items():
            if value.dtype.kind == "V":
                arrays[key] = value.astype(np.float32)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / BATCH_FILE
        np.savez_compressed(path, **arrays)
        return path


def _whole(x: jax.Array) -> np.ndarray:
    """Returns an array of all hosts, which must call it together."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
