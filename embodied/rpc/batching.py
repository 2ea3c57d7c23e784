"""A server whose methods get the calls of many clients as one batch. Any process.

The size of a batch is its number of env rows. A batch goes out when it has enough rows,
when it has a row for every registered env slot of its group, or when its first row has
waited long enough; while all workers are busy it keeps growing. Calls share a batch if
their rows have the same structure and group. Calls of another structure go into other
batches, so that a wrong one does not fail the rest.

The loop thread fills batches; workers take them. One lock guards both. The loop thread
runs the batches of quick functions itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from embodied.rpc import buffers, wire
from embodied.rpc.buffers import BatchBuffer
from embodied.rpc.links import Link
from embodied.rpc.server import Job, Method, PendingCall, Server
from embodied.rpc.sessions import ClientSession
from embodied.rpc.wire import ArrayType, Spec, seq_of, split_at_seq

MAX_ROUTES = 512  # Call headers whose kind of rows is cached.
MAX_SPARE = 4  # Buffers that are kept for each kind of rows.
MAX_CACHED = 64  # Frames cached per link; they differ by block, one for each open call.
QUICK_SECONDS = 1e-3  # The longest run that counts as quick.
QUICK_RUNS = 8  # Score from which the loop thread runs a function itself.


class RowKind(NamedTuple):
    """One structure of rows, and the spare buffers of earlier batches."""

    columns: Spec  # Spec of a full batch, arrays [limit, ...].
    group: int | None  # Index of the array with the group; None without groups.
    spare: deque[BatchBuffer]


class Batch(Job):
    """A batch of rows of one kind and group, at most as many as its buffer holds."""

    def __init__(self, method: Method, key: tuple, buffer: BatchBuffer):
        super().__init__(method, [])
        self.key = key  # Columns of its kind of rows, and group.
        self.buffer = buffer
        self.deadline = time.monotonic() + method.batching.timeout
        self.rows = 0
        self.stacked = False  # Whether one of its calls is a stack.

    def add(self, call: PendingCall, arrays: list[np.ndarray]) -> None:
        """Adds a call and copies its rows into the buffer."""
        self.rows = call.start + (call.rows or 1)
        self.buffer.put(call.start, self.rows, arrays)
        self.stacked = self.stacked or call.rows > 0
        self.calls.append(call)

    def arguments(self) -> list:
        """Returns the arguments of the function, arrays [rows, ...]."""
        return self.buffer.build(self.rows)


class Batching:
    """The batching rules of one method, and its batches that are not dispatched yet.

    Args:
      size: rows that make a batch ready.
      limit: maximum rows of a batch, which grows beyond `size` while all workers are
        busy.
      timeout: seconds that the first row of a batch waits for others.
      group: key of the call's dict; rows with different values of it are not batched
        together. None for no groups.
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
        self._quick = 0  # Score: up by 1 after a quick run, down by more after others.
        self.filling: dict[tuple[Spec, Any], Batch] = {}
        self.full: list[Batch] = []
        self._routes: dict[tuple[Spec, int], RowKind] = {}
        self._kinds: dict[bytes, RowKind] = {}

    def route(self, spec: Spec, rows: int) -> RowKind:
        """Returns the kind of a call's rows. Loop thread only; does not need the lock.

        Raises:
          wire.WireError: the call cannot be batched.
        """
        kind = self._routes.get((spec, rows))
        if kind is None:
            self._check(spec, rows)
            if len(self._routes) >= MAX_ROUTES:
                # Batches being filled keep their kind, and go out when they are due.
                self._routes.clear()
                self._kinds.clear()
            columns = reshape(spec, lambda row: (self.limit, *row), rows > 0)
            encoded, _ = wire.flatten("", columns)
            kind = self._kinds.get(encoded)
            if kind is None:
                group = self._find_group(spec.tree)
                kind = RowKind(Spec(encoded), group, deque(maxlen=MAX_SPARE))
                self._kinds[encoded] = kind
            self._routes[spec, rows] = kind
        return kind

    def batch(self, method: Method, kind: RowKind, group: Any, rows: int) -> Batch:
        """Returns a batch with room for `rows` more rows, if need be a new one."""
        key = (kind.columns, group)
        batch = self.filling.get(key)
        if batch is not None:
            if batch.rows + rows <= self.limit:
                return batch
            self.full.append(self.filling.pop(key))
        # Memory that was used before saves page faults.
        spare = kind.spare
        buffer = spare.pop() if spare else BatchBuffer(kind.columns, spare)
        batch = self.filling[key] = Batch(method, key, buffer)
        return batch

    def next(self, slots: Callable[[Any], int]) -> Batch | None:
        """Removes and returns a batch that is ready, or returns None.

        Args:
          slots: returns the number of env slots of a group.
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

    def end(self, seconds: float) -> None:
        """Records how long a batch took to run, and that its worker is idle again."""
        self.idle += 1
        if seconds < QUICK_SECONDS:
            self._quick = min(self._quick + 1, 2 * QUICK_RUNS)
        else:
            self._quick = max(self._quick - QUICK_RUNS // 2, 0)

    @property
    def quick(self) -> bool:
        """True if running a batch takes less time than waking another thread."""
        return self._quick >= QUICK_RUNS

    def due(self, now: float) -> float:
        """Returns the earliest deadline, in seconds of `time.monotonic`.

        While no worker is idle, a batch past its deadline is left out: it goes to the
        next idle one.
        """
        deadlines = [batch.deadline for batch in self.filling.values()]
        return min((x for x in deadlines if self.idle or x > now), default=math.inf)

    def _check(self, spec: Spec, rows: int) -> None:
        if spec.plain:
            raise wire.WireError("only arrays can be batched, not plain values")
        if rows > self.limit:
            raise wire.WireError(
                f"a stack of {rows} rows is larger than a batch of {self.limit}"
            )
        for leaf in spec.leaves:
            if rows and (not leaf.shape or leaf.shape[0] != rows):
                raise wire.WireError(
                    f"an array of shape {leaf.shape} is not a stack of {rows} rows"
                )

    def _find_group(self, arguments: Any) -> int | None:
        """Returns which array of a call's dict has the group."""
        match arguments:
            case _ if self.group is None:
                return None
            case [dict() as data] if self.group in data:
                if all(type(node) is ArrayType for node in data.values()):
                    return list(data).index(self.group)
        raise wire.WireError(f"expected one dict of arrays with the key '{self.group}'")


class CachedCall(NamedTuple):
    """Routing of a call, cached for later calls whose frames differ only in number."""

    method: Method
    kind: RowKind
    rows: int
    arrays: list[np.ndarray]
    reply_memory: Any
    nbytes: int  # Of the arrays.


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
        self._row_specs: dict[tuple[Spec, int], Spec] = {}

    def bind(  # type: ignore[override]
        self,
        name: str,
        workfn: Callable,
        postfn: Callable | None = None,
        batch: int = 0,
        workers: int = 0,
        schema: dict | None = None,
        limit: int = 0,
        timeout: float = 0.05,
        group: str | None = None,
    ) -> None:
        """Offers a function; with `batch` rows, it gets the rows of many calls at once.

        A batched function takes arrays [n, ...] with n up to `limit` and returns
        arrays [n, ...], of which every client gets its rows. `batch` is the `size` of
        `Batching`, and the default of `limit`. The other arguments are those of
        `Server.bind` and `Batching`.
        """
        if not batch:
            super().bind(name, workfn, postfn, workers, schema)
            return
        if 0 < limit < batch:
            raise ValueError(
                f"Method '{name}': expected a limit of at least the batch ({batch}), "
                f"got {limit}."
            )
        workers = workers or 1
        pool = self._own_pool(name, workers)
        batching = Batching(batch, limit or batch, timeout, group, workers)
        method = Method(name, workfn, postfn, pool, schema, batching)
        self._add(method)
        self._batched.append(method)

    def stats(self) -> dict[str, float]:
        """Like `Server.stats`, and how full batches were."""
        (batches, rows), self._fill = self._fill, [0, 0]
        return {
            **super().stats(),
            "batches": batches,
            "batch_rows": rows / batches if batches else 0.0,
            "batch_waiting": self._rows_waiting(),
        }

    def totals(self) -> dict[str, float]:
        """Like `Server.totals`, and how many rows wait for a batch."""
        return {**super().totals(), "batch_waiting": self._rows_waiting()}

    def _rows_waiting(self) -> int:
        return sum(
            batch.rows
            for method in self._batched
            for batch in list(method.batching.filling.values())
        )

    # The loop thread.

    def _accept(
        self, session: ClientSession, message: wire.Message, method: Method
    ) -> None:
        if method.batching is None:
            super()._accept(session, message, method)
            return
        kind = method.batching.route(message.spec, message.rows)
        source, start, reply_memory = self._memory(session, message)
        arrays = message.spec.views(source, start)
        call = CachedCall(
            *(method, kind, message.rows, arrays, reply_memory, message.spec.nbytes)
        )
        self._take_in(session, message.seq, call)
        if message.flags & wire.IN_MEMORY and not message.open:
            assert session.link is not None
            cached = session.link.cached
            if len(cached) >= MAX_CACHED:
                cached.clear()
            cached[split_at_seq(message.frame)] = call

    def _receive(self, link: Link, frame: Any) -> None:
        # Calls of one client mostly differ only in their number and in the contents of
        # shared memory, so that the routing of one call's bytes holds for the next.
        call = link.cached.get(split_at_seq(frame)) if link.cached else None
        session = link.session
        if call is None or session.away or session.link is not link:
            super()._receive(link, frame)
            return
        session.heard = time.monotonic()
        self._counts["received_bytes"] += call.nbytes + len(frame)
        seq = seq_of(frame)
        try:
            if self._begin(session, seq, ()):
                self._take_in(session, seq, call)
        except wire.WireError as error:
            self._refuse(session, seq, call.method.name, error)
        except Exception as error:
            self._fail_call(session, seq, call.method.name, error)

    def _take_in(self, session: ClientSession, seq: int, call: CachedCall) -> None:
        """Adds a call to a batch."""
        method, kind, rows, arrays, reply_memory, _ = call
        group, now = None, time.perf_counter()
        if kind.group is not None:
            values = arrays[kind.group].reshape(-1).tolist()
            if not values or values.count(values[0]) != len(values):
                text = f"the rows of a stack differ in '{method.batching.group}'"
                raise wire.WireError(text)
            group = values[0]
        with self._batch_lock:
            batch = method.batching.batch(method, kind, group, rows or 1)
            batch.add(
                PendingCall(session, seq, now, reply_memory, batch.rows, rows), arrays
            )

    def _after_receive(self) -> None:
        while (batch := self._next_for_loop()) is not None:
            if not self._loop.run(self._run_own, batch):
                with self._batch_lock:
                    self._dispatch(batch.method)
                return

    def _next_for_loop(self) -> Batch | None:
        """Gives ready batches to workers, and returns one for the loop thread."""
        with self._batch_lock:
            for method in self._batched:
                if (own := self._dispatch(method, leads=True)) is not None:
                    return own
        return None

    def _due(self) -> float:
        now = time.monotonic()
        with self._batch_lock:
            due = [method.batching.due(now) for method in self._batched]
        return min(due, default=math.inf)

    # Any thread that holds the lock.

    def _dispatch(self, method: Method, leads: bool = False) -> Batch | None:
        """Gives ready batches to idle workers.

        Args:
          method: the method whose batches are given out.
          leads: whether the caller is the loop thread, which runs the batches of a
            quick function itself: the first of them is returned instead.
        """
        batching: Batching = method.batching
        while batching.idle and (batch := batching.next(self.sessions.slots)):
            batching.idle -= 1
            if method.postfn:
                batch.ticket = self._post.ticket()
            if leads and batching.quick:
                return batch
            method.pool.put(batch)
        return None

    # Worker threads, and the loop thread.

    def _work(self, job: Job) -> None:
        if not isinstance(job, Batch):
            super()._work(job)
            return
        try:
            self._run_batch(job)
        finally:
            with self._batch_lock:
                self._dispatch(job.method)

    def _run_own(self, batch: Batch) -> None:
        try:
            self._run_batch(batch)
        except BaseException:
            self._internal_error()  # The loop must go on for other clients.

    def _run_batch(self, batch: Batch) -> None:
        started = time.perf_counter()
        try:
            super()._work(batch)
        finally:
            with self._batch_lock:
                batch.method.batching.end(time.perf_counter() - started)
                self._fill[0] += 1
                self._fill[1] += batch.rows

    def _encode(self, job: Job, result: Any) -> list[bytes]:
        """Returns the reply frame of each call, with its rows of the result."""
        if not isinstance(job, Batch):
            return super()._encode(job, result)
        whole, arrays = self._codec.flatten("", [result])
        if whole.plain:
            raise TypeError("A batched function must return arrays, not plain values.")
        for array in arrays:
            if not array.shape or array.shape[0] != job.rows:
                raise ValueError(
                    f"A batched function returned an array of shape {array.shape} for "
                    f"a batch of {job.rows} rows."
                )
        single = self._spec_of_rows(whole, 0)
        small = single.nbytes < buffers.THRESHOLD <= self._codec.max_bytes
        if small and not job.stacked:
            places = [(call.seq, call.start) for call in job.calls]
            return row_frames(single, arrays, places)
        frames = []
        for call in job.calls:
            stop = call.start + call.rows
            rows = slice(call.start, stop) if call.rows else call.start
            spec, chosen = (
                self._spec_of_rows(whole, call.rows),
                [x[rows] for x in arrays],
            )
            frames.append(self._outbox.reply(call.seq, spec, chosen, call.reply_memory))
        return frames

    def _spec_of_rows(self, whole: Spec, rows: int) -> Spec:
        """Returns the header of `rows` rows of a result; 0 means one row, unstacked."""
        spec = self._row_specs.get((whole, rows))
        if spec is None:
            stack = (rows,) if rows else ()
            tree = reshape(whole, lambda row: (*stack, *row), stacked=True)
            spec = self._codec.find(wire.flatten("", tree)[0])
            wire.cache_spec(self._row_specs, (whole, rows), spec)
        return spec


def reshape(spec: Spec, function: Callable[[tuple], tuple], stacked: bool) -> Any:
    """Returns the data of a header, with array shapes derived from those of one row.

    Args:
      spec: header of the data.
      function: maps the shape of one row to the new shape of its array.
      stacked: whether the arrays of `spec` are stacks of rows rather than one row.
    """
    return wire.map_arrays(
        lambda array: ArrayType(array.dtype, function(array.shape[stacked:])),
        spec.tree,
    )


def row_frames(
    spec: Spec, arrays: list[np.ndarray], places: list[tuple[int, int]]
) -> list[bytes]:
    """Builds a reply for each (number, index), with one row of stacked arrays."""
    count = len(arrays[0]) if arrays else 0
    payload = np.zeros((count, spec.nbytes), np.uint8)
    for array, leaf in zip(arrays, spec.leaves):
        if leaf.nbytes:
            rows = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            end = leaf.offset + leaf.nbytes
            payload[:, leaf.offset : end] = rows.reshape(count, leaf.nbytes)
    head, tail = split_at_seq(wire.encode(wire.REPLY, 0, spec, []))
    tail += bytes(-(wire.PRELUDE.size + len(tail)) % wire.ALIGN)
    size, whole, number = spec.nbytes, payload.tobytes(), wire.SEQ.pack
    return [
        head + number(seq) + tail + whole[index * size : (index + 1) * size]
        for seq, index in places
    ]
