"""Runs on clusters of several nodes on one machine."""

import pytest
from parallel_testing import Saved, metrics, wait_until

ENV_SECONDS = 30.0  # After which envs act again whose node was killed.


def acting(logdir):
    """The number of environments that have acted lately."""
    found = metrics(logdir).get("parallel/envs", [])
    return found[-1] if found else 0


@pytest.mark.timeout(300)
def test_a_run_survives_the_loss_of_an_env_node(cluster, tmp_path):
    logdir = tmp_path / "run"
    cluster.add(num_cpus=0, resources={"head": 1})
    first = cluster.add(num_cpus=2)
    cluster.add(num_cpus=4)
    with cluster.run(logdir) as driver:
        driver.wait_for_envs(logdir, 4)
        assert cluster.roles().keys() >= {"head", "envs 0 to 1", "envs 2 to 3"}
        cluster.kill(first)
        driver.wait_for("lost")
        wait_until(lambda: driver.output().count("Envs") >= 4, ENV_SECONDS, driver)
        driver.terminate()
        assert driver.wait() == 0, driver.output()
        assert "Ended well" in driver.output()
    print(driver)
    assert Saved(logdir).step > 0
    assert not cluster.roles()
    assert not list(logdir.glob(".ray-keys*"))
