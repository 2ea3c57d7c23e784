"""Batches that are being filled with the calls of many clients. The server's process.

A `Kind` is one shape of rows. Calls of one kind, and of one group, share a batch; a
call of another shape harms only itself. The loop thread fills batches and workers
take them; the lock of the batch server guards everything here.
"""

from __future__ import annotations

import itertools
import operator
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from embodied.rpc import layout, wire
from embodied.rpc.session import Session

MAX_ROUTES = 512  # Specs whose check is remembered.
MAX_TARGETS = 256  # Places of rows that a buffer remembers.
MAX_SPARE = 4  # Buffers that are kept for each kind of rows.
QUICK_SECONDS = 1e-3  # The longest run that counts as quick.
QUICK_RUNS = 8  # So many make it worth while to wake nobody for the next.
_EVERYTHING = itertools.repeat(slice(None))
_SET: Any = operator.setitem


class Row(NamedTuple):
    """One call in a batch: its place, and where its reply goes."""

    session: Session
    seq: int
    start: int
    rows: int  # 0 for an unstacked call, which has one row.
    reply_memory: Any
    received: float


class Kind:
    """Rows of one structure, and buffers that earlier batches of them have left."""

    def __init__(self, structure: tuple, columns: list[layout.Leaf]):
        self.structure = structure
        self.columns = columns  # Of one row.
        self.spare: list[Buffers] = []
        # Of the commonest arguments, one dict of arrays, which is quick to build.
        self.names: tuple[str, ...] | None = None
        match structure:
            case ("t", (("d", names, children),)):
                if all(child[0] == "a" for child in children):
                    self.names = names


class Buffers:
    """Columns of a batch: per array, [capacity, ...] and the same memory as bytes."""

    def __init__(self, kind: Kind, capacity: int):
        self.arrays: list[np.ndarray] = []
        self.views: list[tuple[memoryview, int]] = []  # Without empty arrays.
        for leaf in kind.columns:
            column: Any = np.empty(capacity * leaf.nbytes, np.uint8)
            self.arrays.append(column.view(leaf.dtype).reshape(capacity, *leaf.shape))
            if leaf.nbytes:
                self.views.append((memoryview(column), leaf.nbytes))
            del column  # Else it would count as a reference below.
        self._references = self._count()
        self._targets: dict[tuple[int, int], list[memoryview]] = {}

    def targets(self, start: int, stop: int) -> list[memoryview]:
        """The bytes of some rows, in each column."""
        targets = self._targets.get((start, stop))
        if targets is None:
            targets = [view[start * n : stop * n] for view, n in self.views]
            if len(self._targets) >= MAX_TARGETS:
                self._targets.clear()
            self._targets[start, stop] = targets
        return targets

    def unused(self) -> bool:
        """Whether nobody but this object refers to the memory any more."""
        return self._count() == self._references

    def _count(self) -> int:
        # Slices that a function kept refer to the memory's owner, `base`.
        return sum(sys.getrefcount(array.base) for array in self.arrays)


class Batch:
    """Rows of one kind and group, no more than its buffers have room for."""

    def __init__(self, key: tuple[Kind, Any], buffers: Buffers, deadline: float):
        self.key = key
        self.buffers = buffers
        self.deadline = deadline
        self.rows = 0
        self.stacked = False  # Whether one of its calls is a stack.
        self.calls: list[Row] = []
        self.ticket: int | None = None

    def add(self, call: Row, sources: list[memoryview]) -> None:
        """Copies the rows of a call, given as the bytes of each array."""
        start = self.rows
        stop = self.rows = start + (call.rows or 1)
        # A loop in C: `target[:] = source` for each; none returns anything.
        targets = self.buffers.targets(start, stop)
        any(map(_SET, targets, _EVERYTHING, sources))
        self.stacked = self.stacked or call.rows > 0
        self.calls.append(call)

    def arguments(self) -> tuple:
        """The batch as the arguments of its function, arrays [rows, ...]."""
        arrays = [array[: self.rows] for array in self.buffers.arrays]
        kind = self.key[0]
        if kind.names is not None:
            return (dict(zip(kind.names, arrays)),)
        return wire.unflatten(kind.structure, arrays, ())

    def forget(self) -> None:
        """Leaves its calls to be sent again, to the server that comes next."""
        for call in self.calls:
            call.session.forget(call.seq)


class Batching:
    """How one method's calls are batched, and the batches that are being filled.

    Args:
      size: rows that make a batch ready.
      limit: rows up to which it grows while all workers are busy.
      timeout: seconds that a row waits for others.
      group: key of the call's dict whose value keeps batches apart, or None.
      workers: batches that may run at the same time.
    """

    def __init__(
        self, size: int, limit: int, timeout: float, group: str | None, workers: int
    ):
        self.size = size
        self.limit = limit
        self.timeout = timeout
        self.group = group
        self.idle = workers
        self._quick = 0  # Rises with every run that was quick, and falls faster.
        self.filling: dict[tuple[Kind, Any], Batch] = {}
        self.full: list[Batch] = []
        self._routes: dict[tuple[layout.Spec, int], Kind] = {}
        self._kinds: dict[tuple, Kind] = {}

    def route(self, spec: layout.Spec, rows: int) -> Kind:
        """Returns what kind of rows a call has. The loop thread, without the lock.

        Raises:
          wire.WireError: the call is not one that can be batched.
        """
        kind = self._routes.get((spec, rows))
        if kind is None:
            self._check(spec, rows)
            if len(self._routes) >= MAX_ROUTES:
                # A batch that is being filled keeps its kind, and goes out in time.
                self._routes.clear()
                self._kinds.clear()
            structure = row_structure(spec, rows)
            kind = self._kinds.get(structure)
            if kind is None:
                kind = Kind(structure, layout.Spec("", structure, b"").leaves)
                self._kinds[structure] = kind
            self._routes[spec, rows] = kind
        return kind

    def batch(self, kind: Kind, group: Any, rows: int) -> Batch:
        """Returns the batch that takes in so many more rows."""
        key = (kind, group)
        batch = self.filling.get(key)
        if batch is not None:
            if batch.rows + rows <= self.limit:
                return batch
            self.full.append(self.filling.pop(key))
        buffers = next((x for x in kind.spare if x.unused()), None)
        if buffers is None:
            buffers = Buffers(kind, self.limit)
        else:
            kind.spare.remove(buffers)
        batch = Batch(key, buffers, time.monotonic() + self.timeout)
        self.filling[key] = batch
        return batch

    def next(self, slots: Callable[[Any], int]) -> Batch | None:
        """Takes out a batch that is ready, if there is one.

        Args:
          slots: says how many env slots a group has.
        """
        if self.full:
            return self.full.pop(0)
        now = time.monotonic() if self.filling else 0.0
        for key, batch in self.filling.items():
            everyone = 0 < slots(key[1]) <= batch.rows
            if batch.rows >= self.size or everyone or now >= batch.deadline:
                del self.filling[key]
                return batch
        return None

    def end(self, batch: Batch, seconds: float) -> None:
        """Takes note of how long a batch took to run, and that its worker is idle."""
        self.idle += 1
        if seconds < QUICK_SECONDS:
            self._quick = min(self._quick + 1, 2 * QUICK_RUNS)
        else:
            self._quick = max(self._quick - QUICK_RUNS // 2, 0)
        # Its buffers are kept for another one, which saves page faults.
        spare = batch.key[0].spare
        if len(spare) < MAX_SPARE:
            spare.append(batch.buffers)

    @property
    def quick(self) -> bool:
        """Whether it takes longer to wake another thread than to run a batch."""
        return self._quick >= QUICK_RUNS

    def due(self, now: float) -> float | None:
        """When the next batch has waited long enough.

        One that has already, and is still here, goes to the next worker that is done.
        """
        deadlines = [batch.deadline for batch in self.filling.values()]
        return min((x for x in deadlines if x > now), default=None)

    def _check(self, spec: layout.Spec, rows: int) -> None:
        if rows > self.limit:
            raise wire.WireError(
                f"a stack of {rows} rows is larger than a batch of {self.limit}"
            )
        for leaf in spec.leaves:
            if rows and (not leaf.shape or leaf.shape[0] != rows):
                raise wire.WireError(
                    f"an array of shape {leaf.shape} is not a stack of {rows} rows"
                )


def row_structure(spec: layout.Spec, rows: int) -> tuple:
    """The structure of one row of a stack; of the call itself if it is no stack."""
    if not rows:
        return spec.structure
    if spec.row is None:
        spec.row = _map_shapes(spec.structure, lambda shape: shape[1:])
    return spec.row


def stack_structure(structure: tuple, rows: int) -> tuple:
    """The structure of a stack of rows."""
    return _map_shapes(structure, lambda shape: (rows, *shape))


def group_value(
    group: str | None, message: wire.Message, source: Any, start: int
) -> Any:
    """Reads which batches a call belongs to; all rows of a stack must agree."""
    if group is None:
        return None
    match message.spec.structure:
        case ("t", (("d", keys, children),)) if group in keys:
            index = keys.index(group)
            if all(child[0] == "a" for child in children[: index + 1]):
                leaf = message.spec.leaves[index]
                count = leaf.nbytes // leaf.dtype.itemsize
                begin = start + leaf.offset
                values = np.frombuffer(source, leaf.dtype, count, begin).tolist()
                if values and values.count(values[0]) == count:
                    return values[0]
                raise wire.WireError(f"the rows of a stack differ in '{group}'")
    raise wire.WireError(f"expected one dict of arrays with the key '{group}'")


def _map_shapes(structure: tuple, function: Callable[[tuple], tuple]) -> tuple:
    if structure[0] == "a":
        return ("a", structure[1], function(structure[2]))
    children = tuple(_map_shapes(child, function) for child in structure[-1])
    return (*structure[:-1], children)
