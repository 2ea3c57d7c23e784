"""Steps a set of environments with a policy. Runs in the process that collects.

With `parallel`, each environment lives in a child process, which runs `_serve`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np

from embodied.base import Array, Env, Spaces, Tree
from embodied.envs.keys import SIGNALS
from embodied.space import Space
from embodied.workers import Process, WorkerError, stop
from embodied.workers.child import TERMINATED

CLOSE_SECONDS = 10.0  # For all environments together to close by themselves.
DEATH_SECONDS = 10.0  # For a process to end after its connection has closed.

MakeEnv = Callable[[], Env]
Policy = Callable[..., tuple[Tree, dict[str, Array], dict[str, Array]]]
Callback = Callable[..., Any]


class EnvError(RuntimeError):
    """An environment failed, died, hung, or violates the interface.

    Attributes:
      index: the environment's position in the list given to the driver.
      reason: description of the failure, a phrase that follows 'Env INDEX'.
      traceback: traceback of the failure as text; empty if it is unknown, or if this
        error has a `__cause__`.
      kind: type name of the exception, without the module; empty without an exception.
    """

    def __init__(self, index: int, reason: str, traceback: str = "", kind: str = ""):
        super().__init__(index, reason, traceback, kind)
        self.index = index
        self.reason = reason
        self.traceback = traceback
        self.kind = kind

    def __str__(self) -> str:
        text = f"Env {self.index} {self.reason}"
        return f"{text}\n\n{self.traceback.rstrip()}" if self.traceback else text


class EnvExit(RuntimeError):
    """An environment tried to exit the process that it runs in."""


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """Turns `sys.exit` of an environment, which would end it silently, into an error.

    Raises:
      EnvExit: the body called `sys.exit`, other than from the handler of SIGTERM.
    """
    try:
        yield
    except SystemExit as error:
        if error.code == TERMINATED:
            raise
        exit = EnvExit(f"it called sys.exit({error.code!r}). Raise an error instead.")
        # Keep the traceback of the `sys.exit` call.
        raise exit.with_traceback(error.__traceback__) from None


@contextlib.contextmanager
def env_errors(index: int, *passed: type[Exception]) -> Iterator[None]:
    """Turns errors of environment `index` into EnvErrors, except types `passed`."""
    try:
        with no_exit():
            yield
    except passed:
        raise
    except Exception as error:
        kind = type(error).__name__
        reason = f"failed with {kind}: {error}"
        raise EnvError(index, reason, kind=kind) from error


class Driver:
    """Steps environments with a policy and passes the transitions to callbacks.

        with Driver([make_env] * 4) as driver:
          driver.on_step(lambda transition, worker: replay.add(transition, worker))
          driver.reset(agent.init_policy)
          while step < steps:
            driver(agent.policy, steps=10)

    A transition holds one environment's observation, with its `log/` keys, and the
    action and outputs that the policy gave for it. The policy sees observations of
    all environments stacked, without `log/` keys. A driver belongs to one thread. An
    error of an environment closes the driver; after an error of the policy or of a
    callback, `reset` starts new episodes.

    Values are checked by an environment's own `wrappers.CheckSpaces`, if it has one.
    The driver compares only keys and shapes with the spaces: of the first observations,
    and of observations that it cannot stack.

    Args:
      make_env_fns: functions without arguments, one per environment. The
        environments must have equal spaces.
      parallel: whether each environment runs in a process of its own.
      timeout: seconds that an environment in a process may take to be made or to
        step before it counts as hung.
      **kwargs: further arguments for the policy and the callbacks.
    """

    def __init__(
        self,
        make_env_fns: Sequence[MakeEnv],
        parallel: bool = True,
        *,
        timeout: float = 600.0,
        **kwargs: Any,
    ):
        if not make_env_fns:
            raise ValueError("Driver expected at least one environment, got none.")
        if not 0 < timeout < float("inf"):
            raise ValueError(f"Driver expected a timeout in seconds, got {timeout}.")
        self._kwargs = kwargs
        self._callbacks: list[Callback] = []
        self._envs: list[_ProcessEnv | _LocalEnv] = []
        self._closed = False
        self._checked = False  # Whether the first observations fit their spaces.
        try:
            for index, make_env in enumerate(make_env_fns):
                if parallel:
                    self._envs.append(_ProcessEnv(index, make_env, timeout))
                else:
                    self._envs.append(_LocalEnv(index, make_env))
            self.obs_space, self.act_space = self._agree_on_spaces()
        except BaseException:
            self._close_after_error()
            raise
        self.reset()

    def __len__(self) -> int:
        """Returns the number of environments."""
        return len(self._envs)

    def reset(self, init_policy: Callable[[int], Tree] | None = None) -> None:
        """Starts new episodes at the next step, with `init_policy(n)` as the carry."""
        self._carry = init_policy(len(self)) if init_policy else None
        self._actions: dict[str, Array] = {
            key: np.zeros((len(self), *space.shape), space.dtype)
            for key, space in self.act_space.items()
        }
        self._actions["reset"] = np.ones(len(self), bool)

    def on_step(self, callback: Callback) -> None:
        """Adds `callback(transition, worker, **kwargs)`, called for every env step."""
        self._callbacks.append(callback)

    def __call__(self, policy: Policy, steps: int = 0, episodes: int = 0) -> None:
        """Steps all environments until both numbers are reached.

        Args:
          policy: `policy(carry, obs, **kwargs)` returns carry, actions and outputs.
          steps: environment steps to take, counted over all environments.
          episodes: episodes to complete, counted over all environments.
        """
        step, episode = 0, 0
        while step < steps or episode < episodes:
            episode += self._step(policy)
            step += len(self)

    def close(self) -> None:
        """Closes the environments and ends their processes. May be called again."""
        if self._closed:
            return
        self._closed = True
        children = [env for env in self._envs if isinstance(env, _ProcessEnv)]
        for child in children:
            child.ask_to_close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for child in children:
            child.wait_for_close(max(0.0, deadline - time.monotonic()))
        stop([child.process for child in children])
        errors = []
        for env in self._envs:
            try:
                env.close()
            except EnvError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _step(self, policy: Policy) -> int:
        """Steps all environments once; returns the number of episodes that ended."""
        observations, obs = self._exchange()
        self._carry, actions, outputs = policy(self._carry, dict(obs), **self._kwargs)
        actions = {key: np.asarray(value) for key, value in actions.items()}
        outputs = {key: np.asarray(value) for key, value in outputs.items()}
        self._check_policy(obs, actions, outputs)
        self._actions = {**actions, "reset": obs["is_last"]}
        batch = {**obs, **actions, **outputs}
        for worker, observation in enumerate(observations):
            transition = {key: value[worker] for key, value in batch.items()}
            for key, value in observation.items():
                if key.startswith("log/"):
                    # A copy, since an environment may write to its own arrays.
                    transition[key] = np.array(value)
            for callback in self._callbacks:
                callback(transition, worker, **self._kwargs)
        return int(obs["is_last"].sum())

    def _exchange(self) -> tuple[list[dict[str, Array]], dict[str, Array]]:
        """Steps all environments; returns their observations, and the policy batch."""
        if self._closed:
            raise RuntimeError("The driver is closed. Create a new one to continue.")
        try:
            for index, env in enumerate(self._envs):
                env.send({key: value[index] for key, value in self._actions.items()})
            observations = [env.receive() for env in self._envs]
            return observations, self._stack(observations)
        except BaseException:
            # Answers of other environments may still arrive, and would be taken for
            # those to the next actions.
            self._close_after_error()
            raise

    def _stack(self, observations: list[dict[str, Array]]) -> dict[str, Array]:
        """Returns observations [N, ...] by key, without `log/` keys."""
        if not self._checked:
            self._check_structure(observations)
            self._checked = True
        try:
            return {
                key: np.stack([observation[key] for observation in observations])
                for key in self.obs_space
                if not key.startswith("log/")
            }
        except (KeyError, TypeError, ValueError):
            self._check_structure(observations)  # Its error names the environment.
            raise

    def _close_after_error(self) -> None:
        # Suppressed: the first error is the one to report.
        with contextlib.suppress(EnvError):
            self.close()

    def _agree_on_spaces(self) -> tuple[Spaces, Spaces]:
        first, *others = [env.spaces() for env in self._envs]
        for index, spaces in enumerate(others, 1):
            if spaces != first:
                raise EnvError(
                    index,
                    f"has other spaces than env 0: {spaces}, not {first}. All "
                    "environments of a driver must have equal spaces.",
                )
        obs_space, act_space = first
        if missing := sorted(SIGNALS.keys() - obs_space.keys()):
            raise EnvError(0, f"must have {missing} in its obs_space.")
        if "reset" not in act_space:
            raise EnvError(0, "must have 'reset' in its act_space.")
        return first

    def _check_structure(self, observations: list[dict[str, Array]]) -> None:
        expected = {key for key in self.obs_space if not key.startswith("log/")}
        for index, observation in enumerate(observations):
            if not isinstance(observation, dict):
                got = type(observation).__name__
                raise EnvError(index, f"returned {got}; expected a dict of arrays.")
            found = {key for key in observation if not key.startswith("log/")}
            if found != expected:
                raise EnvError(
                    index,
                    f"returned an observation with keys {sorted(found)}; its obs_space "
                    f"has {sorted(expected)}.",
                )
            for key in expected:
                shape, space = np.shape(observation[key]), self.obs_space[key]
                if shape != space.shape:
                    raise EnvError(
                        index, f"returned '{key}' of shape {shape}; expected {space}."
                    )

    def _check_policy(
        self,
        obs: dict[str, Array],
        actions: dict[str, Array],
        outputs: dict[str, Array],
    ) -> None:
        expected = self.act_space.keys() - {"reset"}
        if actions.keys() != expected:
            raise ValueError(
                f"The driver expected actions {sorted(expected)} from the policy, got "
                f"{sorted(actions)}."
            )
        if shared := sorted(outputs.keys() & (obs.keys() | actions.keys())):
            raise ValueError(
                "The driver expected policy outputs with other names, got "
                f"{shared}, which are observations or actions. Rename them."
            )
        for key, value in (*actions.items(), *outputs.items()):
            shape = (len(self), *(self.act_space[key].shape if key in actions else ()))
            if value.shape[: len(shape)] != shape:
                raise ValueError(
                    f"The driver expected '{key}' from the policy to have shape "
                    f"{list(shape)}{'' if key in actions else ' + [...]'}, got "
                    f"{list(value.shape)}."
                )


class _LocalEnv:
    """An environment in this process, with the interface of `_ProcessEnv`."""

    def __init__(self, index: int, make_env: MakeEnv):
        self._index = index
        self._env: Env = self._guard(make_env)
        self._action: dict[str, Array] = {}

    def spaces(self) -> tuple[Spaces, Spaces]:
        """Returns the spaces of observations and actions."""
        return self._guard(_spaces, self._env)

    def send(self, action: dict[str, Array]) -> None:
        """Sets the action of the next step."""
        self._action = action

    def receive(self) -> dict[str, Array]:
        """Steps and returns the observation."""
        return self._guard(self._env.step, self._action)

    def close(self) -> None:
        """Closes the environment."""
        self._guard(self._env.close)

    def _guard(self, function: Callable[..., Any], *args: Any) -> Any:
        with env_errors(self._index):
            return function(*args)


class _ProcessEnv:
    """An environment in a child process, which answers one message at a time.

    The first answer holds the spaces. The message `None` asks the process to close the
    environment and to end.
    """

    def __init__(self, index: int, make_env: MakeEnv, timeout: float):
        self._index = index
        self._timeout = timeout
        self._waiting = True  # Whether an answer is still to come.
        self._asked = False  # Whether the process was asked to end.
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fd = theirs.fileno()
            self.process = Process(
                *(_serve, make_env, fd),
                name=f"env-{index}",
                start=True,
                fds=[fd],
                shielded=True,
            )
            # The kernel enforces the timeout, so that a process that hangs in the
            # middle of a message is noticed too: `recv` and `send` then raise
            # BlockingIOError.
            limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._connection = Connection(ours.detach())

    def spaces(self) -> tuple[Spaces, Spaces]:
        """Waits until the environment is made; returns its spaces."""
        return self.receive()

    def send(self, action: dict[str, Array] | None) -> None:
        """Sends an action and returns at once."""
        self._waiting = True
        try:
            self._connection.send(action)
        except OSError as error:
            raise self._diagnose(error) from None

    def receive(self) -> Any:
        """Waits for the answer to the last message."""
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._diagnose(error) from None
        self._waiting = False
        return answer

    def ask_to_close(self) -> None:
        """Asks the process to end, unless an answer is still outstanding."""
        if not self._waiting:
            # Suppressed: the process has ended, and `close` reports why.
            with contextlib.suppress(EnvError):
                self.send(None)
                self._asked = True

    def wait_for_close(self, timeout: float) -> None:
        """Waits for the process to end, if it was asked to."""
        if self._asked:
            self.process.join(timeout)

    def close(self) -> None:
        """Frees the connection; raises if the process failed."""
        self._connection.close()
        if error := self.process.error:
            raise _env_error(self._index, error)

    def _diagnose(self, error: Exception) -> EnvError:
        if isinstance(error, BlockingIOError):
            return EnvError(
                self._index,
                f"did not answer within {self._timeout:g} s and counts as hung. Pass "
                "the driver a longer timeout if it may take so long.",
            )
        # The connection closes shortly before the process ends.
        self.process.join(DEATH_SECONDS)
        if cause := self.process.error:
            return _env_error(self._index, cause)
        return EnvError(
            self._index,
            f"closed its connection ({error!r}) without an error; exit code of its "
            f"process: {self.process.exitcode}.",
        )


def _env_error(index: int, error: WorkerError) -> EnvError:
    return EnvError(index, error.reason, error.traceback, error.kind)


def _serve(make_env: MakeEnv, fd: int) -> None:
    """Runs in the child: makes the environment and steps it as the parent asks.

    Errors end the process, which reports them to the parent.
    """
    with Connection(fd) as connection, no_exit():
        env = make_env()
        try:
            connection.send(_spaces(env))
            while (action := connection.recv()) is not None:
                connection.send(env.step(action))
        finally:
            env.close()


def _spaces(env: Env) -> tuple[Spaces, Spaces]:
    return (
        {key: Space.of(space) for key, space in env.obs_space.items()},
        {key: Space.of(space) for key, space in env.act_space.items()},
    )
