"""A server whose methods get the calls of many clients as one batch. Any process.

A batch counts env rows. It goes out when it has enough rows, when every registered
env slot of its group is in it, or when its first row has waited long enough; while
all workers are busy it keeps growing. Calls with the same structure, dtypes and
shapes share a batch, so that a call of another shape harms only itself.

The loop thread fills batches; workers take them. One lock guards both.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from embodied.rpc import wire
from embodied.rpc.methods import Method
from embodied.rpc.server import Server
from embodied.rpc.session import Session

MAX_SHAPES = 16  # Kinds of rows for which buffers are kept.
MAX_SPARE = 4  # Buffers that are kept for each.


class Row(NamedTuple):
    """One call in a batch: its place, and where its reply goes."""

    session: Session
    seq: int
    start: int
    rows: int  # 0 for an unstacked call, which has one row.
    reply_memory: Any
    received: float


class Buffers:
    """Columns of a batch: per array, [capacity, ...] and the same memory as bytes."""

    def __init__(self, spec: wire.Spec, rows: int, capacity: int):
        self.arrays: list[np.ndarray] = []
        self.views: list[tuple[memoryview, int]] = []
        for leaf in spec.leaves:
            nbytes = leaf.nbytes // (rows or 1)
            column: Any = np.empty(capacity * nbytes, np.uint8)
            shape = leaf.shape[1:] if rows else leaf.shape
            self.arrays.append(column.view(leaf.dtype).reshape(capacity, *shape))
            self.views.append((memoryview(column), nbytes))
            del column  # Else it would count as a reference below.
        self._references = self._count()

    def unused(self) -> bool:
        """Whether nobody but this object refers to the memory any more."""
        return self._count() == self._references

    def _count(self) -> int:
        # Slices that a function kept refer to the memory's owner, `base`.
        return sum(sys.getrefcount(array.base) for array in self.arrays)


class Batch:
    """Rows of the same shape, no more than `capacity` of them."""

    def __init__(self, key: tuple, structure: tuple, buffers: Buffers, deadline: float):
        self.key = key
        self.structure = structure
        self.buffers = buffers
        self.deadline = deadline
        self.rows = 0
        self.calls: list[Row] = []
        self.tickets: list[int] = []

    def add(self, call: Row, spec: wire.Spec, source: Any, start: int) -> None:
        """Copies the rows of a call out of its frame or memory."""
        view = memoryview(source)
        count = call.rows or 1
        for leaf, (column, nbytes) in zip(spec.leaves, self.buffers.views):
            if nbytes:
                begin = start + leaf.offset
                target = call.start * nbytes
                column[target : target + count * nbytes] = view[
                    begin : begin + leaf.nbytes
                ]
        self.rows += count
        self.calls.append(call)

    def arguments(self) -> tuple:
        """The batch as the arguments of its function, arrays [rows, ...]."""
        arrays = [array[: self.rows] for array in self.buffers.arrays]
        return wire.unflatten(self.structure, arrays, [])


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
        self.filling: dict[tuple, Batch] = {}
        self.full: list[Batch] = []
        self._spare: dict[tuple, list[Buffers]] = {}

    def begin(self, key: tuple, spec: wire.Spec, rows: int) -> Batch:
        """Starts to fill a batch."""
        buffers = next((x for x in self._spare.get(key, ()) if x.unused()), None)
        if buffers:
            self._spare[key].remove(buffers)
        else:
            buffers = Buffers(spec, rows, self.limit)
        deadline = time.monotonic() + self.timeout
        batch = Batch(key, row_structure(spec, rows), buffers, deadline)
        self.filling[key] = batch
        return batch

    def end(self, batch: Batch) -> None:
        """Keeps the buffers of a batch for another one, which saves page faults."""
        if len(self._spare) >= MAX_SHAPES:
            self._spare.clear()
        spare = self._spare.setdefault(batch.key, [])
        if len(spare) < MAX_SPARE:
            spare.append(batch.buffers)

    def due(self, now: float) -> float | None:
        """When the next batch has waited long enough.

        One that has already, and is still here, goes to the next worker that is done.
        """
        deadlines = [batch.deadline for batch in self.filling.values()]
        return min((x for x in deadlines if x > now), default=None)


class BatchServer(Server):
    """A server that can also batch calls; takes the same arguments."""

    def __init__(
        self,
        addr: str | int,
        name: str = "BatchServer",
        workers: int = 1,
        **kwargs: Any,
    ):
        super().__init__(addr, name, workers, **kwargs)
        self._batched: list[Method] = []
        self._batch_lock = threading.Lock()  # Guards all Batching objects.
        self._fill: list[float] = [0, 0]  # Batches and rows since the last stats.

    def bind(  # type: ignore[override]
        self,
        name: str,
        workfn: Callable,
        postfn: Callable | None = None,
        batch: int = 0,
        workers: int = 0,
        schema: dict | None = None,
        once: bool = False,
        output: bool = False,
        limit: int = 0,
        timeout: float = 0.05,
        group: str | None = None,
    ) -> None:
        """Offers a function; with `batch` rows, it gets the calls of many at once.

        A batched function takes arrays [n, ...] with n up to `limit` and returns
        arrays [n, ...], of which every client gets its rows. The other arguments are
        those of `Server.bind` and `Batching`.
        """
        if not batch:
            super().bind(name, workfn, postfn, workers, schema, once, output)
            return
        if output or 0 < limit < batch:
            raise ValueError(
                f"Method '{name}': a batch has no `output`, and its limit ({limit}) is "
                f"not below its size ({batch})."
            )
        workers = workers or 1
        pool = self._own_pool(name, workers)
        batching = Batching(batch, limit or batch, timeout, group, workers)
        method = Method(name, workfn, postfn, pool, schema, once, False, batching)
        self._add(method)
        self._batched.append(method)

    def stats(self) -> dict[str, float]:
        """Like `Server.stats`, and how full batches were."""
        (batches, rows), self._fill = self._fill, [0, 0]
        waiting = sum(
            batch.rows
            for method in self._batched
            for batch in list(method.batching.filling.values())
        )
        return {
            **super().stats(),
            "batches": batches,
            "batch_rows": rows / batches if batches else 0.0,
            "batch_waiting": waiting,
        }

    # The loop thread.

    def _accept(self, session: Session, message: wire.Message, method: Method) -> None:
        if method.batching is None:
            super()._accept(session, message, method)
            return
        batching: Batching = method.batching
        spec, rows = message.spec, message.rows
        if message.values:
            raise wire.WireError("only arrays can be batched, not plain values")
        if rows > batching.limit:
            raise wire.WireError(
                f"a stack of {rows} rows is larger than a batch of {batching.limit}"
            )
        for leaf in spec.leaves:
            if rows and (not leaf.shape or leaf.shape[0] != rows):
                raise wire.WireError(
                    f"an array of shape {leaf.shape} is not a stack of {rows} rows"
                )
        source, reply_memory = self._memory(session, message)
        start = 0
        if source is None:
            source, start = message.frame, message.start
        group = group_value(batching.group, message, source, start)
        count = rows or 1
        with self._batch_lock:
            key = (row_structure(spec, rows), group)
            batch = batching.filling.get(key)
            if batch and batch.rows + count > batching.limit:
                batching.full.append(batching.filling.pop(key))
                batch = None
            if batch is None:
                batch = batching.begin(key, spec, rows)
            now = time.perf_counter()
            row = Row(session, message.seq, batch.rows, rows, reply_memory, now)
            batch.add(row, spec, source, start)

    def _after_receive(self) -> None:
        with self._batch_lock:
            for method in self._batched:
                self._dispatch(method)

    def _due(self) -> float | None:
        now = time.monotonic()
        with self._batch_lock:
            due = [method.batching.due(now) for method in self._batched]
        return min((x for x in due if x is not None), default=None)

    # Any thread that holds the lock.

    def _dispatch(self, method: Method) -> None:
        """Gives ready batches to idle workers."""
        batching: Batching = method.batching
        if not batching.idle or not (batching.full or batching.filling):
            return
        now = time.monotonic()
        while batching.idle and batching.full:
            self._submit(method, batching.full.pop(0))
        for key, batch in list(batching.filling.items()):
            if not batching.idle:
                return
            slots = self.sessions.slots(key[1])
            everyone = 0 < slots <= batch.rows
            if batch.rows >= batching.size or everyone or now >= batch.deadline:
                del batching.filling[key]
                self._submit(method, batch)

    def _submit(self, method: Method, batch: Batch) -> None:
        method.batching.idle -= 1
        if method.postfn:
            batch.tickets.append(self._post.ticket())
        method.pool.put((method, batch))

    # Worker threads.

    def _work(self, job: Any) -> None:
        if len(job) != 2:
            super()._work(job)
            return
        method, batch = job
        after, info = self._work_batch(method, batch)
        with self._batch_lock:
            method.batching.idle += 1
            method.batching.end(batch)
            self._dispatch(method)
        if batch.tickets:
            self._post.put(batch.tickets[0], after, info)

    def _work_batch(self, method: Method, batch: Batch) -> tuple[Any, Any]:
        after = info = None
        with self._applying(method) as allowed:
            if not allowed:
                for call in batch.calls:
                    call.session.forget(call.seq)
                return None, None
            try:
                result = method.workfn(*batch.arguments())
                if method.postfn:
                    result, info = result
                frames = self._split(result, batch)
                after = method.postfn
            except Exception as error:
                # It belongs to the callers of this batch, and to nobody else.
                frames = [
                    self._outbox.exception(call.seq, method.name, error)
                    for call in batch.calls
                ]
            for call, frame in zip(batch.calls, frames):
                self._outbox.finish(call.session, call.seq, frame)
        now = time.perf_counter()
        self._statistics.latencies.extend(now - call.received for call in batch.calls)
        self._fill[0] += 1
        self._fill[1] += batch.rows
        return after, info

    def _split(self, result: Any, batch: Batch) -> list[bytes]:
        """Encodes the rows of each call's reply."""
        structure, arrays, values = wire.flatten(result)
        if values:
            raise TypeError("A batched function must return arrays, not plain values.")
        for array in arrays:
            if not array.shape or array.shape[0] != batch.rows:
                raise ValueError(
                    f"A batched function returned an array of shape {array.shape} for "
                    f"a batch of {batch.rows} rows."
                )
        row = row_structure(self._codec.spec("", structure), batch.rows)
        specs = {0: self._codec.spec("", row)}
        frames = []
        for call in batch.calls:
            if call.rows not in specs:
                stack = stack_structure(row, call.rows)
                specs[call.rows] = self._codec.spec("", stack)
            spec = specs[call.rows]
            if call.rows:
                stop = call.start + call.rows
                chosen = [array[call.start : stop] for array in arrays]
            else:
                chosen = [array[call.start] for array in arrays]
            frames.append(
                self._outbox.reply(call.seq, spec, [], chosen, call.reply_memory)
            )
        return frames


def row_structure(spec: wire.Spec, rows: int) -> tuple:
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
