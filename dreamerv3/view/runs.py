"""Finds the runs below given folders and reads their state. The view's server.

Files are only read, never written or locked, and only files with the names that runs
give them are opened. Requests name a run by a hash of its path, never by the path
itself, so that they cannot ask for another file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamerv3.cli.config import (
    FILENAME,
    ConfigError,
    action_repeat,
    flatten,
    read_blocks,
    read_config,
)
from dreamerv3.cli.logdir import LOCK
from dreamerv3.suite.curves import METRICS, SCORE, SCORES, model_size
from dreamerv3.suite.presets import find_published
from dreamerv3.view.series import LINE, MetricFile, parse_lines, sample_file
from dreamerv3.view.videos import Videos
from embodied.run.live import END, EVENTS, FAILED, LIVE, START, STEP

RUN_FILES = (FILENAME, METRICS, SCORES, LIVE)  # One of them makes a folder a run.
DEPTH = 5  # Folders below those given in which runs are looked for.
MOST_RUNS = 2000
MOST_OPEN = 32  # Runs whose curves and events are kept in memory,
MOST_POINTS = 4_000_000  # with so many values altogether.
SKIPPED = {"ckpt", "replay", "replay_eval", "replicas"}  # Folders of a run itself.
SCAN_SECONDS = 3.0
LIVE_SECONDS = 10.0  # Age of live.json from which on a run no longer counts as live.
OLD_LIVE_SECONDS = 600.0  # The same for the metrics of a run without live.json.
CURVE_POINTS = 60
EVENT_BYTES = 1 << 22  # Of events.jsonl, from its end.
LIVE_BYTES = 1 << 22
SHOWN_EVENTS = 1000
ALL_FILES = (LIVE, EVENTS, METRICS, SCORES, FILENAME)
# Methods whose values are kept for the list of runs.
SUMMARY_METHODS = {"live", "_marks", "head", "summary"}
# Keys in which runs of one setting may differ.
OWN_KEYS = ("logdir", "seed", "replica", "method")


class Runs:
    """All runs below some folders, which are scanned every few seconds. Any thread.

    Args:
      folders: runs, or folders of runs.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]]):
        self.folders = [Path(folder).resolve() for folder in folders]
        self._lock = threading.Lock()  # Guards the fields below.
        self._runs: dict[str, RunFolder] = {}
        self._opened: dict[str, RunFolder] = {}  # The least recently used first.
        self._scanned = 0.0

    def all(self) -> list[RunFolder]:
        """Returns the runs that exist now, sorted by name."""
        with self._lock:
            if time.monotonic() - self._scanned > SCAN_SECONDS or not self._scanned:
                self._scan()
                self._scanned = time.monotonic()
            return sorted(self._runs.values(), key=lambda run: run.name)

    def get(self, identity: str) -> RunFolder | None:
        """Returns a run by its identity, to read its curves and events.

        If too much is in memory, the least recently used runs free theirs.
        """
        self.all()
        with self._lock:
            run = self._runs.get(identity)
            if run is not None:
                self._opened.pop(identity, None)
                self._opened[identity] = run
                self._forget()
            return run

    def _forget(self) -> None:
        points = sum(run.points for run in self._opened.values())
        for identity, run in list(self._opened.items())[:-1]:
            if points <= MOST_POINTS and len(self._opened) <= MOST_OPEN:
                break
            points -= run.points
            del self._opened[identity]
            run.forget()

    def _scan(self) -> None:
        found: dict[str, RunFolder] = {}
        for root in self.folders:
            for path in _find(root):
                name = str(path.relative_to(root)) if path != root else root.name
                if len(self.folders) > 1 and path != root:
                    name = f"{root.name}/{name}"
                identity = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
                found[identity] = self._runs.get(identity) or RunFolder(
                    path, name, identity
                )
        self._runs = found


def _find(root: Path) -> list[Path]:
    """Returns the folders of runs below a folder, without following links."""
    found: list[Path] = []
    for name, below, files in os.walk(root):
        folder = Path(name)
        if not {*below, *files}.isdisjoint(RUN_FILES):
            found.append(folder)
        if len(found) == MOST_RUNS:
            break
        if len(folder.relative_to(root).parts) == DEPTH:
            below.clear()
        below[:] = [x for x in below if x not in SKIPPED and not x.startswith(".")]
    return found


def _cached(*names: str, seconds: float = math.inf) -> Callable[[Any], Any]:
    """Keeps what a method of a run returns, until one of these files changes.

    Args:
      names: of the files, on which the value depends.
      seconds: after which it is read again anyway.
    """

    def decorate(read: Any) -> Any:
        @functools.wraps(read)
        def cached(run: RunFolder) -> Any:
            stamp = (run.stamp(names), time.time() // seconds)
            with run.lock:
                found = run.cache.get(read.__name__)
            if found is not None and found[0] == stamp:
                return found[1]
            value = read(run)
            with run.lock:
                run.cache[read.__name__] = (stamp, value)
            return value

        return cached

    return decorate


class RunFolder:
    """One run, whose files are read again when they have changed. Any thread.

    Args:
      path: the logdir.
      name: for people.
      identity: for addresses.
    """

    def __init__(self, path: Path, name: str, identity: str):
        self.path = path
        self.name = name
        self.identity = identity
        self.metrics = MetricFile(path / METRICS)
        self.scores = MetricFile(path / SCORES)
        self.videos = Videos(path)
        self.lock = threading.Lock()  # Guards the cache.
        self.cache: dict[str, tuple[Any, Any]] = {}  # Stamp and value, by method.

    @property
    def points(self) -> int:
        """Values of curves in memory."""
        return self.metrics.points + self.scores.points

    def forget(self) -> None:
        """Frees what is not needed in the list of runs."""
        self.metrics.forget()
        self.scores.forget()
        self.videos = Videos(self.path)
        with self.lock:
            for name in set(self.cache) - SUMMARY_METHODS:
                del self.cache[name]

    def stamp(self, names: Sequence[str] = ALL_FILES) -> tuple[Any, ...]:
        """Returns a value that changes whenever one of these files changes."""
        return tuple(_stamp(self.path / name) for name in names)

    @_cached(LIVE)
    def live(self) -> dict[str, Any]:
        """Returns the content of `live.json`; empty if there is none."""
        found = _read_json(self.path / LIVE)
        return _checked_live(found) if isinstance(found, dict) else {}

    @_cached(EVENTS)
    def events(self) -> list[dict[str, Any]]:
        """Returns the newest events, the oldest of them first."""
        rows = [row for row in self._event_lines() if row.get("kind") != STEP]
        return rows[-SHOWN_EVENTS:]

    @_cached(FILENAME)
    def head(self) -> dict[str, Any]:
        """Returns task, seed and setting, without reading the whole configuration."""
        try:
            text = (self.path / FILENAME).read_text("utf-8", errors="replace")
        except OSError:
            return {"task": "", "seed": "", "steps": 0.0, "setting": self.identity}
        lines = text.splitlines()
        own = re.compile(rf"({'|'.join(OWN_KEYS)}):")
        setting = "\n".join(line for line in lines if not own.match(line))
        steps = re.search(r"^run:\n(?:  .*\n)*?  steps: (\S+)", text, re.MULTILINE)
        return {
            "task": _top_key(text, "task"),
            "seed": _top_key(text, "seed"),
            "steps": _number(steps.group(1) if steps else 0),
            "setting": hashlib.sha256(setting.encode()).hexdigest()[:12],
        }

    def state(self) -> str:
        """Returns live, stalled, ended or failed."""
        live, now = self.live(), time.time()
        last = self._marks()["last"]
        if last.get("kind") == FAILED:
            return "failed"
        if live:
            age = now - _number(live.get("time"))
            if last.get("kind") == END or live.get("state") == "ended":
                # A logger that is being restarted writes again soon.
                return "ended" if last.get("kind") == END or age > 60 else "live"
            if age < LIVE_SECONDS:
                return "live"
            started = last if last.get("pid") else live
            return "stalled" if _alive(started) else "failed"
        written = max(_mtime(self.path / METRICS), _mtime(self.path / SCORES))
        if now - written < OLD_LIVE_SECONDS and self._holder_lives():
            return "live"
        return "ended"

    @_cached(*ALL_FILES, seconds=LIVE_SECONDS)
    def summary(self) -> dict[str, Any]:
        """Returns what the list of runs shows. Quick, however long the run is."""
        head, latest = self.head(), self.latest()
        begin = self._marks()["begin"] or _mtime(self.path / FILENAME)
        newest = max(_mtime(self.path / x) for x in (LIVE, METRICS, SCORES))
        curve = sample_file(self.path / SCORES, SCORE, CURVE_POINTS)
        return {
            "id": self.identity,
            "name": self.name,
            **head,
            "state": self.state(),
            "step": self.step(),
            "seconds": max(0.0, newest - begin) if begin and newest else 0.0,
            "changed": newest,
            "score": latest["score"] if latest else None,
            "curve": curve,
            "rate": self.live().get("rates", {}).get("env", 0.0),
        }

    def step(self) -> float:
        """Returns the newest step, as it is logged."""
        live = _number(self.live().get("step"))
        tail = sample_file(self.path / SCORES, SCORE, 1)
        return max(live, tail[-1][0] if tail else 0.0)

    @_cached(EVENTS)
    def times(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and the time at which they were reached, [N] float64 each."""
        ticks = [
            (row["step"], row["time"])
            for row in self._event_lines()
            if row.get("kind") == STEP and isinstance(row.get("step"), int | float)
        ]
        points = np.array(ticks, np.float64).reshape(-1, 2)
        # Without those that a later start from a checkpoint has undone.
        earliest = np.minimum.accumulate(points[::-1, 0])[::-1]
        kept = points[:, 0] < np.append(earliest[1:], np.inf)
        return points[kept, 0], points[kept, 1]

    @_cached(FILENAME)
    def configuration(self) -> dict[str, Any]:
        """Returns all values, those that differ from defaults, and the model's size."""
        values = self._values()
        if isinstance(values, str):
            return {"error": values, "values": {}, "changed": {}}
        defaults = _defaults()
        changed = {
            key: [_shown(defaults.get(key)), _shown(value)]
            for key, value in values.items()
            if _shown(defaults.get(key)) != _shown(value)
        }
        shown = {key: _shown(value) for key, value in values.items()}
        return {"values": shown, "changed": changed, "size": model_size(values)}

    @_cached(FILENAME)
    def published(self) -> dict[str, Any] | None:
        """Returns the published curve of the task, over steps as they are logged."""
        config = self._values()
        if isinstance(config, str):
            return None
        repeat = action_repeat(config)
        found = find_published(config, config["task"])
        if found is None:
            return None
        return {
            "steps": (np.asarray(found.steps) * repeat).tolist(),
            "mean": np.asarray(found.mean).tolist(),
            "low": np.asarray(found.seeds).min(0).tolist(),
            "high": np.asarray(found.seeds).max(0).tolist(),
        }

    def latest(self) -> dict[str, Any] | None:
        """Returns step and score of the newest episode that is known."""
        points: list[Any] = list(self.live().get("scores", ()))
        if not points:
            points = list(sample_file(self.path / SCORES, SCORE, 1))
        if not points:
            return None
        step, score = points[-1]
        return {"step": step, "score": score}

    def _event_lines(self) -> list[dict[str, Any]]:
        try:
            with (self.path / EVENTS).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - EVENT_BYTES))
                rows = parse_lines(file.read())
        except OSError:
            return []
        return [row for row in rows if isinstance(row.get("time"), int | float)]

    @_cached(EVENTS)
    def _marks(self) -> dict[str, Any]:
        """Returns when the run began, and the last of its starts and ends."""
        rows = self._event_lines()
        marks = [row for row in rows if row.get("kind") in (START, END, FAILED)]
        first = parse_lines(_read_bytes(self.path / EVENTS, LINE).partition(b"\n")[0])
        begin = _number(first[0].get("time")) if first else 0.0
        return {"begin": begin, "last": marks[-1] if marks else {}}

    @_cached(FILENAME)
    def _values(self) -> dict[str, Any] | str:
        """Returns all values, with defaults for missing ones, or an error's text."""
        try:
            found = read_config(self.path / FILENAME).flat
        except ConfigError as error:
            return " ".join(str(error).split())
        return {**_defaults(), **found}

    def _holder_lives(self) -> bool:
        """Returns whether the process that the logdir's lock names is running."""
        text = _read_text(self.path / LOCK)
        match = re.fullmatch(r"process (\d+) of (\S+)", text.strip())
        if not match:
            return False
        return _alive({"pid": int(match.group(1)), "host": match.group(2)})


@functools.cache
def _defaults() -> dict[str, Any]:
    return flatten(read_blocks()["defaults"])


def _checked_live(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a `live.json` with every value in its expected type."""

    def part(name: str, kind: Any) -> Any:
        value = found.get(name)
        return value if isinstance(value, kind) else kind()

    def numbers(value: Any) -> dict[str, float]:
        given = value if isinstance(value, dict) else {}
        return {k: v for k, v in given.items() if isinstance(v, int | float)}

    return {
        **{k: _number(found.get(k)) for k in ("time", "step", "episodes", "reported")},
        **{k: str(found.get(k) or "") for k in ("state", "host", "bottleneck")},
        "pid": part("pid", int),
        "rates": numbers(found.get("rates")),
        "metrics": numbers(found.get("metrics")),
        "hops": {name: numbers(hop) for name, hop in part("hops", dict).items()},
        "scores": [
            point
            for point in part("scores", list)
            if isinstance(point, list)
            and len(point) == 2
            and all(isinstance(value, int | float) for value in point)
        ],
        "hosts": {
            name: {"roles": dict(host["roles"])}
            for name, host in part("hosts", dict).items()
            if isinstance(host, dict)
            and isinstance(host.get("roles"), dict)
            and all(isinstance(told, dict) for told in host["roles"].values())
        },
    }


def _alive(started: dict[str, Any]) -> bool:
    """Returns whether a process is running; one of another host counts as running."""
    pid = started.get("pid")
    if started.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    return pid > 0 and os.path.exists(f"/proc/{pid}")


def _stamp(path: Path) -> Any:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_bytes(path: Path, most: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(most)
    return b""


def _read_text(path: Path) -> str:
    return _read_bytes(path, LIVE_BYTES).decode(errors="replace")


def _read_json(path: Path) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(_read_text(path))
    return None


def _top_key(text: str, key: str) -> str:
    match = re.search(rf"^{key}: (.*)$", text, re.MULTILINE)
    return match.group(1).strip().strip("'\"") if match else ""


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return number if math.isfinite(number) else 0.0


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(list(value) if isinstance(value, tuple) else value)
