"""The logger role: counts steps, assembles episodes, writes. Logger process."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from embodied.base import Array
from embodied.clock import LocalClock
from embodied.episodes import Episodes
from embodied.logger import StepCount, rewind
from embodied.rpc import Unanswered
from embodied.run.console import show_messages, stop_on_signals
from embodied.run.live import (
    HOST,
    LIVE_SCORES,
    LiveFile,
    Rate,
    logged_step,
    note_event,
    record_events,
)
from embodied.run.metrics import Meter
from embodied.run.parallel import wiring
from embodied.run.parallel.bottleneck import NAMES, UPDATES, find_bottleneck
from embodied.run.parallel.conductor import RoleCheckpoint
from embodied.run.saving import LOGGER
from embodied.run.settings import RunSettings
from embodied.run.usage import Usage

BOTTLENECK = "parallel/bottleneck"
SCORE = "episode/score"
# Metrics of roles whose newest values are shown while they run.
LIVE_METRICS = (
    *("server/", "client/", "usage/", "timer/", "fps/", "parallel/", "replay/"),
)
HOST_SECONDS = 10.0  # Without a report, after which a host counts as gone.
LONGEST_PAUSE = 10.0  # Maximum seconds that a pause of all envs counts.

log = logging.getLogger("embodied.run")


class StepTime:
    """Clock that stands still while no environment makes steps.

    An env that stays away while others step is given up. While the learner compiles,
    or the replay is away, no env can step, and none is given up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._stepped = clock()
        self._seconds = 0.0

    def __call__(self) -> float:
        """Returns the seconds counted up to the last step."""
        return self._seconds

    def step(self) -> None:
        """Records that steps were made."""
        now = self._clock()
        self._seconds += min(now - self._stepped, LONGEST_PAUSE)
        self._stepped = now


class LoggerRole:
    """The logger role without its server. Thread-safe: `_lock` guards all state.

    Args:
      logger: has `add`, `write`, `close` and a counter `step`.
      settings: `episode_timeout`, `log_every`, `actor_threads` and `usage`.
      clock: in seconds.
    """

    def __init__(
        self,
        logger: Any,
        settings: RunSettings,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._logger = logger
        self._count = StepCount(logger.step)
        self._time = StepTime(clock)
        self._episodes = Episodes(timeout=settings.episode_timeout, clock=self._time)
        self._should_write = LocalClock(settings.log_every)
        self._usage = Usage(settings.usage, accelerator=False)
        self._actor_threads = settings.actor_threads
        self._lock = threading.Lock()
        self._counted = threading.Condition(self._lock)
        self._reported: dict[str, float] = {}  # Newest values of NAMES.
        self._told: set[str] = set()  # Bottlenecks that were printed.
        self._meter = Meter()
        self._closed = False
        self._counted_steps = 0  # By this process, for rates.
        self._rate = Rate()
        self._scores: collections.deque[tuple[int, float]] = collections.deque(
            maxlen=LIVE_SCORES
        )
        self._finished = 0
        self._newest: dict[str, float] = {}  # Values of LIVE_METRICS.
        self._reported_at = 0.0
        self._bottleneck = ""
        self._hosts: dict[str, dict[str, Any]] = {}
        self._hops: dict[str, dict[str, Any]] = {}  # By the role that reports.

    def add(self, metrics: dict[str, Any]) -> None:
        """Adds metrics of a role."""
        with self._lock:
            phase = self._reported.get(UPDATES)
            for name, value in metrics.items():
                if name in NAMES:
                    self._reported[name] = float(value)
                if name.startswith(LIVE_METRICS) and not np.ndim(value):
                    self._newest[name] = value
            self._reported_at = time.time()
            self._logger.add(metrics)
            # The first batch and the first update are written at once.
            if self._reported.get(UPDATES) != phase and not phase:
                self._logger.add({BOTTLENECK: find_bottleneck(self._reported)})
                self._logger.write()
            self._write_if_due()

    def tran(self, transitions: dict[str, Any]) -> int:
        """Adds transitions [B, ...] of envs; returns the step.

        Args:
          transitions: reward, is_first, is_last, `log/` keys, `envid`, `is_eval`, and
            `images` [H, W, C] by key of the env `image_envid`, which is filmed.
        """
        batch = dict(transitions)
        envids = np.asarray(batch.pop("envid"))
        is_eval = np.asarray(batch.pop("is_eval"), bool)
        filmed = batch.pop("image_envid", None)
        images: dict[Hashable, dict[str, Array]] = {}
        if filmed is not None:
            images[int(filmed)] = batch.pop("images")
        with self._lock:
            self._time.step()
            steps = int(len(envids) - is_eval.sum())
            self._logger.step.increment(steps)
            self._meter.count("env", steps)
            self._counted_steps += steps
            self._counted.notify_all()
            try:
                episodes = self._episodes.add_batch(batch, envids, is_eval, images)
            except Exception:
                # So that no episode is reported of which steps are missing.
                self._episodes.abandon(envids)
                raise
            for episode in episodes:
                self._logger.add(episode)
                if SCORE in episode:
                    self._finished += 1
                    self._scores.append((logged_step(self._logger), episode[SCORE]))
            self._write_if_due()
            return int(self._logger.step)

    def tell_roles(self, text: str) -> None:
        """Receives the state of a supervisor's roles, every second.

        Args:
          text: JSON: `host`, `pid`, and `roles` by name.
        """
        told = json.loads(text)
        name = f"{told['host']} ({told['pid']})"
        with self._lock:
            if name not in self._hosts:
                note_event(HOST, f"Host {name} connected.", host=name)
            self._hosts[name] = {"time": time.time(), "roles": told["roles"]}

    def tell_hops(self, text: str) -> None:
        """Receives the rates of traffic to and from a role, every second.

        Args:
          text: JSON: `role`, `hops` by name of the connection, and `rates`.
        """
        told = json.loads(text)
        with self._lock:
            self._hops[told["role"]] = {**told, "time": time.time()}

    def live(self) -> dict[str, Any]:
        """Returns state, rates, queues and roles, for `live.json`."""
        now = time.time()
        with self._lock:
            for name, host in list(self._hosts.items()):
                if now - host["time"] > HOST_SECONDS:
                    del self._hosts[name]
                    note_event(HOST, f"Host {name} disconnected.", host=name)
            told = [x for x in self._hops.values() if now - x["time"] <= HOST_SECONDS]
            rates = {"env": self._rate(self._counted_steps)}
            for role in told:
                rates |= role["rates"]
            return {
                "step": logged_step(self._logger),
                "rates": rates,
                "hops": {name: hop for x in told for name, hop in x["hops"].items()},
                "episodes": self._finished,
                "scores": list(self._scores),
                "bottleneck": self._bottleneck,
                "reported": self._reported_at,
                "metrics": {
                    name: value
                    for name, value in self._newest.items()
                    if not isinstance(value, str)
                },
                "hosts": dict(self._hosts),
            }

    def wait_step(self, step: int) -> int:
        """Waits until `step` steps are counted; returns the count.

        Raises:
          Unanswered: the role was closed before.
        """
        with self._counted:
            self._counted.wait_for(
                lambda: self._closed or int(self._logger.step) >= step
            )
            if int(self._logger.step) < step:
                raise Unanswered("The logger is closing.")
            return int(self._logger.step)

    def save(self) -> dict[str, Any]:
        """Writes what was collected, and returns the state."""
        with self._lock:
            self._logger.write()
            return self._count.save()

    def load(self, data: dict[str, Any]) -> None:
        """Continues from a saved state, and removes what was logged after it."""
        with self._lock:
            self._count.load(data)
            rewind(self._logger)

    def release(self) -> None:
        """Ends waits, so that the server can close."""
        with self._lock:
            self._closed = True
            self._counted.notify_all()

    def close(self) -> None:
        """Writes what was collected. Nothing may be added after it."""
        self.release()
        with self._lock:
            self._write()
            self._logger.close()

    def _write_if_due(self) -> None:
        if self._should_write():
            self._write()

    def _write(self) -> None:
        idle, rates = self._meter.idle, self._meter.result()
        if not idle:  # Otherwise every curve would end with zero.
            self._logger.add(rates)
        self._logger.add(self._episodes.result())
        self._logger.add(self._usage.result(), prefix="usage/logger")
        line = find_bottleneck(self._reported, self._actor_threads)
        # Without steps the bottleneck is unknown, but not the phase, such as compiling.
        if self._reported and (":" not in line or not idle):
            self._bottleneck = line
            self._logger.add({BOTTLENECK: line})
            self._tell(line, rates.get("fps/env", 0.0))
        self._logger.write()

    def _tell(self, line: str, rate: float) -> None:
        """Prints the bottleneck; only once where a terminal shows the metrics."""
        role, colon, _ = line.partition(":")
        note = f"Bottleneck: {line}." if colon else f"Now: {line}."
        if not getattr(self._logger, "has_terminal", False):
            log.info("Step %d, %.0f steps/s. %s", int(self._logger.step), rate, note)
        elif colon and role not in self._told:
            log.info("%s", note)
        self._told.add(role)


def parallel_logger(make_logger: Any, args: Any) -> None:
    """Serves the logger until SIGTERM or Ctrl-C.

    Args:
      make_logger: makes the logger; may be cloudpickled.
      args: the `run` block of the configuration and what belongs to it.
    """
    settings = RunSettings.from_args(args)
    wiring.check_addresses(settings, "logger_addr")
    with (
        show_messages(),
        record_events(settings.logdir),
        stop_on_signals() as stop,
    ):
        serve(LoggerRole(wiring.load_factory(make_logger)(), settings), settings, stop)


def serve(role: LoggerRole, settings: RunSettings, stop: threading.Event) -> None:
    """Connects a role and serves it until `stop` is set."""
    checkpoint = RoleCheckpoint(settings)
    parts = checkpoint.load([LOGGER])
    role.load(parts.get(LOGGER, {"step": 0}))
    server = wiring.make_server(
        *("Server", settings.logger_addr, "logger", settings),
        on_failure=lambda error: stop.set(),
    )

    def save(tag: str) -> str:
        state = role.save()
        return checkpoint.write(tag, {LOGGER: state}, {"step": int(state["step"])})

    server.bind("add", role.add, workers=1)
    server.bind("tran", role.tran, workers=1)
    server.bind("wait_step", role.wait_step, workers=1)
    server.bind("save", save, workers=1)
    server.bind("discard", checkpoint.discard)
    server.bind("tell_roles", role.tell_roles)
    server.bind("tell_hops", role.tell_hops)
    every = max(1.0, settings.log_every) if settings.log_every else None
    first = settings.replica == 0  # Its figures stand for the run.
    live = LiveFile(settings.logdir, role.live) if first else contextlib.nullcontext()
    with live, server:
        while not stop.wait(every):
            role.add(wiring.prefixed("server/logger", server.stats()))
        role.release()
    role.close()
