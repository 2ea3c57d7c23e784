"""Slow tests in which nodes, drivers and jobs are killed or stopped."""

import json
import os
import random
import subprocess
import sys
import time
from functools import partial

import pytest
from cluster_testing import WAIT, check_stored, small_run
from parallel_testing import metrics
from waiting_testing import wait_until

from benchmarks.chaos.audit import Window, account, read_traces
from benchmarks.chaos.reader import Unreadable, read_manifest
from benchmarks.chaos.site import SEQUENCE, MetricsWatch
from embodied.rpc import free_port

ENV_SECONDS, HEAD_SECONDS = 30.0, 90.0  # Limits for recovery from a lost node.
COMPILE_WAIT = 600.0  # Two agents compile at the same time.
KILLS = 10
ENVS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def saved(logdir):
    """Returns when the newest save began, 0 if there is none."""
    try:
        return read_manifest(logdir / "ckpt" / "manifest.json").time
    except Unreadable:
        return 0.0


def was_saved(logdir, since):
    return saved(logdir) > since


def was_lost(driver, name, times):
    return driver.output().count(f"{name}: lost") >= times


def wait_for_training(cluster, driver, logdir):
    """Waits for new updates, and for new actions of all environments."""
    begin = time.time()
    watch = MetricsWatch(logdir / "metrics.jsonl")

    def is_on():
        return watch.updates() >= 2 and len(cluster.acting(begin)) == ENVS

    driver.wait_until(is_on, WAIT)


def test_the_loss_of_the_heads_node(cluster, tmp_path):
    logdir = tmp_path / "run"
    cluster.add(num_cpus=0)
    able = [cluster.add(num_cpus=4, resources={"head": 1}) for _ in range(2)]
    with cluster.run(logdir, "--run.save_every", "2") as driver:
        wait_for_training(cluster, driver, logdir)
        driver.wait_until(lambda: saved(logdir) > 0, WAIT)
        lost = cluster.node_of("head")
        assert lost in able
        moment = time.time()
        cluster.kill(lost)
        driver.wait_for("from the newest checkpoint", WAIT)
        wait_for_training(cluster, driver, logdir)
        seconds = time.time() - moment
        cluster.end_run(driver)
    print(json.dumps({"head_node_killed_to_training_s": round(seconds, 1)}))
    check_stored(logdir)
    assert seconds <= HEAD_SECONDS


def test_the_loss_of_an_env_node_where_there_is_room(cluster, tmp_path):
    logdir = tmp_path / "run"
    cluster.add(num_cpus=0, resources={"head": 1})
    for _ in range(2):
        cluster.add(num_cpus=4)
    with cluster.run(logdir) as driver:
        wait_for_training(cluster, driver, logdir)
        lost, lives = cluster.node_of("envs 0 to 1"), cluster.lives()
        moment = time.time()
        cluster.kill(lost)
        driver.wait_until(lambda: len(cluster.lives() - lives) >= 2, WAIT)
        seconds = time.time() - moment
        cluster.end_run(driver)
    print(json.dumps({"env_node_killed_to_acting_s": round(seconds, 1)}))
    check_stored(logdir)
    assert seconds <= ENV_SECONDS


def test_a_driver_that_is_killed_leaves_nothing(cluster, tmp_path):
    logdir = tmp_path / "run"
    cluster.add(num_cpus=0, resources={"head": 1})
    cluster.add(num_cpus=4)
    with cluster.run(logdir, "--run.save_every", "2") as driver:
        wait_for_training(cluster, driver, logdir)
        driver.wait_until(lambda: saved(logdir) > 0, WAIT)
    # Leaving the block has killed the driver.
    cluster.check_nothing_left()
    step = check_stored(logdir).manifest.meta["step"]
    with cluster.run(logdir) as driver:  # The same command resumes the run.
        wait_for_training(cluster, driver, logdir)
        cluster.end_run(driver)
    assert check_stored(logdir).manifest.meta["step"] > step
    assert not list(logdir.glob(".ray-keys*"))  # Not even the killed run's.


def updates_of(logdir, replica):
    """Returns the number of updates that a replica has logged last."""
    folder = logdir / "replicas" / f"{replica:05}" if replica else logdir
    path = folder / "metrics.jsonl"
    return metrics(folder).get("train/opt/updates", [0])[-1] if path.exists() else 0


def test_replicas_start_again_together_when_one_is_killed(cluster, tmp_path):
    logdir = tmp_path / "run"
    cluster.add(num_cpus=0)
    for _ in range(3):  # One more than is needed.
        cluster.add(num_cpus=1, resources={"head": 1})
    flags = ["--random_agent", "False", "--task", "gym_CartPole-v1", "--replicas", "2"]
    flags += ["--run.save_every", "2", "--run.report_every", "0"]

    def wait_for_updates(driver, count):
        for replica in range(2):
            driver.wait_until(
                lambda replica=replica: updates_of(logdir, replica) >= count,
                COMPILE_WAIT,
            )

    with cluster.run(logdir, *flags, envs=1) as driver:
        wait_for_updates(driver, 10)
        driver.wait_until(lambda: saved(logdir) > 0, WAIT)
        nodes = {cluster.node_of(f"head {replica}") for replica in range(2)}
        assert len(nodes) == 2
        moment = time.time()
        cluster.kill(cluster.node_of("head 1"))
        driver.wait_for("All heads are started again", WAIT)
        driver.wait_for("from the newest checkpoint", WAIT)
        driver.wait_for("from checkpoint", COMPILE_WAIT)
        before = updates_of(logdir, 0)  # Logged by the heads that were killed.
        wait_for_updates(driver, before + 10)
        seconds = time.time() - moment
        cluster.end_run(driver)
    print(json.dumps({"replica_killed_to_training_s": round(seconds, 1)}))
    assert updates_of(logdir, 0) == updates_of(logdir, 1) > before


def ray_command(cluster, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *arguments],
        env={**os.environ, **cluster.environ},
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_job_and_its_stop(cluster, tmp_path):
    logdir = tmp_path / "run"
    port = free_port()
    cluster.add(
        num_cpus=0,
        resources={"head": 1},
        include_dashboard=True,
        dashboard_port=port,
        dashboard_host="127.0.0.1",
    )
    cluster.add(num_cpus=4)
    address = ["--address", f"http://127.0.0.1:{port}"]
    variables = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}}
    command = [sys.executable, "-m", "dreamerv3.main", *small_run(logdir)]
    command += ["--run.envs", str(ENVS), "--run.steps", "1e9"]
    command += ["--ray.head_resources", "head=1"]
    submit = ["job", "submit", *address, "--submission-id", "some-run", "--no-wait"]
    submit += ["--runtime-env-json", json.dumps(variables), "--", *command]
    ray_command(cluster, *submit)
    begin = time.time()
    wait_until(lambda: len(cluster.acting(begin)) == ENVS, seconds=WAIT)
    listed = ["--format", "json", "--filter", "state=ALIVE"]
    actors = json.loads(ray_command(cluster, "list", "actors", *address, *listed))
    names = [actor["name"].rsplit(maxsplit=2)[0] for actor in actors if actor["name"]]
    assert {"head", "envs 0 to 1", "envs 2 to 3"} <= set(names)
    ray_command(cluster, "job", "stop", *address, "some-run")
    shown = ray_command(cluster, "job", "logs", *address, "some-run")
    assert "Finished after" in shown, shown
    assert "kills this run after" not in shown
    assert "(head pid=" in shown
    cluster.check_nothing_left()
    assert saved(logdir) > begin
    check_stored(logdir)


def test_ten_random_kills_of_nodes(cluster, tmp_path):
    logdir = tmp_path / "run"
    rng = random.Random(0)
    cluster.add(num_cpus=0)
    nodes = [cluster.add(num_cpus=4, resources={"head": 1}) for _ in range(2)]
    # The replay is so large that it evicts nothing.
    flags = [
        "--run.save_every",
        "2",
        "--replay.size",
        "1e6",
        "--replay.chunksize",
        "256",
    ]
    for role in ("agent", "env"):
        flags += [f"--run.restarts.{role}", "1000"]
    windows, heads, times = [], 0, []
    with cluster.run(logdir, *flags) as driver:
        wait_for_training(cluster, driver, logdir)
        driver.wait_until(lambda: saved(logdir) > 0, WAIT)
        for _ in range(KILLS):
            lost = rng.choice(nodes)
            is_head = lost == cluster.node_of("head")
            begin, moment = saved(logdir), time.time()
            cluster.kill(lost)
            nodes.remove(lost)
            nodes.append(cluster.add(num_cpus=4, resources={"head": 1}))
            heads += is_head
            driver.wait_until(partial(was_lost, driver, "Head", heads), WAIT)
            wait_for_training(cluster, driver, logdir)
            times.append(round(time.time() - moment, 1))
            if is_head:
                windows.append(
                    Window("head", begin, moment, time.time(), ("launcher",))
                )
            driver.wait_until(partial(was_saved, logdir, time.time()), WAIT)
        begin, moment = saved(logdir), time.time()
        cluster.end_run(driver)
    windows.append(Window("end", begin, moment, time.time(), ("end",)))
    stored = check_stored(logdir)
    losses = account(
        read_traces(cluster.traces), stored.counters(), windows, set(), SEQUENCE
    )
    result = {"kills": KILLS, "of_the_head": heads, "seconds": times}
    result |= {"made": losses.made, "stored": stored.counts["stored"]}
    print(json.dumps({**result, "lost": dict(losses.by_kind)}))
    assert 0 < heads < KILLS
    assert losses.unexplained == []
