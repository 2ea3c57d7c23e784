"""A run on a cluster of three nodes on one machine, one of which is killed."""

import contextlib
import secrets
import time

import psutil
import pytest
from cluster_testing import MARK, WAIT, check_stored, marked_processes, small_run
from parallel_testing import Program, metrics
from waiting_testing import wait_until

from benchmarks.chaos.numbered_env import TRACES
from dreamerv3.cli.config import read_config


@pytest.mark.timeout(300)
def test_a_run_goes_on_without_an_env_node_that_is_lost(cluster, tmp_path):
    logdir = tmp_path / "run"
    cluster.add(num_cpus=2, resources={"head": 1})
    lost = cluster.add(num_cpus=2)
    begin = time.time()
    with cluster.run(logdir) as driver:
        cluster.wait_for_actions(driver, 4, begin)
        assert cluster.roles().keys() >= {"head", "envs 0 to 1", "envs 2 to 3"}
        assert [path.stat().st_mode & 0o777 for path in keys(logdir)] == [0o600]

        cluster.kill(lost)
        driver.wait_for(": lost (", WAIT)
        cluster.wait_for_actions(driver, 2, time.time())

        cluster.end_run(driver)
        # Lines are prefixed with the names of their bundles.
        assert "(head pid=" in driver.output()
    check_ended(logdir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_env_node_is_replaced_when_another_joins(cluster, tmp_path):
    logdir = tmp_path / "run"
    cluster.add(num_cpus=0, resources={"head": 1})
    lost = cluster.add(num_cpus=2)
    cluster.add(num_cpus=2)
    begin = time.time()
    with cluster.run(logdir) as driver:
        cluster.wait_for_actions(driver, 4, begin)
        cluster.kill(lost)
        moment = time.time()
        driver.wait_for(": lost (", WAIT)
        # There is no room: the run goes on with the other envs until a node joins.
        driver.wait_for("waiting for a node with CPU=2. 2 of 4 training", WAIT)
        assert len(cluster.acting(moment + 5.0)) == 2
        cluster.add(num_cpus=2)
        cluster.wait_for_actions(driver, 4, time.time())

        cluster.end_run(driver)
        assert "Bottleneck: " in driver.output()
    check_ended(logdir)


def check_ended(logdir):
    """Checks what a run on a cluster leaves in its logdir."""
    assert keys(logdir) == []
    assert check_stored(logdir).manifest.meta["step"] > 0
    assert "usage/env/workers" in metrics(logdir)
    config = read_config(logdir / "config.yaml")
    assert config.script == "ray"
    assert config.run.keyfile == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_installed")
def test_ray_is_started_here_where_there_is_no_address(tmp_path):
    logdir, mark = tmp_path / "run", secrets.token_hex(8)
    traces = tmp_path / "traces"
    traces.mkdir()
    environ = {"HOME": str(tmp_path), "RAY_ADDRESS": "", MARK: mark}
    argv = [*small_run(logdir), "--run.envs", "3", "--ray.dashboard", "False"]
    with Program(*argv, environ={**environ, TRACES: str(traces)}) as driver:
        driver.wait_for("Bottleneck", WAIT)
        assert "Started Ray on this machine at 127.0.0.1:" in driver.output()
        # Ray needs a token that only this user can read, and listens only at loopback.
        token = tmp_path / ".ray" / "auth_token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert listening(mark) == {"127.0.0.1"}
        driver.interrupt()
        assert driver.wait(WAIT) == 0, driver.output()
        assert "Finished after" in driver.output()
    wait_until(lambda: not marked_processes(mark), seconds=WAIT)
    assert check_stored(logdir).manifest.meta["step"] > 0


def listening(mark):
    """The addresses at which processes with a mark listen."""
    found = set()
    for process in marked_processes(mark):
        with contextlib.suppress(psutil.Error):
            for link in process.net_connections("tcp"):
                if link.status == psutil.CONN_LISTEN:
                    found.add(link.laddr.ip.removeprefix("::ffff:"))
    return found


def keys(logdir):
    return list(logdir.glob(".ray-keys*"))
