"""Env workers: step environments and ask the actor for actions. Env processes.

A worker with several environments has two groups of them: one group steps while the
other waits for its actions.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from embodied.base import BatchEnv, Env
from embodied.driver import no_exit
from embodied.rpc import Disconnected, RemoteError
from embodied.run.collecting import MakeEnv
from embodied.run.console import STOPPING, show_messages, stop_on_signals
from embodied.run.live import record_events
from embodied.run.parallel import wiring
from embodied.run.parallel.observations import SAME_TASK, ObservationError
from embodied.run.parallel.owners import worker_info
from embodied.run.parallel.reports import report_workers
from embodied.run.settings import RunSettings
from embodied.workers import Process, Progress, RestartPolicy, Supervisor, WorkerError

RUN_OVER = "RunOver"  # Type of the actor's answer after the end of the run.

# Restarts after errors that a new worker would most likely raise again. Environments
# may break their spaces by chance, but a task that differs from the agent's stays so.
LIMITS = {"SpaceError": 2, "UnusableEnv": 2, "ObservationError": 0}

logger = logging.getLogger("embodied.run")


class EnvGroup:
    """Environments that step together, and their next actions.

    Args:
      make_env: makes the environment of an id. It may have a method `make_batch` that
        returns a BatchEnv for a list of ids, which steps them in one call, or None.
      envids: their ids.
      is_eval: whether they evaluate.
      progress: notified of every step.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        envids: Sequence[int],
        is_eval: bool,
        progress: Progress | None = None,
    ):
        self.envids = list(envids)
        self.rows = len(envids)
        self._progress = progress
        self._marks = {
            "envid": np.array(envids, np.int32),
            "is_eval": np.full(len(envids), is_eval),
        }
        self._mark = {key: np.asarray(x[0]) for key, x in self._marks.items()}
        self._envs: list[Env] = []
        make_batch = getattr(make_env, "make_batch", None)
        self._batch: BatchEnv | None = make_batch(self.envids) if make_batch else None
        try:
            for envid in [] if self._batch else envids:
                self._envs.append(make_env(envid))
                self._report()
        except BaseException:
            self.close()
            raise
        one = self._batch or self._envs[0]
        self._dtypes = {key: space.dtype for key, space in one.obs_space.items()}
        self._act_space = one.act_space
        self.reset()

    def reset(self) -> None:
        """Lets all environments begin a new episode with the next step."""
        self.actions: dict[str, np.ndarray] = {
            key: np.zeros((self.rows, *space.shape), space.dtype)
            for key, space in self._act_space.items()
        }
        self.actions["reset"] = np.ones(self.rows, bool)

    def step(self) -> dict[str, np.ndarray]:
        """Takes the next actions; returns observations, `envid` and `is_eval`.

        They are stacked, [n, ...], unless there is only one environment. Their values
        are checked by the environment's wrapper and by the actor, not here.
        """
        if self._batch is not None:
            obs = self._batch.step(self.actions)
            self._report()
            if self.rows == 1:
                return {key: obs[key][0] for key in self._dtypes} | self._mark
            return {key: obs[key] for key in self._dtypes} | self._marks
        rows = []
        for index, env in enumerate(self._envs):
            action = {key: value[index] for key, value in self.actions.items()}
            rows.append(env.step(action))
            self._report()
        dtypes = self._dtypes.items()
        if self.rows == 1:  # Unbatched, as any client would send it.
            obs = {key: np.asarray(rows[0][key], dtype) for key, dtype in dtypes}
            return obs | self._mark
        stacked = {
            key: np.stack([row[key] for row in rows], dtype=dtype, casting="unsafe")
            for key, dtype in dtypes
        }
        return stacked | self._marks

    def close(self) -> None:
        """Closes the environments."""
        for env in [self._batch] if self._batch else self._envs:
            env.close()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress.step()


class EnvWorker:
    """Steps environments with the actions of an actor, until the run is over.

    Args:
      groups: the environments; each group has one call open.
      client: connection to the actor.
      progress: notified while the worker waits for actions, which is not a hang.
      beat: seconds after which it is notified again; 0 for never.
    """

    def __init__(
        self,
        groups: Sequence[EnvGroup],
        client: Any,
        progress: Progress | None = None,
        beat: float = 0.0,
    ):
        self._client = client
        self._progress = progress
        self._beat = beat
        self._open: deque[tuple[EnvGroup, Any]] = deque()
        for group in groups:
            self._ask(group)

    def step(self) -> bool:
        """Steps the group that has waited longest; returns False if the run is over."""
        group, future = self._open.popleft()
        try:
            self._wait(future)
            reply = future.result()
        except RemoteError as error:
            if error.type == RUN_OVER:
                return False
            if error.type == ObservationError.__name__:
                raise ObservationError(error.message) from None
            raise
        except Disconnected as error:
            # The actor may have stored this step. If so, it must not be stored twice;
            # if not, no step can follow it. New episodes are right in both cases.
            logger.info("Envs %s begin new episodes. %s", group.envids, error)
            group.reset()
            self._ask(group)
            return True
        if group.rows == 1:
            reply = {key: np.asarray(value)[None] for key, value in reply.items()}
        if reply.keys() != group.actions.keys():
            raise ObservationError(
                f"Expected the actions {', '.join(sorted(group.actions))} from the "
                f"actor, got {', '.join(sorted(reply))}. {SAME_TASK}"
            )
        group.actions = reply
        self._ask(group)
        return True

    def _ask(self, group: EnvGroup) -> None:
        rows = group.rows if group.rows > 1 else 0
        self._open.append((group, self._client.call("act", group.step(), rows=rows)))

    def _wait(self, future: Any) -> None:
        """Waits for the actor, for as long as it takes."""
        if self._progress is None:
            return
        with self._progress.waiting(watched=self._beat > 0):
            while not future.wait(self._beat or None):
                self._progress.alive()


def parallel_env(
    make_env: bytes | MakeEnv, envid: int, args: Any, is_eval: bool = False
) -> None:
    """Steps one environment until the run is over.

    Args:
      make_env: makes the environment of an id; may be cloudpickled.
      envid: its id.
      args: the `run` block of the configuration and what belongs to it.
      is_eval: whether it evaluates.
    """
    _worker_process(make_env, [envid], RunSettings.from_args(args), is_eval)


def _worker_process(
    make_env: bytes | MakeEnv,
    envids: Sequence[int],
    settings: RunSettings,
    *arguments: Any,
) -> None:
    with show_messages(), record_events(settings.logdir):
        run_worker(make_env, envids, settings, *arguments)


def run_worker(
    make_env: bytes | MakeEnv,
    envids: Sequence[int],
    settings: RunSettings,
    is_eval: bool,
    progress: Progress | None = None,
    supervisor: str = "",
) -> None:
    """Steps the environments of one worker until the run is over.

    `supervisor` is the name of the supervisor that restarts it, if any; see `Owners`.
    """
    wiring.check_addresses(settings, "actor_addr")
    make_env = wiring.load_factory(make_env)
    name = worker_name(envids)
    middle = (len(envids) + 1) // 2
    parts = [ids for ids in (envids[:middle], envids[middle:]) if len(ids)]
    with no_exit(), contextlib.ExitStack() as stack:
        groups = []
        for ids in parts:
            groups.append(EnvGroup(make_env, ids, is_eval, progress))
            stack.callback(groups[-1].close)
        client = stack.enter_context(
            wiring.make_client(
                settings.actor_addr,
                name,
                settings,
                slots=len(envids),
                group=bool(is_eval),
                info=worker_info(envids, supervisor),
            )
        )
        with progress.waiting() if progress else contextlib.nullcontext():
            first = settings.env_offset in envids or not supervisor
            wiring.connect(client, name, "actor", lambda: False, quiet=not first)
        # Often enough to notice that a worker was stopped while it waits.
        worker = EnvWorker(groups, client, progress, beat=settings.env_timeout / 4)
        while worker.step():
            pass


def parallel_envs(
    make_env: bytes | MakeEnv, make_env_eval: bytes | MakeEnv, args: Any
) -> None:
    """Runs all env workers of this host until the run is over, or Ctrl-C.

    Their ids begin at `args.env_offset`; those that evaluate come last.

    Raises:
      RunFailed: a worker fails again and again, or its observations are not what
        the agent expects.
      AuthError: the actor refuses this host's key.
      RoleError: another host has the same env ids.
    """
    settings = RunSettings.from_args(args)
    wiring.check_addresses(settings, "actor_addr")
    name = secrets.token_hex(8)
    ids = range(
        settings.env_offset, settings.env_offset + settings.envs + settings.eval_envs
    )
    with show_messages(), stop_on_signals(STOPPING) as stop:
        # Once for all workers, so that a refusal by the actor is an error at once.
        with wiring.make_client(
            settings.actor_addr, "envs", settings, info=worker_info(ids, name)
        ) as client:
            if not wiring.connect(client, "This host", "actor", stop.is_set):
                return
        # Workers succeed when the run is over. One that was starting meanwhile, or was
        # cut off, would wait for the actor for ever.
        supervisor = Supervisor(
            stall_timeout=settings.stall_timeout,
            on_restart=_tell_restart,
            first_ends=True,
        )
        with supervisor:
            add_workers(supervisor, make_env, make_env_eval, settings, name)
            with report_workers(supervisor, settings):
                supervisor.run(until=stop)


def add_workers(
    supervisor: Supervisor,
    make_env: bytes | MakeEnv,
    make_env_eval: bytes | MakeEnv,
    settings: RunSettings,
    name: str = "",
) -> int:
    """Adds the env workers of this host to a supervisor; returns how many.

    `name` is the unique name of the supervisor; see `Owners`.
    """
    name = name or secrets.token_hex(8)
    first = settings.env_offset
    training = range(first, first + settings.envs)
    evaluating = range(training.stop, training.stop + settings.eval_envs)
    count = 0
    for make, envids, is_eval in (
        (make_env, training, False),
        (make_env_eval, evaluating, True),
    ):
        for start in range(0, len(envids), settings.envs_per_worker):
            ids = list(envids[start : start + settings.envs_per_worker])
            progress = Progress()
            supervisor.add(
                worker_name(ids),
                "env",
                functools.partial(
                    Process,
                    _worker_process,
                    *(make, ids, settings, is_eval, progress, name),
                    name=worker_name(ids),
                    fds=[progress.fd],
                    shielded=True,
                ),
                RestartPolicy(
                    settings.restarts["env"], hang=settings.env_timeout, limits=LIMITS
                ),
                progress,
            )
            count += 1
    return count


def _tell_restart(name: str, error: WorkerError | None) -> None:
    reason = "it ended." if error is None else error.reason
    logger.warning("Worker %s is restarted: %s", name, reason)


def worker_name(envids: Sequence[int]) -> str:
    """Returns the name of a worker: env-3, or env-0-7."""
    first, last = envids[0], envids[-1]
    return f"env-{first}" if first == last else f"env-{first}-{last}"
