"""Checks of the nodes of a cluster before a run starts there."""

import logging
import types

import pytest

from dreamerv3.cli.config import ConfigError, load_config
from dreamerv3.cluster import ray_session
from dreamerv3.cluster.ray_session import check_nodes

HEAD = {"head": 1.0}


def nodes_with(*resources):
    """Fakes Ray with live nodes a, b and so on of these resources, and a dead one."""
    nodes = [
        {
            "NodeID": name,
            "Alive": True,
            "Resources": given,
            "NodeManagerHostname": name,
            "NodeManagerAddress": "10.0.0.1",
        }
        for name, given in zip("abc", resources)
    ]
    gone = {**nodes[0], "NodeID": "gone", "Alive": False}
    return types.SimpleNamespace(nodes=lambda: [*nodes, gone])


@pytest.fixture
def check(monkeypatch, caplog, tmp_path):
    """Checks nodes, of which those in `seeing` see the logdir; returns the messages."""

    def run(ray, seeing="abc", replicas=1, address="auto"):
        monkeypatch.setattr(ray_session, "_nodes_that_see", lambda *_: set(seeing))
        flags = ["--logdir", str(tmp_path), "--replicas", str(replicas)]
        config = load_config([*flags, "--ray.address", address])
        with caplog.at_level(logging.INFO, "embodied.cluster"):
            check_nodes(ray, config, None, HEAD)
        return "\n".join(caplog.messages)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return run


def test_nothing_is_said_where_a_head_has_two_nodes(check):
    assert check(nodes_with(HEAD, HEAD)) == ""


def test_a_head_that_could_go_on_nowhere_else_is_told(check):
    assert check(nodes_with(HEAD, {})) == (
        "Only a (10.0.0.1) can hold head=1: if one is lost, the run waits for another."
    )


def test_nodes_that_could_take_over_need_one_logdir(check, tmp_path):
    with pytest.raises(ConfigError) as info:
        check(nodes_with(HEAD, HEAD), seeing="a")
    assert f"got {tmp_path}, which b (10.0.0.1) does not see" in str(info.value)


def test_one_node_may_have_a_logdir_of_its_own(check):
    shown = check(nodes_with(HEAD, {}), seeing="b")
    assert shown.startswith("The logdir is a folder of a (10.0.0.1) alone")


def test_a_cluster_without_room_may_get_it_later(check):
    assert check(nodes_with({}, {})) == (
        "Nodes that can hold head=1: 0 of 1 needed. The run waits for more nodes."
    )


def test_replicas_wait_for_a_node_each(check):
    assert "1 of 2 needed" in check(nodes_with(HEAD, {}), replicas=2)
    assert "Only" not in check(nodes_with(HEAD, HEAD, HEAD), replicas=2)


def test_replicas_need_more_than_this_machine(check):
    with pytest.raises(ConfigError, match="got 2 and one machine"):
        check(nodes_with(HEAD), replicas=2, address="")


def test_this_machine_needs_room_for_the_head(check):
    with pytest.raises(ConfigError, match=r"ray\.head_resources"):
        check(nodes_with({"CPU": 2.0}), address="")
