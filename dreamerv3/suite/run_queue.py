"""The queue of a suite: runs wait, run as processes, and end. The suite's process.

All state of the queue is in the folders of the runs, so that the same command goes on
after any end, including kill -9:

    SUITE/TASK/seed0/             logdir of a run, with its own checkpoints
    SUITE/TASK/seed0/output.txt   what the run printed
    SUITE/TASK/seed0/done.json    the run has reached its steps
    SUITE/TASK/seed0/failed.json  the run has failed twice, and how
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dreamerv3.suite.accelerators import Slot
from dreamerv3.suite.curves import last_score, last_step
from embodied.checkpoint import Checkpoint, write_file
from embodied.workers import Process, stop

DONE, FAILED, OUTPUT = "done.json", "failed.json", "output.txt"
ATTEMPTS = 2
LOOK_SECONDS = 1.0  # Between looks at the steps of the runs.
SAVE_SECONDS = 600.0  # For runs to save when the suite is interrupted.
TAIL_LINES = 20  # Of the output of a run that failed.


@dataclasses.dataclass(eq=False)
class SuiteRun:
    """A run of a suite: a task and a seed, and how far it has come.

    Belongs to the thread of the queue.

    Attributes:
      task: full name.
      seed: the seed.
      logdir: folder of the run.
      argv: arguments of the program.
      steps: agent steps at which it ends.
      repeat: frames of an agent step.
      state: 'waiting', 'running', 'done', 'failed' (in each of its attempts), or
        'stopped' (ended before its steps, by its duration or an interrupt).
      attempts: how often it was started.
      step: agent step.
      score: score of the newest episode.
      device: name of the device it runs on.
      begin: time and step of the start.
    """

    task: str
    seed: int
    logdir: Path
    argv: tuple[str, ...]
    steps: int
    repeat: int
    state: str = "waiting"
    attempts: int = 0
    step: int = 0
    score: float | None = None
    device: str = ""
    begin: tuple[float, int] = (0.0, 0)

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.task} seed {self.seed}"

    def is_done(self) -> bool:
        """Returns whether the run has reached its steps in an earlier call."""
        try:
            content = json.loads((self.logdir / DONE).read_text("utf-8"))
            return int(content["step"]) >= self.steps
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def reached(self) -> int:
        """Returns the agent step of its last checkpoint, or of its metrics if later."""
        saved = Checkpoint(self.logdir).last() if self.logdir.is_dir() else None
        step = int(saved.meta.get("step", 0)) if saved else 0
        return max(step, self.logged())

    def logged(self) -> int:
        """Returns the agent step of its newest metrics."""
        return last_step(self.logdir) // self.repeat

    def rate(self, now: float) -> float:
        """Returns agent steps per second since the start, which includes compiling."""
        seconds = now - self.begin[0]
        return (self.step - self.begin[1]) / seconds if seconds > 0 else 0.0


def run_program(argv: Sequence[str], output: str) -> None:
    """Runs the program of one run, in a process of its own.

    Args:
      argv: its arguments.
      output: file to which it appends everything that it prints.
    """
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    from dreamerv3.main import main

    sys.exit(main(argv))


class RunQueue:
    """Runs the runs of a suite, as many at a time as there are slots.

    Processes report their end through `_ended`, a queue that their watchers fill;
    everything else belongs to the thread that calls `work`.

    Args:
      runs: in the order in which they are started.
      slots: where they can run.
      note: is called with a line for every event.
      start: starts the process of a run; replaced in tests. Default: `start_process`.
    """

    def __init__(
        self,
        runs: Sequence[SuiteRun],
        slots: Sequence[Slot],
        note: Callable[[str], None],
        start: Callable[[SuiteRun, Slot], Any] | None = None,
    ):
        self.runs = list(runs)
        self._note = note
        self._start_process = start or start_process
        self._free = list(slots)
        self._last_start: dict[str, float] = {}
        self._running: dict[Any, tuple[SuiteRun, Slot]] = {}
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: collections.deque[SuiteRun] = collections.deque()
        for run in self.runs:
            if run.is_done():
                run.state, run.step = "done", run.steps
            else:
                run.step = min(run.reached(), run.steps)
                self._waiting.append(run)

    def work(self, interrupted: threading.Event, look: Callable[[], None]) -> None:
        """Runs the queue until no run is waiting or running, or until an interrupt.

        Args:
          interrupted: once set, runs save and end; waiting runs stay waiting.
          look: is called about once a second.
        """
        try:
            while (self._waiting or self._running) and not interrupted.is_set():
                self._fill()
                self._update()
                look()
                self._collect(LOOK_SECONDS)
        finally:
            # A second interrupt ends them at once.
            stop(self._running, SAVE_SECONDS)
            for _ in list(self._running):
                self._collect(LOOK_SECONDS, ending=True)
            look()

    def count(self, state: str) -> int:
        """Returns how many runs are in a state."""
        return sum(run.state == state for run in self.runs)

    def seconds_left(self) -> float | None:
        """Estimates the seconds until all runs have ended, from the current rates.

        Returns:
          None while no rate is known.
        """
        now = time.monotonic()
        running = [(run, run.rate(now)) for run, _ in self._running.values()]
        total = sum(rate for _, rate in running)
        if not total:
            return None
        unfinished = [*(run for run, _ in running), *self._waiting]
        steps = sum(max(0, run.steps - run.step) for run in unfinished)
        alone = [(run.steps - run.step) / rate for run, rate in running if rate]
        return max(steps / total, *alone)

    def _fill(self) -> None:
        now = time.monotonic()
        for slot in list(self._free):
            if not self._waiting:
                return
            if now - self._last_start.get(slot.device, -slot.spacing) < slot.spacing:
                continue
            self._free.remove(slot)
            self._last_start[slot.device] = now
            self._start(self._waiting.popleft(), slot)

    def _start(self, run: SuiteRun, slot: Slot) -> None:
        run.logdir.mkdir(parents=True, exist_ok=True)
        (run.logdir / FAILED).unlink(missing_ok=True)
        run.attempts += 1
        run.state, run.device = "running", slot.device
        run.begin = (time.monotonic(), run.step)
        at = f" at step {run.step:,}" if run.step else ""
        self._note(f"{run.name}: begins{at} on {slot.device}.")
        process = self._start_process(run, slot)
        self._running[process] = (run, slot)
        process.on_exit(self._ended.put)

    def _update(self) -> None:
        for run, _ in self._running.values():
            run.step = max(run.step, run.logged())
            run.score = last_score(run.logdir)

    def _collect(self, timeout: float, ending: bool = False) -> None:
        """Waits for a run to end and decides its next state."""
        try:
            process = self._ended.get(timeout=timeout)
        except queue.Empty:
            return
        run, slot = self._running.pop(process)
        self._free.append(slot)
        code = process.exitcode
        seconds = time.monotonic() - run.begin[0]
        run.step = max(run.step, run.reached())
        took = f"step {run.step:,} after {seconds:.0f} s"
        if code == 0 and run.step >= run.steps:
            run.state = "done"
            _write_json(run.logdir, DONE, _ending(run, seconds))
            self._note(f"{run.name}: done, {took}.")
        elif ending or code == 0:
            run.state = "stopped"
            self._note(f"{run.name}: stopped at {took}; the same command continues it.")
        elif run.attempts < ATTEMPTS:
            run.state = "waiting"
            self._waiting.append(run)
            self._note(f"{run.name}: failed with exit code {code}; retrying.")
        else:
            run.state = "failed"
            lines = output_tail(run.logdir)
            ending_json = {**_ending(run, seconds), "exit": code, "output": lines}
            _write_json(run.logdir, FAILED, ending_json)
            last = lines[-1] if lines else f"exit code {code}"
            self._note(f"{run.name}: failed {run.attempts} times, at {took}: {last}")


def start_process(run: SuiteRun, slot: Slot) -> Process:
    """Starts the process of a run, which ends with this one even if it is killed."""
    return Process(
        run_program,
        (*slot.flags, *run.argv),
        str(run.logdir / OUTPUT),
        name=run.name,
        env=slot.environ,
        start=True,
    )


def output_tail(logdir: Path) -> list[str]:
    """Returns the last lines that a run has printed."""
    try:
        text = (logdir / OUTPUT).read_text("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]


def _ending(run: SuiteRun, seconds: float) -> dict[str, Any]:
    return {
        "task": run.task,
        "seed": run.seed,
        "step": run.step,
        "seconds": round(seconds, 1),
        "argv": list(run.argv),
    }


def _write_json(folder: Path, name: str, content: dict[str, Any]) -> None:
    write_file(folder, name, f"{json.dumps(content, indent=1)}\n".encode())
