"""The actor: runs the policy for all env workers. Agent process, its own threads.

The server's threads batch calls and run `Actor.act`; after the reply another thread
runs `Actor.publish`, in the order of the batches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from embodied.base import Agent, Array
from embodied.envs.keys import SIGNALS
from embodied.episodes import CHANNELS
from embodied.replay import ReplayMemoryError
from embodied.rpc import Disconnected, RemoteError, Unanswered
from embodied.run.parallel import wiring
from embodied.run.parallel.carries import Slots, make_table
from embodied.run.parallel.observations import ObservationCheck
from embodied.run.parallel.owners import Owners, tell_absences
from embodied.run.parallel.rendezvous import Rendezvous
from embodied.run.parallel.reports import report_role
from embodied.run.settings import RunSettings

INFLIGHT = 4  # Batches that may wait for the replay, or the logger, to take them.
GOODBYE_SECONDS = 3.0  # For workers to learn that the run is over.

logger = logging.getLogger("embodied.run")


class RunOver(RuntimeError):
    """Answer to workers that ask for actions after the end of the run."""


class Transitions(NamedTuple):
    """A batch [B, ...] on its way to replay and logger."""

    envid: np.ndarray
    is_eval: np.ndarray
    stored: dict[str, Array]  # Observations, actions and outputs.
    is_first: np.ndarray  # As the env sent it.
    logs: dict[str, Array]

    def take(self, rows: np.ndarray) -> Transitions:
        """Returns the rows that a mask selects."""
        return Transitions(
            self.envid[rows],
            self.is_eval[rows],
            {key: np.asarray(value)[rows] for key, value in self.stored.items()},
            self.is_first[rows],
            {key: np.asarray(value)[rows] for key, value in self.logs.items()},
        )


class Actor:
    """The actor without its server.

    `act` may be called from several threads, each with different envs; `publish` is
    called from one, and `stats` from another.

    Args:
      agent: has the policy.
      replay: client of the replay: `add_batch`.
      logger: client of the logger: `tran`.
      envs: number of envs that are expected.
      server_stats: returns the statistics of the server.
      on_fatal: called with an error that is not a worker's fault.
      progress: called after every batch.
    """

    def __init__(
        self,
        agent: Agent,
        replay: Any,
        logger: Any,
        envs: int,
        server_stats: Callable[[], dict[str, float]] = dict,
        on_fatal: Callable[[Exception], None] = lambda error: None,
        progress: Callable[[], None] = lambda: None,
    ):
        self.over = False  # Once set, calls of workers raise RunOver.
        self.closing = threading.Event()  # Once set, connections may be closed.
        self.asked = threading.Event()  # Set when the first worker asks for actions.
        # Whether an env belongs to a worker that begins new episodes when told to.
        self.owns: Callable[[int], bool] = lambda envid: False
        self._agent = agent
        self._replay = replay
        self._logger = logger
        self._check = ObservationCheck(agent)
        self._table = make_table(agent)
        self._slots = Slots(self._table, envs)
        self._server_stats = server_stats
        self._on_fatal = on_fatal
        self._progress = progress
        self._stored = wiring.PendingCalls(self._not_stored)
        self._published = 0  # Batches. Like `_broken`, owned by the publishing thread.
        self._broken: dict[int, int] = {}  # By env, the last batch before a new stream.
        self._logged = wiring.PendingCalls(self._not_logged)
        self._busy = wiring.TimeShare()
        self._blocked = wiring.TimeShare()
        self._lock = threading.Lock()  # Guards what is below.
        self.steps = 0  # Published so far.
        self._logged_steps = 0
        self._since = time.monotonic()
        self._recorded: dict[bool, int] = {}  # Env that is filmed, by `is_eval`.

    def act(self, obs: dict[str, Array]) -> tuple[dict[str, Array], Transitions]:
        """Chooses actions for a batch of envs, either all for training or all for eval.

        Args:
          obs: observations [B, ...] with `envid` and `is_eval`.

        Returns:
          The actions with `reset`, and the transitions to publish.

        Raises:
          RunOver: the run is over.
          ObservationError: the worker is at fault, and receives the error.
          Unanswered: the agent is at fault, which is fatal.
        """
        if self.over:
            raise RunOver("The run is over.")
        if not self.asked.is_set():
            self.asked.set()
        self._check.check(obs)
        logs = {key: value for key, value in obs.items() if key.startswith("log/")}
        seen = {key: value for key, value in obs.items() if key not in logs}
        envids, is_eval = seen.pop("envid"), seen.pop("is_eval")
        is_first = seen["is_first"]
        try:
            with self._busy:
                actions, outputs, new = self._policy(seen, envids, bool(is_eval[0]))
        except Exception as error:
            self._on_fatal(error)
            # Workers get no answer, and wait for an agent that may be restarted.
            raise Unanswered("The policy has failed.") from error
        self._check.accepted(obs)
        # The earlier steps of a new env are not known here, so what is stored begins a
        # new episode. In the middle of an episode, the worker is told to begin one.
        lost = new & ~is_first
        if lost.any():
            lost &= [self.owns(envid) for envid in envids.tolist()]
        reply = {**actions, "reset": seen["is_last"] | lost}
        stored = {**seen, "is_first": is_first | new, **actions, **outputs}
        self._progress()
        transitions = Transitions(envids, is_eval, stored, is_first, logs)
        return reply, transitions.take(~lost) if lost.any() else transitions

    def publish(self, transitions: Transitions) -> None:
        """Sends a batch to the replay and to the logger; waits while they are full.

        Batches that cannot be sent any more at the end of the run are dropped.
        """
        if not len(transitions.envid):
            return
        try:
            self._publish(transitions)
        except Disconnected:
            if not (self.over or self.closing.is_set()):
                raise

    def free(self, envids: list[int]) -> None:
        """Forgets the carries of envs, since another worker steps them now."""
        self._slots.free(envids)

    def leave(self, envids: list[int]) -> None:
        """Marks envs as away; they may come back."""
        self._slots.leave(envids)
        with self._lock:
            for is_eval, envid in list(self._recorded.items()):
                if envid in envids:
                    del self._recorded[is_eval]

    def stats(self) -> dict[str, float]:
        """Returns rates and shares of time since the last call."""
        now = time.monotonic()
        with self._lock:
            steps = self.steps - self._logged_steps
            self._logged_steps = self.steps
            elapsed, self._since = now - self._since, now
        return {
            # Left out without steps, so that its curve does not end with zero.
            **({"fps/policy": steps / elapsed} if steps and elapsed > 0 else {}),
            "parallel/envs": len(self._slots),
            "timer/actor/policy": self._busy.share(),
            "timer/actor/held_back": self._blocked.share(),
            "parallel/policy_on_cpu": getattr(self._agent, "platform", "") == "cpu",
            **wiring.prefixed("server/actor", self._server_stats()),
            **wiring.prefixed("client/actor_replay", self._replay.stats()),
            **wiring.prefixed("client/actor_logger", self._logger.stats()),
        }

    def _publish(self, transitions: Transitions) -> None:
        envids, is_eval = transitions.envid, transitions.is_eval
        marks = {"envid": envids, "is_eval": is_eval}
        with self._blocked:
            future = self._replay.add_batch({**transitions.stored, **marks})
        self._published += 1
        self._stored.add(future, (envids.tolist(), self._published))
        message = {
            **{key: transitions.stored[key] for key in SIGNALS},
            "is_first": transitions.is_first,
            **transitions.logs,
            **marks,
            **self._film(transitions),
        }
        self._logged.add(self._logger.tran(message))
        with self._lock:
            self.steps += len(envids)

    def _policy(
        self, obs: dict[str, Array], envids: np.ndarray, is_eval: bool
    ) -> tuple[dict[str, Array], dict[str, Array], np.ndarray]:
        mode = "eval" if is_eval else "train"
        ids = envids.tolist()
        if len(set(ids)) < len(ids):
            return self._one_by_one(obs, envids, is_eval)
        slots, new = self._slots.find(ids)
        try:
            obs = {**obs, "is_first": obs["is_first"] | new}
            return *self._table.policy_table(slots, obs, mode, envids), new
        finally:
            self._slots.done(slots)

    def _one_by_one(
        self, obs: dict[str, Array], envids: np.ndarray, is_eval: bool
    ) -> tuple[dict[str, Array], dict[str, Array], np.ndarray]:
        """Steps rows separately if workers step the same env, to protect the others.

        `Owners` prevents this for workers that name their envs, but other clients need
        not do so. Of an env that occurs twice, no step continues another.
        """
        different, counts = np.unique(envids, return_counts=True)
        doubled = different[counts > 1].tolist()
        parts = []
        for row in range(len(envids)):
            self._slots.free(doubled)
            one = {key: value[row : row + 1] for key, value in obs.items()}
            parts.append(self._policy(one, envids[row : row + 1], is_eval))
        self._slots.free(doubled)
        actions, outputs = (
            {key: np.concatenate([part[i][key] for part in parts]) for key in dicts}
            for i, dicts in enumerate(parts[0][:2])
        )
        return actions, outputs, np.concatenate([part[2] for part in parts])

    def _film(self, transitions: Transitions) -> dict[str, Any]:
        """Returns the images of the env that is being filmed."""
        is_eval = bool(transitions.is_eval[0])
        lowest = int(transitions.envid.min())
        with self._lock:
            filmed = self._recorded.setdefault(is_eval, lowest)
            if lowest < filmed:
                filmed = self._recorded[is_eval] = lowest
        (rows,) = np.nonzero(transitions.envid == filmed)
        if not len(rows):
            return {}
        images = {
            key: np.asarray(value)[rows[-1]]
            for key, value in transitions.stored.items()
            if value.dtype == np.uint8
            and value.ndim == 4
            and value.shape[-1] in CHANNELS
        }
        if not images:
            return {}
        return {"images": images, "image_envid": filmed}

    def _not_stored(self, batch: tuple[list[int], int], error: Exception) -> None:
        if isinstance(error, RemoteError) and error.type == ReplayMemoryError.__name__:
            self._on_fatal(ReplayMemoryError(error.message))  # Later batches fail, too.
            return
        logger.warning("The replay did not store a batch: %s", error)
        envids, number = batch
        # The next steps are not consecutive. Begin new streams, but only once for all
        # batches that were on their way.
        envids = [x for x in envids if self._broken.get(x, 0) < number]
        self._broken.update(dict.fromkeys(envids, self._published))
        self._slots.free(envids)

    def _not_logged(self, _: Any, error: Exception) -> None:
        logger.warning("The logger did not count a batch: %s", error)


def parallel_actor(
    agent: Agent,
    barrier: threading.Barrier,
    args: Any,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Serves `act` until the run is over.

    Args:
      agent: shared with the learner.
      barrier: of two; see `Rendezvous`. Nothing is collected before the learner has
        restored the agent.
      args: the `run` block of the configuration and what belongs to it.
      progress: called after every batch.
    """
    settings = RunSettings.from_args(args)
    wiring.check_addresses(settings, "actor_addr", "replay_addr", "logger_addr")
    with Rendezvous(barrier, "actor", "learner") as rendezvous:
        if rendezvous.meet():
            run_actor(agent, rendezvous, settings, progress)


def run_actor(
    agent: Agent,
    rendezvous: Rendezvous,
    settings: RunSettings,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Serves until the learner is done, or has failed."""
    batch = settings.policy_batch
    envs = settings.envs + settings.eval_envs
    server = wiring.make_server(
        *("BatchServer", settings.actor_addr, "actor", settings),
        on_failure=rendezvous.fail,
    )
    clients = [
        wiring.make_client(address, f"actor-{name}", settings, maxinflight=INFLIGHT)
        for name, address in (
            ("replay", settings.replay_addr),
            ("logger", settings.logger_addr),
        )
    ]
    try:
        actor = Actor(
            agent,
            replay=clients[0],
            logger=clients[1],
            envs=envs,
            server_stats=server.stats,
            on_fatal=rendezvous.fail,
            progress=progress,
        )
        owners = Owners(server.sessions, actor.leave, actor.free)
        actor.owns = owners.owns
        server.bind(
            "act",
            actor.act,
            actor.publish,
            batch=batch,
            limit=max(batch, envs),
            workers=settings.actor_threads,
            timeout=settings.actor_timeout,
            group="is_eval",
        )
        server.bind("env_ids", owners.env_ids)
        roles = dict(zip(("the replay", "the logger"), clients))
        ends = {
            "server/actor": server,
            "client/actor_replay": clients[0],
            "client/actor_logger": clients[1],
        }
        counters = {"policy": lambda: actor.steps}
        with server, report_role(settings, "actor", ends, counters, actor.stats):
            _start_thread(tell_absences, owners.absences, roles, actor.closing)
            if settings.remote_envs:
                _start_thread(wait_for_envs, actor, settings)
            try:
                rendezvous.meet()
                # Not after a failure: then workers wait until the agent is restarted.
                actor.over = True
            finally:
                actor.closing.set()
                # First, since workers would wait for as long as the replay is full.
                for client in clients:
                    client.close()
                if actor.over:
                    _wait_for_goodbyes(server)
    finally:
        for client in clients:
            client.close()


def _start_thread(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(
        target=function, args=arguments, name=function.__name__, daemon=True
    ).start()


def wait_for_envs(actor: Actor, settings: RunSettings) -> None:
    """Logs the command that starts environments until a worker asks for actions."""
    host, _, port = settings.actor_addr.rpartition(":")
    address = (
        f"HOST:{port}" if host in ("0.0.0.0", "*", "[::]") else settings.actor_addr
    )
    command = f"dreamerv3 --script parallel_envs --run.actor_addr {address}"
    if settings.keyfile:
        command += f" --run.keyfile {settings.keyfile}"

    def tell() -> None:
        logger.info(
            "The actor waits for environments at %s. Start them, where they are to "
            "run, with the same --task: %s",
            settings.actor_addr,
            command,
        )

    wiring.wait_until(actor.asked.wait, tell, actor.closing.is_set)


def _wait_for_goodbyes(server: Any) -> None:
    """Waits briefly for workers to learn that the run is over."""
    gone = threading.Event()

    def on_leave(session: Any) -> None:
        if not len(server.sessions):
            gone.set()

    server.sessions.on_leave.append(on_leave)
    if len(server.sessions):
        gone.wait(GOODBYE_SECONDS)
