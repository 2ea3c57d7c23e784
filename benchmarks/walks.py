"""Counts the modules that an observation, a batch and a save pass.

    python -m benchmarks.walks [--list]

All roles run as threads of one process, and a profile hook records every function of
this project that is called meanwhile: for some steps of an environment until the replay
has them, for some updates until the replay has their recurrent states, and for a save
until it is committed. Each walk is repeated, and only modules that every repetition
calls are counted: heartbeats and live figures, which run every few seconds beside it,
are not in all of them. Threads of servers that a walk does not pass, but that are at
work at the same time, are left out: the logger's for an observation, the logger's and
the actor's for a batch. With `--list`, the modules and their functions are shown. The
last line is JSON: the number of modules of each walk, and of the save without those of
the transport.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = ("embodied", "dreamerv3")
STEPS, UPDATES = 20, 5  # Of one repetition.
REPETITIONS = 5
SECONDS = 300.0  # For compiling, and everything else that is waited for.


Walk = dict[str, set[str]]  # Functions by module.


class Recorder:
    """Records the functions of this project that are called while it is on."""

    def __init__(self) -> None:
        self._root = Path(__file__).resolve().parents[1]
        self._on = False
        self._others: tuple[str, ...] = ()
        self._calls: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Is called by the interpreter for every call, in every thread."""
        if not self._on or event != "call":
            return
        if not threading.current_thread().name.startswith(self._others):
            code = frame.f_code
            self._calls.add((code.co_filename, code.co_qualname))

    def walk(
        self,
        action: Callable[[], None],
        *others: str,
        prepare: Callable[[], None] = lambda: None,
    ) -> Walk:
        """Repeats an action; returns the modules that every repetition calls.

        Args:
          action: returns when all that it has caused is done.
          *others: beginnings of the names of threads that are left out.
          prepare: called before every repetition, and not recorded.
        """
        walks = []
        for _ in range(REPETITIONS):
            prepare()
            walks.append(self._record(action, others))
        common = set.intersection(*(set(walk) for walk in walks))
        return {name: set.union(*(walk[name] for walk in walks)) for name in common}

    def _record(self, action: Callable[[], None], others: tuple[str, ...]) -> Walk:
        self._others, self._calls = others, set()
        self._on = True
        try:
            action()
        finally:
            self._on = False
        found: Walk = {}
        for name, function in self._calls:
            path = Path(name)
            if path.is_relative_to(self._root):
                module = path.relative_to(self._root)
                if module.parts[0] in PACKAGES:
                    found.setdefault(str(module), set()).add(function)
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the walks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--list", action="store_true", help="also show modules and functions"
    )
    options = parser.parse_args(argv)
    recorder = Recorder()
    # Before any thread of ours is there, and so for all of them.
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    with tempfile.TemporaryDirectory() as folder:
        walks = run(recorder, folder)
        print_table(walks, options.list)
        sys.stdout.flush()
        os._exit(0)  # Threads that serve would wait for a signal.


def run(recorder: Recorder, folder: str) -> dict[str, Walk]:
    """Starts the roles; returns the walks by name."""
    from dreamerv3.cli import factories
    from dreamerv3.cli.config import load_config, make_args
    from embodied.run.parallel import actor, env, logger, replay, wiring
    from embodied.run.parallel.conductor import Conductor
    from embodied.run.parallel.learner import AHEAD, Learner, RemoteStream
    from embodied.run.parallel.rendezvous import Rendezvous
    from embodied.run.settings import RunSettings

    config = load_config(
        [
            *("--configs", "debug", "--task", "dummy_disc", "--logdir", folder),
            *("--run.envs", "1", "--run.eval_envs", "0", "--run.train_ratio", "0"),
            *("--run.log_every", "0", "--logger.outputs", "jsonl"),
        ]
    )
    settings = RunSettings.from_args(make_args(config))
    settings = wiring.resolve_addresses(settings)
    make = functools.partial
    stored = replay.ReplayRole(
        factories.make_replay(config, "replay"),
        factories.make_replay(config, "replay_eval", "eval"),
        make(factories.make_stream, config),
        settings,
    )
    stop, barrier = threading.Event(), threading.Barrier(2)
    gate = threading.Semaphore(1_000)
    agent = factories.make_agent(config)
    begin(
        logger.serve,
        logger.LoggerRole(factories.make_logger(config), settings),
        settings,
        stop,
    )
    begin(replay.serve, stored, settings, stop)
    begin(actor.run_actor, agent, Rendezvous(barrier, "actor", "learner"), settings)
    begin(env.run_worker, make(gated_env, config, gate), [0], settings, False)
    log = wiring.make_client(settings.logger_addr, "walks-logger", settings)
    client = wiring.make_client(settings.replay_addr, "walks-replay", settings)
    samples = wiring.make_client(settings.replay_addr, "walks-samples", settings)
    for connection in (log, client, samples):
        connection.connect(timeout=SECONDS)
    inserts = counter(stored, "inserts")
    wait_until(lambda: inserts() >= 1_000)

    def observe() -> None:
        before = inserts()
        for _ in range(STEPS):
            gate.release()
        wait_until(lambda: inserts() >= before + STEPS)

    walks = {"observation": recorder.walk(observe, "logger")}
    batches = iter(agent.stream(RemoteStream(samples, "train", AHEAD)))
    learner = Learner(agent, batches, client, log, settings)
    updates = counter(stored, "updates")

    def train() -> None:
        before = updates()
        for _ in range(UPDATES):
            learner.step()
        wait_until(lambda: updates() >= before + UPDATES)

    for _ in range(UPDATES + 1):  # The states of an update are sent after the next.
        learner.step()
    walks["batch"] = recorder.walk(train, "logger", "actor")
    conductor = Conductor(agent, client, log, settings)

    def save() -> None:
        conductor.save(learner.updates)
        assert conductor.wait(), "the save failed"

    def progress() -> None:
        observe()  # So that every save has something to write.
        train()

    walks["save"] = recorder.walk(save, prepare=progress)
    return walks


def gated_env(config: Any, gate: threading.Semaphore, index: int) -> Any:
    """Makes an environment each step of which needs a release of the gate."""
    from dreamerv3.cli import factories
    from embodied.wrappers import Wrapper

    class Gated(Wrapper):
        def step(self, action: Any) -> Any:
            gate.acquire()
            return self.env.step(action)

    return Gated(factories.make_env(config, index))


def counter(role: Any, name: str) -> Callable[[], int]:
    """Returns a function that tells how often the train replay did something."""
    counters = role._train._counters
    return lambda: int(counters.total(name))


def begin(function: Callable[..., Any], *arguments: Any) -> None:
    """Starts a daemon thread."""
    name = getattr(function, "__qualname__", "thread")
    threading.Thread(target=function, args=arguments, name=name, daemon=True).start()


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} did not become true in {SECONDS:.0f} s.")
        time.sleep(0.01)


def print_table(walks: dict[str, Walk], every: bool) -> None:
    """Prints the walks, the last line as JSON."""
    counts = {}
    for name, walk in walks.items():
        counts[name] = len(walk)
        print(f"{name}: {len(walk)} modules")
        for module in sorted(walk) if every else ():
            print(f"  {module}: {', '.join(sorted(walk[module]))}")
    transport = [x for x in walks["save"] if x.startswith("embodied/rpc/")]
    counts["save_without_transport"] = counts["save"] - len(transport)
    print(json.dumps(counts))


if __name__ == "__main__":
    sys.exit(main())
