"""Owns the workers of a run: restarts, hangs, orderly stop. The launching process."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from embodied.workers import child
from embodied.workers import process as processes
from embodied.workers.process import Process
from embodied.workers.progress import Progress
from embodied.workers.restarts import RestartPolicy, RunFailed, RunStalled, Status
from embodied.workers.thread import Worker, WorkerError, error_from

INTERRUPTED_GRACE = 1.0  # Seconds; a user who interrupts does not want to wait.


@dataclass(eq=False)
class _Slot:
    """State of a worker, kept across its restarts."""

    name: str
    role: str
    make_worker: Callable[[], Worker]
    policy: RestartPolicy
    progress: Progress | None
    worker: Worker | None = None
    started: float = 0.0
    starts: int = 0
    restart_at: float = math.inf
    ended: bool = False
    kill_reason: WorkerError | None = None  # Why it was killed, until its end is seen.
    failures: deque[tuple[float, str]] = field(default_factory=deque)  # Time, kind.
    in_a_row: int = 0  # Restarts without a steady run in between.

    @property
    def running(self) -> bool:
        """Whether the worker is running and was not killed."""
        worker = self.worker
        return worker is not None and worker.running and self.kill_reason is None


class Supervisor:
    """Starts workers, restarts those that fail or hang, and stops all at the end.

        with Supervisor(stall_timeout=1800) as supervisor:
          supervisor.add('replay', 'replay', make_replay, RestartPolicy(restarts=3))
          rules = RestartPolicy(10, hang=300)
          supervisor.add('env-0', 'env', make_env, rules, progress)
          supervisor.run(until=stop_event)

    The thread that calls `run` supervises. It sleeps until a worker ends, until `stop`
    is called, or until the next moment at which a restart, a hang or a stall can be
    due. After `add`, it alone changes the slots, apart from `stop`, and does so under
    `_lock`, which makes `status` and `stop` safe in any thread. Threads that watch
    workers only put an event for each end into `_events`.

    Args:
      grace: seconds for all processes together to end before they get SIGKILL.
      stall_timeout: the run ends when no worker has reported a step for that many
        seconds; 0 for never.
      on_restart: called as `on_restart(name, error)` by the supervising thread when a
        restart is decided, before the delay; the error is None if the worker
        succeeded. An exception from it ends the run.
      on_failure: called with the error by the supervising thread when a worker has
        failed for good, before the others are stopped.
      first_ends: whether the first worker that succeeds ends the run; the others then
        have `grace` seconds to end by themselves.
    """

    def __init__(
        self,
        grace: float = 5.0,
        stall_timeout: float = 0.0,
        on_restart: Callable[[str, WorkerError | None], None] | None = None,
        on_failure: Callable[[RunFailed], None] | None = None,
        first_ends: bool = False,
    ):
        self._grace = grace
        self._stall_timeout = stall_timeout
        self._on_restart = on_restart
        self._on_failure = on_failure
        self._first_ends = first_ends
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._events: queue.SimpleQueue[tuple[_Slot, Worker] | None]
        self._events = queue.SimpleQueue()
        self._until: threading.Event | None = None
        self._began = 0.0
        self._deadline = math.inf  # Set by the first success, if that ends the run.
        self._stopping = False
        self._leftover: set[Worker] = set()  # Threads that did not end in time.
        self._overslept = (0.0, 0.0)  # Planned and actual time of a late wake-up.

    def add(
        self,
        name: str,
        role: str,
        make_worker: Callable[[], Worker],
        policy: RestartPolicy,
        progress: Progress | None = None,
    ) -> None:
        """Adds a worker, before `run`.

        Args:
          name: unique name, for errors and the status.
          role: what the worker does.
          make_worker: returns a new worker for every start, after cleaning up what a
            dead one has left behind.
          policy: when to restart it.
          progress: where the worker reports; needed if `policy.hang` is set.
        """
        assert progress is not None or not policy.hang, name
        self._slots.append(_Slot(name, role, make_worker, policy, progress))

    def run(self, until: threading.Event | None = None) -> None:
        """Starts all workers, supervises them to the end of the run, and stops them.

        The run ends when all workers have succeeded (see `first_ends`), when `until` is
        set, on `stop`, by an error, or by an interrupt.

        Args:
          until: ends the run when it is set. It is also set when the run ends
            otherwise, to tell threads among the workers to return.

        Raises:
          RunFailed: a worker failed more often than its policy allows, or a thread
            hangs.
          RunStalled: no worker made progress for `stall_timeout` seconds.
        """
        self._until = until
        if until is not None:
            threading.Thread(
                target=self._follow, args=(until,), name="follow until", daemon=True
            ).start()
        try:
            self._began = time.monotonic()
            for slot in self._slots:
                self._start(slot)
            while not self._is_over():
                self._restart_due()
                self._kill_hung()
                self._check_stall()
                self._wait()
        except RunFailed as error:
            if self._on_failure is not None:
                self._on_failure(error)
            raise
        except KeyboardInterrupt:
            self.stop(min(self._grace, INTERRUPTED_GRACE))
            raise
        finally:
            self.stop()

    def stop(self, grace: float | None = None) -> None:
        """Stops all workers, the last added first, and ends `run`.

        Processes are terminated; those left after `grace` seconds, which all of them
        share, get SIGKILL. Threads are waited for until then, once, and left behind as
        daemons. May be called by any thread, more than once. Failures from now on do
        not count, since a worker may fail because another has ended.

        Args:
          grace: seconds; default: that of the supervisor.
        """
        grace = self._grace if grace is None else grace
        with self._lock:
            self._stopping = True
            workers = [slot.worker for slot in reversed(self._slots) if slot.worker]
        self._events.put(None)
        if self._until is not None:
            self._until.set()
        deadline = time.monotonic() + grace
        processes.stop(workers, grace)
        for worker in workers:
            if worker.started and worker not in self._leftover:
                worker.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._leftover.update(worker for worker in workers if worker.running)
            for slot in self._slots:
                slot.ended = slot.worker is None or not slot.worker.running

    def status(self) -> list[Status]:
        """Returns the state of every worker, in the order they were added."""
        with self._lock:
            return [_status(slot) for slot in self._slots]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _follow(self, until: threading.Event) -> None:
        until.wait()  # `stop` sets it at the latest.
        self._events.put(None)

    def _is_over(self) -> bool:
        if self._until is not None and self._until.is_set():
            return True
        if time.monotonic() >= self._deadline:
            return True
        with self._lock:
            return self._stopping or all(slot.ended for slot in self._slots)

    def _wait(self) -> None:
        """Sleeps until a worker ends, `stop` is called, or something can be due."""
        due = [self._deadline, self._stall_deadline()]
        due += [slot.restart_at for slot in self._slots]
        due += [self._hang_check(slot) for slot in self._slots]
        wake = min(due)
        timeout = None
        if wake < math.inf:
            timeout = min(max(0.0, wake - time.monotonic()), threading.TIMEOUT_MAX)
        event = None
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=timeout)
        now = time.monotonic()
        if now > wake:
            self._overslept = (wake, now)
        if event is not None:
            self._note_end(*event)

    def _start(self, slot: _Slot) -> None:
        if slot.progress is not None:
            slot.progress.reset()
        slot.started = time.monotonic()
        worker = slot.make_worker()
        with self._lock:
            # Under the lock, so that `stop` either sees the worker or prevents its
            # start.
            stopping = self._stopping
            if not stopping:
                slot.worker = worker
                slot.started = time.monotonic()
                slot.starts += 1
                if not worker.started:
                    worker.start()
        if stopping:
            processes.stop([worker], 0.0)
        else:
            worker.on_exit(lambda worker: self._events.put((slot, worker)))

    def _restart_due(self) -> None:
        for slot in self._slots:
            if slot.restart_at > time.monotonic():
                continue
            with self._lock:
                slot.restart_at = math.inf
            try:
                self._start(slot)
            except Exception as error:
                self._decide_restart(slot, error_from(slot.name, child.describe(error)))

    def _note_end(self, slot: _Slot, worker: Worker) -> None:
        with self._lock:
            if self._stopping:
                return
            error, slot.kill_reason = slot.kill_reason or worker.error, None
        self._decide_restart(slot, error)

    def _decide_restart(self, slot: _Slot, error: WorkerError | None) -> None:
        """Decides whether a worker that has ended is restarted, and when."""
        now, policy = time.monotonic(), slot.policy
        with self._lock:
            if error is None and not policy.restart_on_success:
                slot.ended = True
                if self._first_ends:
                    self._deadline = min(self._deadline, now + self._grace)
                return
            if error is not None:
                slot.failures.append((now, error.kind))
                while slot.failures[0][0] < now - policy.window:
                    slot.failures.popleft()
                if counts := _too_many(slot, error.kind):
                    slot.ended = True
                    raise _failed(slot, counts, error) from error.__cause__
            if now - slot.started >= policy.steady:
                slot.in_a_row = 0
            slot.in_a_row += 1
            slot.restart_at = now + policy.delay(slot.in_a_row)
        if self._on_restart is not None:
            self._on_restart(slot.name, error)

    def _kill_hung(self) -> None:
        now = time.monotonic()
        hung = [slot for slot in self._slots if self._hang_deadline(slot) <= now]
        self._kill({slot: _hang_reason(slot, now) for slot in hung})

    def _kill(self, reasons: dict[_Slot, str]) -> None:
        """Kills workers, which are then restarted as if they had failed.

        Args:
          reasons: by slot, why its worker is killed; it continues "The worker ...".

        Raises:
          RunFailed: one of them is a thread, which cannot be killed.
        """
        for slot, reason in reasons.items():
            error = WorkerError(slot.name, reason)
            if not isinstance(slot.worker, Process):
                raise _failed(slot, "a thread cannot be killed", error)
            with self._lock:
                slot.kill_reason = error  # Else it would count as a normal end.
        # Without time to end: a worker that hangs would not use it.
        processes.stop([slot.worker for slot in reasons if slot.worker], 0.0)

    def _hang_deadline(self, slot: _Slot) -> float:
        """Returns when the worker counts as hung unless it reports before then."""
        policy, progress = slot.policy, slot.progress
        if not policy.hang or progress is None or not slot.running:
            return math.inf
        since = progress.seen or slot.started + policy.startup
        return since + policy.hang + self._frozen(since, policy.hang)

    def _hang_check(self, slot: _Slot) -> float:
        """Returns the earliest time at which the worker can count as hung.

        A worker that waits or starts has a later deadline, but may report right now and
        hang from then on.
        """
        if not slot.policy.hang or not slot.running:
            return math.inf
        return min(self._hang_deadline(slot), time.monotonic() + slot.policy.hang)

    def _stall_deadline(self) -> float:
        """Returns the earliest time at which the whole run can count as stalled."""
        watched = [slot for slot in self._slots if slot.progress]
        if not self._stall_timeout or all(slot.ended for slot in watched):
            return math.inf
        since = max(slot.progress.stepped for slot in watched if slot.progress)
        since = max(since, self._began)
        return since + self._stall_timeout + self._frozen(since, self._stall_timeout)

    def _frozen(self, since: float, limit: float) -> float:
        """Returns the seconds to add to a deadline because this process was frozen too.

        If a scheduler froze all processes for a while, none of them hangs. How long
        this process was frozen before its planned wake-up is unknown, so its delay
        counts twice, the second time up to `limit`. Only the last late wake-up counts,
        so that a process that is always late still detects a hang.
        """
        wanted, woke = self._overslept
        late = max(0.0, woke - max(wanted, since))
        return late + min(late, limit)

    def _check_stall(self) -> None:
        if self._stall_deadline() > time.monotonic():
            return
        watched = {slot.name for slot in self._slots if slot.progress}
        last = "\n".join(
            f"  {status.name} ({'waiting' if status.waiting else status.state}): "
            + ("never" if status.idle is None else f"{status.idle:.1f} s ago")
            for status in self.status()
            if status.name in watched
        )
        raise RunStalled(
            f"No worker has progressed for {self._stall_timeout:g} s, so the run was "
            "ended. Workers that are not waiting hold up the others; if they were just "
            f"slow, raise the stall timeout. Last progress:\n{last}"
        )


def _hang_reason(slot: _Slot, now: float) -> str:
    seen = slot.progress.seen if slot.progress else 0.0
    if seen == 0.0:
        return f"has reported nothing in {now - slot.started:.1f} s since its start."
    return f"has reported no progress for {now - seen:.1f} s."


def _too_many(slot: _Slot, kind: str) -> str:
    """Describes the limit that a last failure of `kind` exceeds; empty if none."""
    policy = slot.policy
    alike = sum(kind == other for _, other in slot.failures)
    limits = [(len(slot.failures), "failures", policy.restarts)]
    if kind in policy.limits:
        limits.append((alike, f"times {kind}", policy.limits[kind]))
    for count, what, limit in limits:
        if count > limit:
            return f"{count} {what} in {policy.window:g} s, {limit} restarts allowed"
    return ""


def _failed(slot: _Slot, why: str, error: WorkerError) -> RunFailed:
    reason = f"of role '{slot.role}' failed for good ({why}): it {error.reason}"
    return RunFailed(slot.name, reason, error.traceback, slot.role, error.kind)


def _status(slot: _Slot) -> Status:
    seen = slot.progress.seen if slot.progress else None
    stepped = slot.progress.stepped if slot.progress else 0.0
    running = slot.worker is not None and slot.worker.running
    if slot.ended:
        state = "ended"
    elif slot.restart_at < math.inf:
        state = "backing off"
    elif slot.worker is None or seen == 0.0:
        state = "starting"
    else:
        state = "running"
    return Status(
        name=slot.name,
        role=slot.role,
        state=state,
        waiting=running and slot.progress is not None and slot.progress.waits,
        pid=slot.worker.pid if running and isinstance(slot.worker, Process) else None,
        restarts=max(0, slot.starts - 1),
        idle=time.monotonic() - stepped if stepped else None,
    )
