"""Devices of training and policy, and arrays spread over them. Agent process.

A mesh has three axes. Batches are split over `data` and `fsdp`; weights over `fsdp`
and `tensor`:

    devices 0 1 2 3, mesh '2,2,1'

                 fsdp 0      fsdp 1
    data 0       rows 0      rows 1        each device: a quarter of the batch,
    data 1       rows 2      rows 3        half of every large weight

Training uses devices of all hosts, and each host feeds its own rows. The policy runs on
devices of its own host only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from embodied.base import Array, Tree

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
# Weights with fewer elements are whole on every device: gathering would cost more.
SMALLEST_SPLIT = 2**12


@dataclasses.dataclass(frozen=True)
class Layout:
    """Devices in a mesh, and where arrays lie on them.

    Attributes:
      mesh: devices along the axes data, fsdp and tensor.
      smallest: weights with fewer elements are not split.
    """

    mesh: Mesh
    smallest: int = SMALLEST_SPLIT

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding of an array that is whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Sharding of an array that is split along its first axis."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    @property
    def parts(self) -> int:
        """Number of parts that batches are split into, over all hosts."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)

    @property
    def hosts(self) -> int:
        """Number of hosts whose devices are in the mesh."""
        return len({device.process_index for device in self.mesh.devices.flat})

    def weights(self, tree: Tree) -> Tree:
        """Shardings of the arrays of a state, by their shapes.

        The last axis is split over `tensor`, and the largest axis that is left over
        `fsdp`, if their sizes can be divided. Vectors and small arrays stay whole.
        """
        return jax.tree.map(lambda x: NamedSharding(self.mesh, self._spec(x)), tree)

    def batch(self, rows: int) -> NamedSharding:
        """Sharding of a batch of `rows` rows: split if they can be divided."""
        return self.everywhere if rows % self.parts else self.rows

    def place(self, tree: Tree) -> Tree:
        """Moves this host's rows of a batch to its devices, without waiting.

        Raises:
          ValueError: the rows cannot be divided among the devices.
        """
        leaves = jax.tree.leaves(tree)
        rows = np.shape(leaves[0])[0] if leaves else 0
        self.check_rows(rows)
        if self.hosts == 1:
            return jax.device_put(tree, self.rows)
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(self.rows, np.asarray(x)),
            tree,
        )

    def check_rows(self, rows: int) -> None:
        """Raises ValueError unless this host's rows can be divided."""
        parts = self.parts // self.hosts
        if rows % parts:
            raise ValueError(
                f"batch_size: expected a multiple of the {parts} parts that batches "
                f"are split into by the devices of this host, got {rows}."
            )

    def gather(self, weights: Tree) -> Tree:
        """Gathers weights along `fsdp`, for use in a compiled function.

        Left to itself, XLA's partitioner computes wrong gradients if all three axes
        split something.
        """
        if self.mesh.shape["fsdp"] == 1:
            return weights

        def whole(x: jax.Array) -> jax.Array:
            axes = [None if axis == "fsdp" else axis for axis in self._spec(x)]
            sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(whole, weights)

    def copy(self, tree: Tree) -> Tree:
        """Puts the same values on every device, without waiting."""
        return put(tree, jax.tree.map(lambda _: self.everywhere, tree))

    def _spec(self, x: Any) -> PartitionSpec:
        axes: list[str | None] = [None] * len(x.shape)
        if len(x.shape) < 2 or math.prod(x.shape) < self.smallest:
            return PartitionSpec()
        fsdp, tensor = self.mesh.shape["fsdp"], self.mesh.shape["tensor"]
        if tensor > 1 and x.shape[-1] % tensor == 0:
            axes[-1] = "tensor"
        free = [
            (size, -index)
            for index, size in enumerate(x.shape)
            if axes[index] is None and size % fsdp == 0
        ]
        if fsdp > 1 and free:
            axes[-max(free)[1]] = "fsdp"
        return PartitionSpec(*axes)


def train_layout(indices: Sequence[int], shape: str) -> Layout:
    """Layout of the training devices of all hosts; `indices` hold for each host."""
    found = [_pick(host, indices, "train") for host in range(jax.process_count())]
    layout = Layout(make_mesh([x for host in found for x in host], shape, "train"))
    if len(indices) % layout.mesh.shape["tensor"]:
        raise ValueError(
            f"jax.train_mesh: expected a tensor axis that divides the {len(indices)} "
            f"devices of a host, since each host feeds whole rows, got {shape!r}."
        )
    return layout


def policy_layout(indices: Sequence[int], shape: str) -> Layout:
    """Layout of the devices of this host that run the policy."""
    found = _pick(jax.process_index(), indices, "policy")
    return Layout(make_mesh(found, shape, "policy"))


def single_layout(device: jax.Device) -> Layout:
    """Layout of one device."""
    return Layout(make_mesh([device], "1,1,1"))


def make_mesh(devices: Sequence[Any], shape: str, role: str = "train") -> Mesh:
    """Arranges devices in a mesh.

    Args:
      devices: devices in order; neighbours differ along the last axis of the mesh.
      shape: sizes of data, fsdp and tensor, such as `-1,1,1`; -1 for the rest.
      role: names the setting in errors.

    Raises:
      ValueError: the product of the sizes is not the number of devices.
    """
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = []
    known = math.prod(size for size in sizes if size != -1)
    valid = len(sizes) == len(AXES) and sizes.count(-1) <= 1 and known > 0
    valid = valid and all(size > 0 or size == -1 for size in sizes)
    if valid and -1 in sizes:
        sizes[sizes.index(-1)] = len(devices) // known
    if not valid or math.prod(sizes) != len(devices):
        raise ValueError(
            f"jax.{role}_mesh: expected three sizes (data, fsdp, tensor; one may be "
            f"-1) whose product is the number of devices ({len(devices)}), got "
            f"{shape!r}."
        )
    return Mesh(np.array(devices).reshape(sizes), AXES)


def put(tree: Tree, shardings: Tree) -> Tree:
    """Moves arrays to devices without waiting; every host must have them whole."""

    def move(x: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(move, tree, shardings)


def copy_to_local(tree: Tree, shardings: Tree) -> Tree:
    """Copies arrays that are whole on every device to other devices of this host.

    Does not wait: copies are made as soon as the arrays are computed.
    """
    local = jax.tree.map(lambda x: x.addressable_shards[0].data, tree)
    return jax.device_put(local, shardings)


def start_fetch(tree: Tree) -> None:
    """Starts to copy arrays to the host, without waiting."""
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()


def fetch(tree: Tree) -> Tree:
    """Waits for arrays and returns them as NumPy arrays.

    Of a batch that is split over hosts, only the rows of this host are returned.
    """
    return jax.tree.map(_fetch, tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A tree of arrays [rows, ...] as one array of bytes.

    Every array costs a transfer of its own, however small it is.

        Rows.join(tree).split()    # The same tree.

    Either side may be the host, with NumPy arrays, or a compiled function.

    Attributes:
      block: [rows, bytes of a row] uint8.
      columns: dtype and shape of a row of each array.
      treedef: structure of the tree.
    """

    block: Array
    columns: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(
        metadata={"static": True}
    )
    treedef: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def join(cls, tree: Tree) -> Rows:
        """Joins arrays with the same number of rows."""
        leaves, treedef = jax.tree.flatten(tree)
        columns = tuple((str(leaf.dtype), leaf.shape[1:]) for leaf in leaves)
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            block: Array = jnp.concatenate([_device_bytes(x) for x in leaves], 1)
        else:
            block = np.concatenate([_host_bytes(x) for x in leaves], 1)
        return cls(block, columns, treedef)

    def split(self) -> Tree:
        """Returns the tree; the block must be a NumPy array on the host."""
        leaves, start = [], 0
        for name, shape in self.columns:
            dtype = jnp.dtype(name)
            stop = start + math.prod(shape) * dtype.itemsize
            column = self.block[:, start:stop]
            if isinstance(column, np.ndarray):
                leaf: Array = np.ascontiguousarray(column).view(dtype)
            else:
                leaf = _from_device_bytes(column, dtype)
            leaves.append(leaf.reshape((len(self.block), *shape)))
            start = stop
        return jax.tree.unflatten(self.treedef, leaves)


Packed = tuple[Rows | None, dict[str, jax.Array]]  # Scalars, and other arrays.


def pack(arrays: Mapping[str, jax.Array]) -> Packed:
    """Joins the scalars of a dict; call it within the function that computes them."""
    scalars = {key: value[None] for key, value in arrays.items() if not value.ndim}
    rest = {key: value for key, value in arrays.items() if value.ndim}
    return Rows.join(scalars) if scalars else None, rest


def fetch_packed(packed: Packed) -> dict[str, np.ndarray]:
    """Waits for what `pack` returned, and returns the dict."""
    rows, rest = fetch(packed)
    scalars = rows.split() if rows else {}
    return rest | {key: value[0] for key, value in scalars.items()}


def _host_bytes(x: Any) -> np.ndarray:
    x = np.ascontiguousarray(x).reshape((len(x), math.prod(np.shape(x)[1:])))
    return x.view(np.uint8)


def _device_bytes(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype == bool:
        x = x.astype(np.uint8)
    shape = (len(x), math.prod(x.shape[1:]) * x.dtype.itemsize)
    return jax.lax.bitcast_convert_type(x, np.uint8).reshape(shape)


def _from_device_bytes(column: jax.Array, dtype: Any) -> jax.Array:
    if dtype.kind == "b":
        return column != 0
    if dtype.itemsize > 1:
        count = column.shape[1] // dtype.itemsize
        column = column.reshape((len(column), count, dtype.itemsize))
    return jax.lax.bitcast_convert_type(column, dtype)


def _fetch(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    # Devices along `tensor` hold the same rows, so take one shard per first row.
    rows = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(rows[start]) for start in sorted(rows)])


def _pick(host: int, indices: Sequence[int], role: str) -> list[Any]:
    devices = [x for x in jax.devices() if x.process_index == host]
    devices.sort(key=lambda device: device.id)
    wrong = [index for index in indices if not 0 <= index < len(devices)]
    if wrong or not indices or len(set(indices)) != len(indices):
        raise ValueError(
            f"jax.{role}_devices: expected distinct indices of the {len(devices)} "
            f"devices of a host, got {list(indices)}."
        )
    return [devices[index] for index in indices]
