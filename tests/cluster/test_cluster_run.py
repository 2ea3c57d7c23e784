"""A run on a cluster of three nodes on one machine, one of which is killed."""

import time

import pytest
from cluster_testing import WAIT, check_stored
from parallel_testing import metrics

from dreamerv3.cli.config import read_config


@pytest.mark.timeout(300)
def test_a_run_survives_the_loss_of_an_env_node(cluster, tmp_path):
    logdir = tmp_path / "run"
    cluster.add(num_cpus=0, resources={"head": 1})
    lost = cluster.add(num_cpus=2)
    cluster.add(num_cpus=2)
    begin = time.time()
    with cluster.run(logdir) as driver:
        cluster.wait_for_actions(driver, 4, begin)
        assert cluster.roles().keys() >= {"head", "envs 0 to 1", "envs 2 to 3"}
        assert [path.stat().st_mode & 0o777 for path in keys(logdir)] == [0o600]

        cluster.kill(lost)
        moment = time.time()
        driver.wait_for(": lost (", WAIT)
        # There is no room: the run goes on with the others until a node joins.
        driver.wait_for("waiting for a node with CPU=2. 2 of 4 training", WAIT)
        assert len(cluster.acting(moment + 5.0)) == 2
        cluster.add(num_cpus=2)
        cluster.wait_for_actions(driver, 4, time.time())

        cluster.end_run(driver)
        # Lines come under the names of their bundles.
        assert "(head pid=" in driver.output()
        assert "Bottleneck: " in driver.output()
    assert keys(logdir) == []
    assert check_stored(logdir).manifest.meta["step"] > 0
    assert "usage/env/workers" in metrics(logdir)
    config = read_config(logdir / "config.yaml")
    assert config.script == "ray"
    assert config.run.keyfile == ""


def keys(logdir):
    return list(logdir.glob(".ray-keys*"))
