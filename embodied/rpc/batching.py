"""A server whose methods get the calls of many clients as one batch. Any process.

A batch counts env rows. It goes out when it has enough rows, when every registered
env slot of its group is in it, or when its first row has waited long enough; while
all workers are busy it keeps growing.

The loop thread fills batches; workers take them. One lock guards both. Batches of a
function that is quick are run by the loop thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from embodied.rpc import layout, memory, wire
from embodied.rpc.batches import (
    Batch,
    Batching,
    Kind,
    Row,
    group_value,
    row_structure,
    stack_structure,
)
from embodied.rpc.methods import Method
from embodied.rpc.server import Server, Unanswered
from embodied.rpc.session import Session

MAX_KNOWN = 64  # Calls of a client that look different; it has a block for each open.


class Known(NamedTuple):
    """What was found out about a call, which holds for every one that looks alike."""

    method: Method
    message: wire.Message
    kind: Kind
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
        method = Method(
            name, workfn, postfn, pool, schema, once, False, batching, set()
        )
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
        kind = batching.route(spec, rows)
        mapping, reply_memory = self._memory(session, message)
        if mapping is None:
            source, start = message.frame, message.start
            sources = layout.payload_slices(spec, source, start)
        else:
            source, start = mapping.pages, 0
            sources = mapping.slices(spec)
        known = Known(method, message, kind, sources, source, start, reply_memory)
        self._take_in(session, message.seq, known)
        if message.flags == wire.BULK | wire.PLACES and type(message.frame) is bytes:
            if len(session.memory.known) >= MAX_KNOWN:
                session.memory.known.clear()
            session.memory.known[wire.without_seq(message.frame)] = known

    def _lane_frame(self, session: Session, frame: bytes) -> None:
        # Calls of one client mostly differ in their number and in what lies in the
        # shared memory. What was found out about the bytes of one holds for the next.
        known = session.memory.known.get(wire.without_seq(frame))
        if known is None or session.away:
            super()._lane_frame(session, frame)
            return
        session.heard = time.monotonic()
        self._statistics.counts.received_bytes += len(frame)
        seq = wire.seq_of(frame)
        try:
            if self._begin(session, seq, (), known.method.once):
                self._take_in(session, seq, known)
        except wire.WireError as error:
            self._refuse(session, seq, known.method.name, error)
        except Exception:
            self._mistake()

    def _take_in(self, session: Session, seq: int, known: Known) -> None:
        """Adds a call to a batch."""
        batching: Batching = known.method.batching
        group, rows = None, known.message.rows
        if batching.group is not None:
            group = group_value(
                batching.group, known.message, known.source, known.start
            )
        with self._batch_lock:
            batch = batching.batch(known.kind, group, rows or 1)
            row = Row(
                session, seq, batch.rows, rows, known.reply_memory, time.perf_counter()
            )
            batch.add(row, known.sources)

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
            self._mistake()  # The loop has others to serve.

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
                method.batching.end(batch, time.perf_counter() - started)

    def _work_batch(self, method: Method, batch: Batch) -> tuple[Any, Any]:
        after = info = None
        with self._applying(method) as allowed:
            if not allowed:
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
        row = row_structure(whole, batch.rows)
        specs = {0: self._codec.spec("", row)}
        single = specs[0]
        small = single.nbytes < memory.THRESHOLD <= self._codec.max_bytes
        if small and not batch.stacked:
            places = [(call.seq, call.start) for call in batch.calls]
            return wire.row_frames(wire.REPLY, single, arrays, places)
        frames = []
        for _, seq, start, rows, reply_memory, _ in batch.calls:
            spec = specs.get(rows)
            if spec is None:
                spec = self._codec.spec("", stack_structure(row, rows))
                specs[rows] = spec
            stop = start + rows
            chosen = [x[start:stop] if rows else x[start] for x in arrays]
            frames.append(self._outbox.reply(seq, spec, (), chosen, reply_memory))
        return frames
