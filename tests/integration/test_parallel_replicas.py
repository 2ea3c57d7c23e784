"""Several hosts train together: they save, go on and end at the same update."""

from __future__ import annotations

import contextlib
import threading

import pytest
from parallel_testing import WAIT, Program, Saved, metrics, small

from embodied import rpc
from embodied.run.parallel.replicas import Replicas, ReplicaServer

COUNT = 2


def run_replicas(logdir, *argv, steps, seconds=WAIT):
    """Runs both replicas to their end; returns what they printed."""
    port = rpc.free_port()
    shared = ["--replicas", COUNT, "--clock_port", port, "--run.eval_envs", 0]
    shared += ["--run.report_every", 0, "--run.save_every", 1, *argv]
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(
                Program(*small(logdir, "--replica", index, *shared, steps=steps))
            )
            for index in range(COUNT)
        ]
        for program in programs:
            assert program.wait(seconds) == 0, program.output()
        return [program.output() for program in programs]


def test_replicas_save_one_checkpoint_and_go_on_from_it(tmp_path):
    run_replicas(tmp_path, steps=3000)
    first = Saved(tmp_path)
    for name in ("replay", "limiter", "logger"):
        for index in range(COUNT):
            first[f"{name}/{index:05}"]
    steps = [first[f"logger/{index:05}"]["step"] for index in range(COUNT)]
    assert min(steps) > 0 and first.step == sum(steps)
    assert metrics(tmp_path / "replicas" / "00001")["fps/env"]
    for shown in run_replicas(tmp_path, steps=6000):
        assert f"Continuing at step {first.step}, from checkpoint {first.tag}" in shown
    assert Saved(tmp_path).step > first.step


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_train_one_agent(tmp_path):
    address = f"localhost:{rpc.free_port()}"
    flags = ["--random_agent", "False", "--task", "gym_CartPole-v1"]
    flags += ["--jax.coordinator_address", address, "--run.save_every", 1000]
    run_replicas(tmp_path, *flags, steps=400, seconds=600)
    updates = [
        metrics(tmp_path / folder)["train/opt/updates"][-1]
        for folder in ("", "replicas/00001")
    ]
    assert updates[0] == updates[1] > 0


def test_the_address_of_the_first_replica_must_be_known(tmp_path):
    with Program(*small(tmp_path, "--replicas", 2)) as program:
        assert program.wait() != 0
        assert "--clock_port PORT" in program.output()


@pytest.fixture
def replicas():
    port = rpc.free_port()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ReplicaServer(f"localhost:{port}", COUNT))
        clients = [
            stack.enter_context(rpc.Client(f"localhost:{port}", f"replica-{index}"))
            for index in range(COUNT)
        ]
        yield [Replicas(i, COUNT, client) for i, client in enumerate(clients)]


def together(functions):
    """Calls functions in threads; returns their results."""
    results = [None] * len(functions)

    def call(index):
        results[index] = functions[index]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_all_end_with_the_same_call(replicas):
    def count(replica, ended_at):
        for call in range(1000):
            if replica.over(call >= ended_at):
                return call
        return None

    counts = together([lambda: count(replicas[0], 500), lambda: count(replicas[1], 20)])
    assert counts[0] == counts[1]
    assert 20 <= counts[0] <= 500


def test_all_get_what_all_have_given(replicas):
    for name in ("one", "two"):
        values = together(
            [lambda i=i, name=name: replicas[i].gather(name, f"{i}") for i in (0, 1)]
        )
        assert values == [["0", "1"], ["0", "1"]]


def test_one_replica_asks_nobody():
    alone = Replicas()
    assert alone.alone and alone.first
    assert alone.gather("name", "value") == ["value"]
    assert alone.over(True) and not alone.over(False)
