"""The program `--script ray`: trains on the nodes of a cluster. Driver process.

    head     agent, replay, logger; on a node with the run's accelerators
    envs     one bundle of environments each, spread over the nodes

Ray decides where programs run; this process decides which: it starts the head, tells
the env bundles its address, starts lost bundles again, and ends with the exit code of
the head. With several replicas there is a head for each, on nodes of their own: they
start together, and when one is lost, all start again.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import pathlib
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import elements

from dreamerv3.cli.config import ConfigError
from dreamerv3.cli.factories import check_outputs
from dreamerv3.cli.logdir import check_logdir
from dreamerv3.cli.scripts import RunError
from dreamerv3.cluster import ray_session
from dreamerv3.cluster.bundle_actor import (
    THREADS,
    BundleActor,
    Outcome,
    Place,
    run_env_bundle,
    run_head,
)
from dreamerv3.cluster.bundles import (
    Bundle,
    EnvBundle,
    Resources,
    actor_options,
    explain_loss,
    head_names,
    head_resources,
    make_env_bundles,
    show_resources,
)
from dreamerv3.cluster.run_keys import RunKeys, make_keys
from embodied.run.console import SAVING, stop_on_signals
from embodied.run.parallel.replicas import EXIT_START_AGAIN

HEAD_PORTS = ("actor_addr", "logger_addr")  # Served to environments on other nodes.
REPLICA_PORTS = 2  # Served to other heads by the first one: its clock, and JAX.
# Seconds to wait for the lock of a lost head: NFS servers release it after 90.
LOCK_PATIENCE = 120.0
ROOM_SECONDS = 10.0  # Until a message tells that a bundle waits for room.
LEAVE_SECONDS = 15.0  # For env bundles to end after the head.
REASON_SECONDS = 10.0  # For a failed head to report why, after other heads have ended.

log = logging.getLogger("embodied.cluster")


def run_ray(config: elements.Config) -> None:
    """Trains on the nodes of a cluster.

    Raises:
      ConfigError: the cluster or the configuration cannot be used.
      RunError: the run has failed; with the exit code of the head.
    """
    config = ray_session.with_absolute_paths(config)
    check_logdir(config)
    check_outputs(config)
    bundles = make_env_bundles(config)
    logdir = pathlib.Path(config.logdir)
    logdir.mkdir(parents=True, exist_ok=True)
    keys = make_keys(logdir, config.run.keyfile, config.ray.trusted_network, os.environ)
    begin = time.monotonic()
    with ray_session.connect(config, bundles) as ray, keys as found:
        needed = head_resources(config, ray.cluster_resources())
        ray_session.check_nodes(ray, config, found, needed)
        ray_session.check_job_stop(config.run.stop_timeout)
        with stop_on_signals(SAVING) as stop:
            outcome = ClusterRun(ray, config, found, needed, bundles).run(stop)
    if outcome.code:
        reason = "\n".join(outcome.problems) or "The output of the head says why."
        raise RunError(reason, outcome.code)
    log.info("Finished after %.0f s: %s", time.monotonic() - begin, logdir)


class ClusterRun:
    """A run on a cluster, from the start of its head to the end of its bundles.

    The thread that calls `run` does all the work. Ray's threads, and one that waits for
    the stop, only put callbacks for it into `_events`.

    Args:
      ray: the module, connected.
      config: of the run.
      keys: of the run.
      needed: resources of the head.
      bundles: of environments.
    """

    def __init__(
        self,
        ray: Any,
        config: elements.Config,
        keys: RunKeys,
        needed: Resources,
        bundles: list[EnvBundle],
    ):
        self._ray = ray
        self._config = config
        self._keys = keys
        restarts = config.run.restarts
        names = head_names(config)
        self._heads = [Bundle(name, needed, restarts.agent) for name in names]
        self._envs = {
            Bundle(bundle.name, bundle.resources, restarts.env): bundle
            for bundle in bundles
        }
        self._group: Any = None  # Of the heads.
        self._addresses: list[dict[str, str]] = []  # Of the heads that are running.
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._stopping = False
        self._failure: Outcome | None = None  # Of an env bundle that ends the run.
        self._outcome: Outcome | None = None

    def run(self, stop: threading.Event) -> Outcome:
        """Runs until the heads end; `stop` tells them to save and leave."""
        threading.Thread(
            target=self._follow, args=(stop,), name="follow stop", daemon=True
        ).start()
        try:
            self._start_heads()
            while self._outcome is None:
                self._step()
            self._leave()
            return self._outcome
        finally:
            stop.set()  # Ends the thread.
            self._end_actors()

    # The loop.

    def _follow(self, stop: threading.Event) -> None:
        stop.wait()
        self._events.put(self._stop)

    def _step(self, until: float = math.inf) -> bool:
        """Waits for the next event and handles it; False if `until` passes first."""
        due = min((when for when, _ in self._timers), default=math.inf)
        wait = min(due, until) - time.monotonic()
        try:
            # Longer waits than this overflow.
            event = self._events.get(timeout=max(0.0, min(wait, 3600.0)))
        except queue.Empty:
            now = time.monotonic()
            ready = [item for item in self._timers if item[0] <= now]
            self._timers = [item for item in self._timers if item[0] > now]
            for _, action in ready:
                action()
            return now < until
        event()
        return True

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    def _watch(self, ref: Any, bundle: Bundle, handle: Callable[..., None]) -> None:
        """Has the loop call `handle(bundle, result, error)` once an actor answers.

        The answer is dropped if the bundle has another actor by then.
        """
        actor = bundle.actor

        def finish(future: Any) -> None:
            error = future.exception()
            result = None if error else future.result()
            if bundle.actor is actor:
                handle(bundle, result, error)

        def on_done(future: Any) -> None:
            self._events.put(functools.partial(finish, future))

        ref.future().add_done_callback(on_done)

    # Both kinds of bundles.

    def _make_actor(self, bundle: Bundle, strategy: Any) -> Any:
        bundle.actors += 1
        remote = self._ray.remote(BundleActor)
        actor = remote.options(
            **actor_options(bundle.resources),
            scheduling_strategy=strategy,
            max_concurrency=THREADS,
            max_restarts=0,  # Restarts lose the program; the driver makes a new actor.
            # Unique, since a previous actor, or one of another run, may have the name.
            name=f"{bundle.name} {self._keys.digest[:8]} {bundle.actors}",
        ).remote(bundle.name)
        bundle.actor, bundle.place, bundle.running = actor, None, False
        bundle.began = time.monotonic()
        self._after(ROOM_SECONDS, functools.partial(self._log_waiting, bundle, actor))
        return actor

    def _log_waiting(self, bundle: Bundle, actor: Any) -> None:
        """Logs that a bundle has waited for room ever since `actor` was made."""
        if bundle.actor is actor and bundle.place is None and not self._stopping:
            acting = sum(x.envs for b, x in self._envs.items() if b.running)
            total = sum(x.envs for x in self._envs.values())
            log.info(
                "%s: waiting for a node with %s. %d of %d training environments have "
                "one.",
                *(bundle.title, show_resources(bundle.resources), acting, total),
            )

    def _drop_actor(self, bundle: Bundle) -> None:
        """Kills and forgets an actor; one that counts as lost may still be running."""
        if bundle.actor is not None:
            self._ray.kill(bundle.actor)
        bundle.actor, bundle.place, bundle.running = None, None, False

    def _start(
        self, bundle: Bundle, program: Any, host: dict[str, Any], flags: dict[str, Any]
    ) -> None:
        """Starts the program of a bundle that has a place.

        Args:
          bundle: to start.
          program: of the bundle.
          host: keys of the `run` block that hold for this start.
          flags: keys of the configuration that differ between replicas.

        Raises:
          ConfigError: its node cannot get the keys of the run.
        """
        assert bundle.place is not None
        place = bundle.place
        sent = self._keys.for_node(place.sees_keys, str(place), self._config.logdir)
        bundle.number += 1
        bundle.running, bundle.began = True, time.monotonic()
        host = {"keyfile": self._keys.path, **host}
        call = (bundle.number, program, self._config.update(flags), host, sent)
        ref = bundle.actor.run.remote(*call)
        ended = self._env_ended if bundle in self._envs else self._head_ended
        self._watch(ref, bundle, ended)

    def _stop_program(self, bundle: Bundle) -> None:
        if bundle.running:
            bundle.told = bundle.number
            bundle.actor.stop.remote(bundle.number)

    # Heads.

    def _start_heads(self) -> None:
        """Requests the nodes of all heads, which Ray grants together."""
        if self._stopping:
            return
        util = self._ray.util
        self._group = util.placement_group(
            [head.resources for head in self._heads], strategy="STRICT_SPREAD"
        )
        make = util.scheduling_strategies.PlacementGroupSchedulingStrategy
        ports = len(HEAD_PORTS) + REPLICA_PORTS
        for index, head in enumerate(self._heads):
            strategy = make(
                placement_group=self._group, placement_group_bundle_index=index
            )
            actor = self._make_actor(head, strategy)
            ref = actor.place.remote(self._keys.path, self._keys.digest, ports)
            self._watch(ref, head, self._head_placed)

    def _head_placed(self, head: Bundle, place: Place, error: Any) -> None:
        if error is not None:
            self._head_lost(head, error)
            return
        if self._stopping:
            return
        head.place = place
        again, alone = head.number > 0, len(self._heads) == 1
        if not place.sees_keys and (again or not alone):
            go_on = "go on" if again else "train with the others"
            self._finish(
                1,
                f"The {head.name} cannot {go_on} at {place}, which does not see "
                f"{self._config.logdir}. Start the run again where its logdir is.",
            )
            return
        checkpoint = ", from the newest checkpoint" * again
        log.info("%s: on %s%s.", head.title, place, checkpoint)
        if all(head.place is not None for head in self._heads):
            self._run_heads()

    def _run_heads(self) -> None:
        """Starts the programs of all heads and of the env bundles."""
        places = [head.place for head in self._heads if head.place is not None]
        self._addresses = [
            {key: place.at(port) for key, port in zip(HEAD_PORTS, place.ports)}
            for place in places
        ]
        try:
            for index, head in enumerate(self._heads):
                patience = LOCK_PATIENCE if head.number else 0.0
                program = functools.partial(run_head, patience=patience)
                host = {"remote_envs": True, **self._addresses[index]}
                self._start(head, program, host, self._replica(index, places[0]))
        except ConfigError as error:
            self._finish(2, str(error))
            return
        for bundle in self._envs:
            if bundle.actor is None:
                self._start_envs(bundle)
            elif bundle.place is not None and not bundle.running:
                self._run_envs(bundle)

    def _replica(self, index: int, first: Place) -> dict[str, Any]:
        """Returns the flags by which a head finds the others.

        Args:
          index: of the replica.
          first: place of the first head.
        """
        if len(self._heads) == 1:
            return {}
        clock, coordinator = first.ports[len(HEAD_PORTS) :]
        return {
            "replica": index,
            "clock_addr": first.at(),
            "clock_port": str(clock),
            "jax.coordinator_address": first.at(coordinator),
        }

    def _head_ended(self, head: Bundle, outcome: Outcome, error: Any) -> None:
        head.running = False
        if error is not None:
            self._head_lost(head, error)
        elif outcome.code == 0 or (self._stopping and outcome.code == -signal.SIGTERM):
            # The latter was stopped before it had begun: there was nothing to save.
            self._end_without_heads()
        elif outcome.code < 0:
            reason = f"its program was killed by signal {-outcome.code}"
            self._head_lost(head, reason)
        elif outcome.code == EXIT_START_AGAIN:
            # Another head is gone, or has failed and is about to report why.
            actor, reason = head.actor, " ".join(outcome.problems)
            again = functools.partial(self._left_by_others, head, actor, reason)
            self._after(REASON_SECONDS, again)
        else:
            self._outcome = outcome

    def _left_by_others(self, head: Bundle, actor: Any, reason: str) -> None:
        if head.actor is actor:
            self._head_lost(head, reason)

    def _head_lost(self, head: Bundle, reason: Any) -> None:
        """Starts all heads again, on any nodes that have room for them."""
        self._addresses = []
        self._drop_heads()
        for bundle in self._envs:
            self._stop_program(bundle)
        if self._stopping:
            self._finish(
                1,
                f"The {head.name} was lost before it was saved "
                f"({explain_loss(reason)}). The previous checkpoint is still valid.",
            )
            return
        delay = head.delay()
        if delay is None:
            text = explain_loss(reason)
            self._finish(1, f"{head.limit_message('run.restarts.agent')} Last: {text}.")
            return
        what = "It is" if len(self._heads) == 1 else "All heads are"
        log.warning(
            "%s: lost (%s). %s started again.", head.title, explain_loss(reason), what
        )
        self._after(delay, self._start_heads)

    def _drop_heads(self) -> None:
        for head in self._heads:
            self._drop_actor(head)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None

    # Env bundles.

    def _start_envs(self, bundle: Bundle) -> None:
        """Requests an actor, which Ray makes as soon as there is room for it."""
        if self._stopping or bundle.actor is not None:
            return
        actor = self._make_actor(bundle, "SPREAD")
        ref = actor.place.remote(self._keys.path, self._keys.digest)
        self._watch(ref, bundle, self._envs_placed)

    def _envs_placed(self, bundle: Bundle, place: Place, error: Any) -> None:
        if error is not None:
            self._envs_lost(bundle, error)
            return
        bundle.place = place
        log.info("%s: on %s.", bundle.title, place)
        self._run_envs(bundle)

    def _run_envs(self, bundle: Bundle) -> None:
        ready = bundle.place is not None and not bundle.running
        if ready and self._addresses and not self._stopping:
            envs = self._envs[bundle]
            host = {**envs.host, **self._addresses[envs.replica]}
            try:
                self._start(bundle, run_env_bundle, host, {"replica": envs.replica})
            except ConfigError as error:
                self._give_up(Outcome(2, error.problems))

    def _env_ended(self, bundle: Bundle, outcome: Outcome, error: Any) -> None:
        bundle.running = False
        if error is not None:
            self._envs_lost(bundle, error)
        elif bundle.told == bundle.number:
            # If there is a new head by now; otherwise `_run_heads` does so later.
            self._run_envs(bundle)
        elif outcome.code == 0:
            # The bundle has heard that the run is over; this process is about to.
            self._after(ROOM_SECONDS, functools.partial(self._run_envs, bundle))
        else:
            self._envs_failed(bundle, outcome)

    def _envs_lost(self, bundle: Bundle, reason: Any) -> None:
        self._drop_actor(bundle)
        if self._stopping:
            return
        delay = bundle.delay()
        text = explain_loss(reason)
        if delay is None:
            self._give_up(Outcome(1, (bundle.limit_message("run.restarts.env"), text)))
            return
        log.warning(
            "%s: lost (%s). They restart on any node with room; the run continues "
            "without them.",
            *(bundle.title, text),
        )
        self._after(delay, functools.partial(self._start_envs, bundle))

    def _envs_failed(self, bundle: Bundle, outcome: Outcome) -> None:
        delay = bundle.delay()
        if delay is None:
            why = bundle.limit_message("run.restarts.env")
            self._give_up(Outcome(outcome.code, (why, *outcome.problems)))
            return
        why = " ".join(outcome.problems) or f"exit code {outcome.code}"
        log.warning("%s: started again, after: %s", bundle.title, why)
        self._after(delay, functools.partial(self._run_envs, bundle))

    def _give_up(self, failure: Outcome) -> None:
        """Saves and ends the run because environments cannot be stepped."""
        log.warning("%s Saving, then stopping ...", failure.problems[0])
        self._failure = failure
        self._stop()

    # The end.

    def _stop(self) -> None:
        """Tells the heads to save and leave."""
        if self._stopping or self._outcome is not None:
            return
        self._stopping = True
        for head in self._heads:
            self._stop_program(head)
        self._end_without_heads()

    def _end_without_heads(self) -> None:
        """Ends the run, unless there is a head that runs."""
        if not any(head.running for head in self._heads):
            self._outcome = self._failure or Outcome(0)

    def _finish(self, code: int, problem: str) -> None:
        self._outcome = self._failure or Outcome(code, (problem,))

    def _leave(self) -> None:
        """Tells the programs of env bundles to end, and gives them some seconds."""
        self._stopping = True
        for bundle in self._envs:
            self._stop_program(bundle)
        deadline = time.monotonic() + LEAVE_SECONDS
        while any(bundle.running for bundle in self._envs):
            if not self._step(deadline):
                names = [bundle.name for bundle in self._envs if bundle.running]
                log.warning("Killed, since they did not end: %s.", ", ".join(names))
                return

    def _end_actors(self) -> None:
        for bundle in self._envs:
            self._drop_actor(bundle)
        self._drop_heads()
