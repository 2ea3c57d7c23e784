"""Files that show a run while it runs: `live.json` and `events.jsonl`. Any process.

    with record_events(logdir), LiveFile(logdir, collect):
        note_event("save", "Saved step 1000.", step=1000)

`live.json` is replaced every second by the process that logs. `events.jsonl` gets a
line for every event and every warning, from each process of the run whose host has the
logdir. The run depends on neither file: if the disk is full, only lines are lost.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embodied.checkpoint.files import temporary_beside
from embodied.run.console import take_over

LIVE, EVENTS = "live.json", "events.jsonl"  # In the logdir.
LIVE_SECONDS = 1.0
LIVE_SCORES = 50  # Number of newest episodes whose scores are shown.
STEP_SECONDS = 15.0  # Between events of kind STEP.
# Kinds of events, beside `warning` and `fault` for log messages of these levels.
START, END, FAILED = "start", "end", "failed"
SAVE, RESTART, HOST = "save", "restart", "host"
STEP = "step"  # For programs, not for people: which step was reached when.
WARNING, FAULT = "warning", "fault"

MOST_PER_MINUTE = 60  # Warnings of a process, so that a flood does not fill the disk.
TEXT_LENGTH = 500
RATE_SECONDS = 5.0
END_SECONDS = 5.0  # How long to wait for a write at the end; the disk may hang.

_events = logging.getLogger("embodied.events")


def note_event(kind: str, text: str, **facts: Any) -> None:
    """Records an event if `record_events` is active, and drops it otherwise.

    Args:
      kind: one of the kinds above.
      text: a sentence for people.
      facts: plain values, such as the step or the role.
    """
    _events.info("%s", text, extra={"event": {"kind": kind, **facts}})


@contextlib.contextmanager
def record_events(logdir: str | os.PathLike[str]) -> Iterator[None]:
    """Appends events, and warnings of the framework, to the logdir's `events.jsonl`.

    Does nothing if they are recorded already, or if the logdir does not exist, as on a
    host that only steps environments.
    """
    recorded = any(isinstance(handler, _Recorder) for handler in _events.handlers)
    if recorded or not os.path.isdir(logdir):
        yield
        return
    log, recorder = logging.getLogger("embodied"), _Recorder(Path(logdir, EVENTS))
    log.addHandler(recorder)
    try:
        # If events reached the parent logger, they would be printed like messages.
        with take_over(_events, recorder):
            yield
    finally:
        log.removeHandler(recorder)
        recorder.close()


@contextlib.contextmanager
def record_run(logdir: str | os.PathLike[str], script: str) -> Iterator[None]:
    """Records the events of the body, and its beginning and end.

    Args:
      logdir: folder of the run.
      script: what runs, for the text of the first event.
    """
    with record_events(logdir):
        note_event(START, f"{script} begins.", **process_info())
        try:
            yield
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                note_event(END, "The run was interrupted.")
            else:
                note_event(FAILED, f"{type(error).__name__}: {error}")
            raise
        note_event(END, "The run has ended.")


def logged_step(logger: Any) -> int:
    """Returns the step as it is logged: times the environments' action repeat."""
    return int(logger.step) * int(getattr(logger, "multiplier", 1))


def process_info() -> dict[str, Any]:
    """Returns the host and the id of this process."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


class _Recorder(logging.Handler):
    """Appends a JSON line per event or warning.

    Several processes append to one file; every line is one write, so that lines stay
    whole. The lock of the handler guards the counts.
    """

    def __init__(self, path: Path):
        super().__init__(logging.INFO)
        self._path = path
        self._minute = 0.0
        self._warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        facts = getattr(record, "event", None)
        if facts is None:
            if record.levelno < logging.WARNING or self._flooded(record.created):
                return
            facts = {"kind": FAULT if record.levelno >= logging.ERROR else WARNING}
        try:
            line = {"time": record.created, "text": record.getMessage(), **facts}
            append_line(self._path, line)
        except (OSError, ValueError, TypeError):
            pass  # The run does not depend on it.

    def _flooded(self, now: float) -> bool:
        if now - self._minute > 60:
            self._minute, self._warnings = now, 0
        self._warnings += 1
        return self._warnings > MOST_PER_MINUTE


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Appends a JSON object as one line, in a single write."""
    line = {**line, "text": str(line.get("text", ""))[:TEXT_LENGTH]}
    data = json.dumps(plain(line), allow_nan=False) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, data.encode())
    finally:
        os.close(fd)


def plain(value: Any) -> Any:
    """Returns a value that JSON can hold: NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class Rate:
    """Events per second over the last few seconds, from a counter's readings."""

    def __init__(
        self,
        seconds: float = RATE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds = seconds
        self._clock = clock
        self._readings: collections.deque[tuple[float, float]] = collections.deque()

    def __call__(self, count: float) -> float:
        """Adds a reading, and returns the rate."""
        now = self._clock()
        readings = self._readings
        if readings and count < readings[-1][1]:
            readings.clear()  # The run went back to a checkpoint.
        readings.append((now, count))
        while len(readings) > 2 and readings[1][0] <= now - self._seconds:
            readings.popleft()
        (since, first), (until, last) = readings[0], readings[-1]
        return (last - first) / (until - since) if until > since else 0.0


class LiveFile:
    """Replaces `live.json` every second, in a thread, while the body runs.

    Args:
      logdir: folder of the run.
      collect: returns what to write, as plain values. Only the thread calls it; once
        the thread has ended, the caller that leaves the body calls it a last time.
      every: seconds between two writes.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        collect: Callable[[], Mapping[str, Any]],
        every: float = LIVE_SECONDS,
    ):
        self._path = Path(logdir, LIVE)
        self._collect = collect
        self._every = every
        self._stepped = -math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    def __enter__(self) -> LiveFile:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():  # Otherwise the disk hangs.
            self._write("ended")

    def _run(self) -> None:
        self._write("live")
        while not self._stop.wait(self._every):
            self._write("live")

    def _write(self, state: str) -> None:
        # A unique name: after a restart, two processes may write for a moment. If this
        # process is killed meanwhile, the next start removes the file.
        temporary = temporary_beside(self._path)
        try:
            facts = {"time": time.time(), "state": state, **process_info()}
            facts |= self._collect()
            temporary.write_text(json.dumps(plain(facts), allow_nan=False))
            os.replace(temporary, self._path)
            now = time.monotonic()
            if "step" in facts and now >= self._stepped + STEP_SECONDS:
                self._stepped = now
                line = {name: facts[name] for name in ("time", "step")}
                append_line(self._path.with_name(EVENTS), {**line, "kind": STEP})
        except (OSError, ValueError, TypeError):
            with contextlib.suppress(OSError):  # The run does not depend on it.
                temporary.unlink()
