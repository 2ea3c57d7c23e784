"""Roles as processes, with clients of the test in place of the other roles."""

from __future__ import annotations

import contextlib

import cloudpickle
import numpy as np
from parallel_testing import WAIT, small
from tiny_testing import Parts

from embodied.rpc import Client, Keys, free_port
from embodied.run.parallel import parallel_logger, parallel_replay
from embodied.workers import Process, stop


class Roles:
    """Roles in processes of their own, and clients of the test."""

    def __init__(self, folder, *flags):
        self._stack = contextlib.ExitStack()
        self.keys = Keys.generate()
        self.keys.save(folder / "keys.json")
        addresses = ["--run.keyfile", folder / "keys.json"]
        for role in ("actor", "replay", "logger"):
            addresses += [f"--run.{role}_addr", f"localhost:{free_port()}"]
        self.parts = Parts([*small(folder / "run"), *map(str, addresses), *flags])
        self.args = self.parts.args
        self.processes = []

    def start(self, function, *factories):
        # Roles take factories as they are or pickled; here they are pickled.
        pickled = [cloudpickle.dumps(factory) for factory in factories]
        process = Process(function, *pickled, self.args)
        process.start()
        self.processes.append(process)

    def start_stores(self):
        """Starts the logger and the replay."""
        parts = self.parts
        self.start(parallel_logger, parts.make_logger)
        self.start(
            parallel_replay,
            parts.make_replay,
            parts.make_replay_eval,
            parts.make_stream,
        )

    def client(self, role, **kwargs):
        address = self.args[f"{role}_addr"]
        client = Client(address, "test", keys=self.keys, **kwargs)
        self._stack.callback(client.close)
        client.connect(WAIT)
        return client

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()
        for process in reversed(self.processes):  # The agent needs the others to save.
            stop([process], 10)


def transitions(envids, count, is_eval=False, start=0):
    """Batches of one transition of each env, with a recurrent state."""
    size = len(envids)
    for index in range(start, start + count):
        yield {
            "where": np.array([[envid, 0, index] for envid in envids], np.int32),
            "action": np.zeros(size, np.int32),
            "reward": np.ones(size, np.float32),
            "is_first": np.full(size, index == 0),
            "is_last": np.zeros(size, bool),
            "is_terminal": np.zeros(size, bool),
            "dyn/deter": np.full((size, 2), index, np.float32),
            "envid": np.array(envids, np.int32),
            "is_eval": np.full(size, is_eval),
        }
