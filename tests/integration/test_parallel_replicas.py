"""Several hosts train together: they save, go on and end at the same update."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
from parallel_testing import HASTY, LEAN, WAIT, Program, Saved, metrics, small
from waiting_testing import wait_until

from embodied import rpc
from embodied.run.parallel import replicas as replicas_module
from embodied.run.parallel.replicas import (
    EXIT_START_AGAIN,
    ReplicaLost,
    Replicas,
    ReplicaServer,
    ReplicaWatch,
)

COUNT = 2
JAX = ["--random_agent", "False", "--task", "gym_CartPole-v1"]
NOTICED_SECONDS = 60.0


@contextlib.contextmanager
def started(logdir, *argv, steps=10**9, script=None):
    """Starts both replicas."""
    port = rpc.free_port()
    shared = ["--replicas", COUNT, "--clock_port", port, "--run.eval_envs", 0]
    shared += ["--run.report_every", 0, "--run.save_every", 1, *argv]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Program(
                    *small(logdir, "--replica", index, *shared, steps=steps),
                    script=script,
                )
            )
            for index in range(COUNT)
        ]


def run_replicas(logdir, *argv, steps, seconds=WAIT):
    """Runs both replicas to their end; returns what they printed."""
    with started(logdir, *argv, steps=steps) as programs:
        for program in programs:
            assert program.wait(seconds) == 0, program.output()
        return [program.output() for program in programs]


@pytest.mark.slow
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
    flags = ["--jax.coordinator_address", address, "--run.save_every", 1000]
    run_replicas(tmp_path, *JAX, *flags, steps=400, seconds=600)
    updates = [
        metrics(tmp_path / folder)["train/opt/updates"][-1]
        for folder in ("", "replicas/00001")
    ]
    assert updates[0] == updates[1] > 0


def metrics_folder(logdir, index):
    return logdir / f"replicas/{index:05}" if index else logdir


def kill_one(logdir, programs, victim, seconds=WAIT):
    """Kills a replica once both train; returns the other after it has ended."""
    for index, program in enumerate(programs):
        folder = metrics_folder(logdir, index)
        program.wait_for_metrics(
            folder, lambda found: max(found.get("parallel/updates", [0])) > 1, seconds
        )
    began = time.monotonic()
    os.kill(programs[victim].pid, signal.SIGKILL)
    other = programs[1 - victim]
    assert other.wait() == EXIT_START_AGAIN, other.output()
    assert time.monotonic() - began < NOTICED_SECONDS
    assert f"Replica {victim} of {COUNT} is gone" in other.output()
    assert "start all of them again" in other.output()
    return other


def test_a_replica_that_is_gone_ends_the_other(tmp_path):
    flags = [*LEAN, "--run.replica_timeout", 3]
    with started(tmp_path, *flags, script=HASTY) as programs:
        other = kill_one(tmp_path, programs, victim=1)
        assert "Traceback" not in other.output()


@pytest.mark.slow
def test_replicas_go_on_when_both_start_again_after_a_loss(tmp_path):
    with started(tmp_path) as programs:
        other = kill_one(tmp_path, programs, victim=0)
        assert "Traceback" not in other.output()
    tag = Saved(tmp_path).tag
    for shown in run_replicas(tmp_path, steps=1):
        assert f"from checkpoint {tag}" in shown


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", range(COUNT))
def test_a_replica_in_a_collective_operation_ends_when_the_other_is_gone(
    tmp_path, victim
):
    # JAX aborts the agent if the first replica is gone, and lets it hang otherwise.
    address = f"localhost:{rpc.free_port()}"
    with started(tmp_path, *JAX, "--jax.coordinator_address", address) as programs:
        kill_one(tmp_path, programs, victim, seconds=600)


@pytest.mark.slow
def test_a_replica_that_fails_says_why_and_the_other_is_to_start_again(tmp_path):
    # With the default timeout, which applies only to replicas that are silent.
    with started(tmp_path, "--run.restarts.replay", 0) as programs:
        for index, program in enumerate(programs):
            program.wait_for_step(metrics_folder(tmp_path, index), 1)
        os.kill(programs[1].roles()["replay"].pid, signal.SIGKILL)
        assert programs[1].wait() == 1, programs[1].output()
        assert programs[0].wait() == EXIT_START_AGAIN, programs[0].output()
        assert "Replica 1 of 2 has failed: Worker 'replay'" in programs[0].output()


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


@contextlib.contextmanager
def watched(port, index, count=COUNT, silence=30.0):
    """Watches the other replicas; yields the watch and an event that a loss sets."""
    lost = threading.Event()
    with rpc.Client(f"localhost:{port}", f"watch-{index}") as client:
        watch = ReplicaWatch(index, count, client, silence, lost.set)
        with contextlib.suppress(ReplicaLost), watch:
            yield watch, lost


@pytest.fixture
def quick_beats(monkeypatch):
    monkeypatch.setattr(replicas_module, "BEAT_SECONDS", 0.05)


def test_replicas_that_leave_well_are_not_missed(quick_beats):
    port, silence = rpc.free_port(), 1.0
    with ReplicaServer(f"localhost:{port}", COUNT, silence) as server:
        with watched(port, 0, silence=silence) as (_, lost):
            with watched(port, 1, silence=silence) as (watch, _):
                wait_until(lambda: len(server._heard) == COUNT)
            assert not lost.wait(2 * silence)
        with watched(port, 1, silence=silence) as (watch, lost):
            wait_until(lambda: watch._all_heard)
            server.tell_end()
            server.__exit__()
            assert not lost.wait(2 * silence)


def test_the_first_failure_is_the_one_that_all_know(quick_beats):
    port, count = rpc.free_port(), 3
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ReplicaServer(f"localhost:{port}", count, 30))
        watches = [stack.enter_context(watched(port, i, count)) for i in range(count)]
        wait_until(lambda: len(server._heard) == count)
        watches[1][0].report("its disk is full.")
        assert watches[1][0].lost is None
        watches[2][0].report("a peer has closed the connection.")
        for index in (0, 2):
            watch, lost = watches[index]
            assert lost.wait(10)
            assert "Replica 1 of 3 has failed: its disk is full." in str(watch.lost)


def test_a_failure_waits_for_the_loss_that_it_may_come_from(quick_beats):
    port, silence = rpc.free_port(), 1.0
    with ReplicaServer(f"localhost:{port}", COUNT, silence) as server:
        with watched(port, 0, silence=silence) as (watch, lost):
            with rpc.Client(f"localhost:{port}", "killed") as client:
                client.beat(1, False, "").result(10)
            wait_until(lambda: len(server._heard) == COUNT)
            watch.report("a peer has closed the connection.")
            assert lost.is_set()
            assert "Replica 1 of 2 is gone" in str(watch.lost)


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
