"""A server whose methods get the calls of many clients as one batch. Any process.

A batch counts env rows. It goes out when it has enough rows, when every registered
env slot of its group is in it, or when its first row has waited long enough; while
all workers are busy it keeps growing. Calls of one kind of rows, and of one group,
share a batch; a call of another shape harms only itself.

The loop thread fills batches; workers take them. One lock guards both. Batches of a
function that is quick are run by the loop thread.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from embodied.rpc import buffers, structures, wire
from embodied.rpc.buffers import BatchBuffer
from embodied.rpc.calls import Unanswered
from embodied.rpc.links import Link
from embodied.rpc.server import Method, Server
from embodied.rpc.sessions import ClientSession

MAX_ROUTES = 512  # Specs whose check is remembered.
MAX_SPARE = 4  # Buffers that are kept for each kind of rows.
MAX_CACHED = 64  # Calls of a client that look different; it has a block for each open.
QUICK_SECONDS = 1e-3  # The longest run that counts as quick.
QUICK_RUNS = 8  # So many make it worth while to wake nobody for the next.
_EVERYTHING = itertools.repeat(slice(None))
_SET: Any = operator.setitem


class BatchedCall(NamedTuple):
    """One call in a batch: its place, and where its reply goes."""

    session: ClientSession
    seq: int
    start: int
    rows: int  # 0 for an unstacked call, which has one row.
    reply_memory: Any
    received: float


class RowKind:
    """Rows of one structure, and buffers that earlier batches have left."""

    def __init__(self, structure: tuple, columns: list[structures.Leaf]):
        self.structure = structure
        self.columns = columns  # Of one row.
        self.spare: deque[BatchBuffer] = deque(maxlen=MAX_SPARE)
        self.held: buffers.Leases = {}  # Of buffers that are in use.
        # Of the commonest arguments, one dict of arrays, which is quick to build.
        self.names: tuple[str, ...] | None = None
        match structure:
            case ("t", (("d", names, children),)):
                if all(child[0] == "a" for child in children):
                    self.names = names


class Batch:
    """Rows of one kind and group, no more than its buffers have room for."""

    def __init__(self, key: tuple[RowKind, Any], buffer: BatchBuffer, deadline: float):
        self.key = key
        self.buffer = buffer
        self.deadline = deadline
        self.rows = 0
        self.stacked = False  # Whether one of its calls is a stack.
        self.calls: list[BatchedCall] = []
        self.ticket: int | None = None

    def add(self, call: BatchedCall, sources: list[memoryview]) -> None:
        """Copies the rows of a call, given as the bytes of each array."""
        start = self.rows
        stop = self.rows = start + (call.rows or 1)
        # A loop in C: `target[:] = source` for each; none returns anything.
        targets = self.buffer.targets(start, stop)
        any(map(_SET, targets, _EVERYTHING, sources))
        self.stacked = self.stacked or call.rows > 0
        self.calls.append(call)

    def arguments(self) -> tuple:
        """The batch as the arguments of its function, arrays [rows, ...]."""
        arrays = self.buffer.arrays(self.rows)
        kind = self.key[0]
        if kind.names is not None:
            return (dict(zip(kind.names, arrays)),)
        return structures.unflatten(kind.structure, arrays, ())

    def forget(self) -> None:
        """Leaves its calls without an answer, since the server ends."""
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
        self.filling: dict[tuple[RowKind, Any], Batch] = {}
        self.full: list[Batch] = []
        self._routes: dict[tuple[structures.Spec, int], RowKind] = {}
        self._kinds: dict[tuple, RowKind] = {}

    def route(self, spec: structures.Spec, rows: int) -> RowKind:
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
            structure = structures.row_structure(spec, rows)
            kind = self._kinds.get(structure)
            if kind is None:
                kind = RowKind(structure, structures.Spec("", structure, b"").leaves)
                self._kinds[structure] = kind
            self._routes[spec, rows] = kind
        return kind

    def batch(self, kind: RowKind, group: Any, rows: int) -> Batch:
        """Returns the batch that takes in so many more rows."""
        key = (kind, group)
        batch = self.filling.get(key)
        if batch is not None:
            if batch.rows + rows <= self.limit:
                return batch
            self.full.append(self.filling.pop(key))
        # Memory that was used before saves page faults.
        buffer = (
            kind.spare.pop()
            if kind.spare
            else BatchBuffer(kind.columns, self.limit, kind.spare, kind.held)
        )
        batch = Batch(key, buffer, time.monotonic() + self.timeout)
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

    def end(self, seconds: float) -> None:
        """Takes note of how long a batch took to run, and that its worker is idle."""
        self.idle += 1
        if seconds < QUICK_SECONDS:
            self._quick = min(self._quick + 1, 2 * QUICK_RUNS)
        else:
            self._quick = max(self._quick - QUICK_RUNS // 2, 0)

    @property
    def quick(self) -> bool:
        """Whether to wake another thread takes longer than to run a batch."""
        return self._quick >= QUICK_RUNS

    def due(self, now: float) -> float | None:
        """When the next batch has waited long enough.

        One that has already, and is still here, goes to the next worker that is done.
        """
        deadlines = [batch.deadline for batch in self.filling.values()]
        return min((x for x in deadlines if x > now), default=None)

    def _check(self, spec: structures.Spec, rows: int) -> None:
        if rows > self.limit:
            raise wire.WireError(
                f"a stack of {rows} rows is larger than a batch of {self.limit}"
            )
        for leaf in spec.leaves:
            if rows and (not leaf.shape or leaf.shape[0] != rows):
                raise wire.WireError(
                    f"an array of shape {leaf.shape} is not a stack of {rows} rows"
                )


class CachedCall(NamedTuple):
    """Cached routing of a call, for the next ones that look alike."""

    method: Method
    message: wire.Message
    kind: RowKind
    sources: list[memoryview]
    source: Any  # Where the arrays lie, and from which byte on.
    start: int
    reply_memory: Any


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
        method = Method(name, workfn, postfn, pool, schema, batching, set())
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

    def _accept(
        self, session: ClientSession, message: wire.Message, method: Method
    ) -> None:
        if method.batching is None:
            super()._accept(session, message, method)
            return
        batching: Batching = method.batching
        spec, rows = message.spec, message.rows
        if message.values:
            raise wire.WireError("only arrays can be batched, not plain values")
        kind = batching.route(spec, rows)
        mapping, reply_memory = self._memory(session, message)
        if mapping is None:
            source, start = message.frame, message.start
            sources = structures.payload_slices(spec, source, start)
        else:
            source, start = mapping.pages, 0
            sources = mapping.slices(spec)
        call = CachedCall(method, message, kind, sources, source, start, reply_memory)
        self._take_in(session, message.seq, call)
        if message.flags == wire.BULK | wire.PLACES and session.link is not None:
            cached = session.link.cached
            if len(cached) >= MAX_CACHED:
                cached.clear()
            cached[wire.without_seq(message.frame)] = call

    def _receive(self, link: Link, frame: Any) -> None:
        # Calls of one client mostly differ in their number and in what lies in the
        # shared memory. What was found out about the bytes of one holds for the next.
        call = link.cached.get(wire.without_seq(frame)) if link.cached else None
        session = link.session
        if call is None or session.away or session.link is not link:
            super()._receive(link, frame)
            return
        session.heard = time.monotonic()
        self._statistics.counts.received_bytes += len(frame)
        seq = wire.seq_of(frame)
        try:
            if self._begin(session, seq, ()):
                self._take_in(session, seq, call)
        except wire.WireError as error:
            self._refuse(session, seq, call.method.name, error)
        except Exception:
            self._internal_error()

    def _take_in(self, session: ClientSession, seq: int, call: CachedCall) -> None:
        """Adds a call to a batch."""
        batching: Batching = call.method.batching
        group, rows = None, call.message.rows
        if batching.group is not None:
            group = structures.read_group(
                batching.group, call.message.spec, call.source, call.start
            )
        with self._batch_lock:
            batch = batching.batch(call.kind, group, rows or 1)
            row = BatchedCall(
                session, seq, batch.rows, rows, call.reply_memory, time.perf_counter()
            )
            batch.add(row, call.sources)

    def _after_receive(self) -> None:
        while (job := self._next_own()) is not None:
            if not self._loop.run(self._run_own, job):
                with self._batch_lock:
                    self._dispatch(job[0])
                return

    def _next_own(self) -> tuple[Method, Batch] | None:
        """Gives ready batches to workers, and returns one for the loop thread."""
        with self._batch_lock:
            for method in self._batched:
                own = self._dispatch(method, leads=True)
                if own is not None:
                    return method, own
        return None

    def _due(self) -> float | None:
        now = time.monotonic()
        with self._batch_lock:
            due = [method.batching.due(now) for method in self._batched]
        return min((x for x in due if x is not None), default=None)

    # Any thread that holds the lock.

    def _dispatch(self, method: Method, leads: bool = False) -> Batch | None:
        """Gives ready batches to idle workers.

        Args:
          method: whose batches.
          leads: whether this is the loop thread. It runs the batches of a function
            that is quick, and the first of them is returned.
        """
        batching: Batching = method.batching
        while batching.idle and (batch := batching.next(self.sessions.slots)):
            batching.idle -= 1
            if method.postfn:
                batch.ticket = self._post.ticket()
            if leads and batching.quick:
                return batch
            method.pool.put((method, batch))
        return None

    # Worker threads, and the loop thread.

    def _work(self, job: Any) -> None:
        if len(job) != 2:
            super()._work(job)
            return
        try:
            self._run_batch(job)
        finally:
            with self._batch_lock:
                self._dispatch(job[0])

    def _run_own(self, job: tuple[Method, Batch]) -> None:
        try:
            self._run_batch(job)
        except Exception:
            self._internal_error()  # The loop has others to serve.

    def _run_batch(self, job: tuple[Method, Batch]) -> None:
        method, batch = job
        started = time.perf_counter()
        after = info = None
        try:
            after, info = self._work_batch(method, batch)
        finally:
            # Whatever happened: the next batch, and what comes after replies, waits.
            if batch.ticket is not None:
                self._post.put(batch.ticket, after, info)
            with self._batch_lock:
                method.batching.end(time.perf_counter() - started)

    def _work_batch(self, method: Method, batch: Batch) -> tuple[Any, Any]:
        after = info = None
        if self._closing.is_set():
            batch.forget()
            return None, None
        try:
            result = method.workfn(*batch.arguments())
            if method.postfn:
                result, info = result
            frames = self._split(method, result, batch)
            after = method.postfn
        except Unanswered:
            batch.forget()
            return None, None
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

    def _split(self, method: Method, result: Any, batch: Batch) -> list[bytes]:
        """Encodes the rows of each call's reply."""
        whole, arrays, values = self._codec.result(method.name, result)
        if values:
            raise TypeError("A batched function must return arrays, not plain values.")
        for array in arrays:
            if not array.shape or array.shape[0] != batch.rows:
                raise ValueError(
                    f"A batched function returned an array of shape {array.shape} for "
                    f"a batch of {batch.rows} rows."
                )
        row = structures.row_structure(whole, batch.rows)
        specs = {0: self._codec.spec("", row)}
        single = specs[0]
        small = single.nbytes < buffers.THRESHOLD <= self._codec.max_bytes
        if small and not batch.stacked:
            places = [(call.seq, call.start) for call in batch.calls]
            return wire.row_frames(wire.REPLY, single, arrays, places)
        frames = []
        for _, seq, start, rows, reply_memory, _ in batch.calls:
            spec = specs.get(rows)
            if spec is None:
                spec = self._codec.spec("", structures.stack_structure(row, rows))
                specs[rows] = spec
            stop = start + rows
            chosen = [x[start:stop] if rows else x[start] for x in arrays]
            frames.append(self._outbox.reply(seq, spec, (), chosen, reply_memory))
        return frames
