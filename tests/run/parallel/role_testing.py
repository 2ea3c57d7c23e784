"""Fakes for roles without connections: a client, an agent, a small task's data."""

from __future__ import annotations

import threading

import numpy as np
from loop_testing import SETTINGS
from waiting_testing import WAIT

import embodied
from embodied.rpc import Future
from embodied.run.settings import RunSettings

DEFAULTS = {
    **SETTINGS,
    "report_batches": 2,
    "consec_report": 3,
    "envs_per_worker": 1,
    "transport": "zmq",
    "link": "auto",
    "keyfile": "",
    "insecure": False,
}


def make_args(**changes):
    return RunSettings.from_args({**DEFAULTS, **changes})


class Waiting:
    """Receiver of a future whose answer the test gives."""

    def wait_for(self, future, timeout):
        future.block(timeout)

    def attend(self):
        pass


def make_future(name="call"):
    return Future(name, "the server", Waiting())


class FakeClient:
    """Answers calls at once, except for those of `held` methods.

    Args:
      held: methods whose futures the test completes; see `open`.
      answers: by method, the result; an exception, which fails the call; or a function
        of the arguments that returns either.
    """

    def __init__(self, held=(), **answers):
        self.addr = "fake:1"
        self.calls = []  # (method, arguments)
        self.open = []  # Futures of held methods.
        self.rows = []
        self._held = held
        self._answers = answers

    def call(self, method, *arguments, rows=0):
        future = make_future(method)
        self.calls.append((method, arguments))
        self.rows.append(rows)
        answer = self._answers.get(method)
        if callable(answer):
            answer = answer(*arguments)
        if method in self._held:
            self.open.append(future)
        elif isinstance(answer, Exception):
            future.set_error(answer)
        else:
            future.set_result(answer)
        return future

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments: self.call(method, *arguments)

    def stats(self):
        return {"calls": len(self.calls)}

    def sent(self, method):
        """The arguments of all calls of a method."""
        return [arguments for name, arguments in self.calls if name == method]


class CountingAgent(embodied.Agent):
    """Agent whose action is the number of steps of the episode in its memory."""

    def __init__(self):
        self.seen = []  # (mode, keys) of every policy call.
        self.trained = []
        self.reported = []
        self.outputs = {}
        self.closed = 0

    def init_policy(self, batch_size):
        return {"memory": (np.zeros(batch_size, np.int32), None)}

    def init_train(self, batch_size):
        return 0

    def init_report(self, batch_size):
        return 0

    def policy(self, carry, obs, mode="train"):
        self.seen.append((mode, sorted(obs)))
        count = np.where(obs["is_first"], 0, carry["memory"][0]) + 1
        actions = {"action": count.astype(np.int32)}
        return {"memory": (count, None)}, actions, {"dyn/deter": count * 10.0}

    def train(self, carry, batch):
        self.trained.append((carry, batch))
        return carry + 1, dict(self.outputs), {"loss": np.float32(len(self.trained))}

    def report(self, carry, batch):
        self.reported.append((carry, batch))
        return carry + 1, {"value": np.float32(batch["value"])}

    def stream(self, st):
        try:
            yield from st
        finally:
            self.closed += 1

    def save(self):
        return {}

    def load(self, data, regex=None):
        pass


def observations(envids, is_eval=False, **changes):
    """Returns a batch as the actor gets it, in the middle of episodes."""
    size = len(envids)
    return {
        "image": np.full((size, 2, 2, 3), 7, np.uint8),
        "reward": np.ones(size, np.float32),
        "is_first": np.zeros(size, bool),
        "is_last": np.zeros(size, bool),
        "is_terminal": np.zeros(size, bool),
        "log/count": np.arange(size, dtype=np.float32),
        "envid": np.array(envids, np.int32),
        "is_eval": np.full(size, is_eval),
        **{key: np.asarray(value) for key, value in changes.items()},
    }


def transitions(envids, index, is_eval=False):
    """Returns a batch as the replay gets it, with all envs at step `index`."""
    size = len(envids)
    return {
        "value": np.full(size, index, np.int32),
        "reward": np.ones(size, np.float32),
        "is_first": np.full(size, index == 0),
        "is_last": np.zeros(size, bool),
        "is_terminal": np.zeros(size, bool),
        "dyn/deter": np.full((size, 2), index, np.float32),
        "envid": np.array(envids, np.int32),
        "is_eval": np.broadcast_to(np.asarray(is_eval), size),
    }


class Background:
    """Runs a function in a thread; leaving the block waits for it.

    with Background(role.add_batch, batch) as task:
      ...
    assert task.result is None
    """

    def __init__(self, function, *arguments):
        self.result = self.error = None
        self._thread = threading.Thread(target=self._run, args=(function, arguments))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.join()

    @property
    def running(self):
        return self._thread.is_alive()

    def join(self, seconds=WAIT):
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "The thread did not end."

    def _run(self, function, arguments):
        try:
            self.result = function(*arguments)
        except BaseException as error:
            self.error = error
