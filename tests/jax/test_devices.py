"""Arrays lie on the configured devices, and results do not depend on these."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from program_testing import run_program, run_programs
from toy_testing import make_agent, result_of

from embodied.jax import devices
from embodied.jax.devices import Layout, make_mesh
from embodied.rpc import free_port

NAMES = st.integers(1, 6)


@given(NAMES, NAMES, NAMES, st.sampled_from([0, 1, 2, None]))
def test_one_size_of_a_mesh_follows_from_the_others(data, fsdp, tensor, hidden):
    sizes = [data, fsdp, tensor]
    text = [-1 if index == hidden else size for index, size in enumerate(sizes)]
    found = np.arange(data * fsdp * tensor)
    mesh = make_mesh(found, ",".join(map(str, text)))
    assert mesh.devices.shape == (data, fsdp, tensor)
    assert mesh.devices.flatten().tolist() == found.tolist()


@pytest.mark.parametrize(
    "shape", ["", "1", "1,1", "2,1,1", "-1,2,1", "-1,-1,1", "0,1,1", "-1,0,1", "a,1,1"]
)
def test_a_mesh_that_does_not_fit_is_an_error(shape):
    with pytest.raises(ValueError, match=r"jax\.train_mesh: expected three sizes"):
        make_mesh(jax.devices()[:1], shape)


def abstract_layout(data: int, fsdp: int, tensor: int) -> Layout:
    mesh = make_mesh(np.arange(data * fsdp * tensor), f"{data},{fsdp},{tensor}")
    return Layout(mesh, smallest=64)


def specs(layout: Layout, *shapes):
    return [layout._spec(np.zeros(shape)) for shape in shapes]


def test_weights_are_split_where_they_can_be():
    large, odd, small, vector = (8, 16), (7, 15), (2, 2), (4096,)
    whole = PartitionSpec()
    layout = abstract_layout(2, 1, 1)
    assert specs(layout, large, odd) == [PartitionSpec(None, None)] * 2
    layout = abstract_layout(1, 4, 1)
    assert specs(layout, large, (16, 8), odd, small, vector) == [
        PartitionSpec(None, "fsdp"),
        PartitionSpec("fsdp", None),
        PartitionSpec(None, None),
        whole,
        whole,
    ]
    layout = abstract_layout(1, 2, 2)
    assert specs(layout, large, (4, 8, 7)) == [
        PartitionSpec("fsdp", "tensor"),
        PartitionSpec(None, "fsdp", None),
    ]


def test_batches_are_split_over_data_and_fsdp():
    layout = abstract_layout(2, 3, 2)
    assert layout.parts == 6
    assert layout.rows.spec == PartitionSpec(("data", "fsdp"))


@pytest.mark.parametrize("indices", [(), (0, 0), (5,), (-1,)])
def test_devices_that_are_not_there_are_an_error(indices):
    with pytest.raises(ValueError, match=r"jax\.policy_devices: expected distinct"):
        devices.policy_layout(indices, "-1,1,1")
    with pytest.raises(ValueError, match=r"jax\.train_devices: expected distinct"):
        make_agent(train_devices=indices)


RESULTS = """
import json, sys
from embodied.jax.setup import setup
options = json.loads(sys.argv[1])
setup('cpu', **options.pop('setup'))
import toy_testing
toy_testing.print_results(**options)
"""


def parse(output: str) -> list[dict]:
    # Other lines come from libraries.
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def results(**options) -> list[dict]:
    return parse(run_program(RESULTS, json.dumps(options)))


def assert_same(one, other):
    for key in ("kernel", "loss", "actions", "direct"):
        np.testing.assert_allclose(one[key], other[key], rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_results_do_not_depend_on_the_devices():
    every = list(range(8))
    agents = [
        {},
        {"train_devices": every},
        {"train_devices": every, "train_mesh": "-1,4,1"},
        {"train_devices": every, "train_mesh": "2,2,2", "policy_mesh": "1,1,-1"},
        {"train_devices": every[2:], "policy_devices": [0, 1], "deterministic": True},
        {"train_devices": [3], "policy_devices": [5], "deterministic": True},
        {"train_devices": every, "policy_devices": every, "policy_mesh": "-1,2,1"},
    ]
    found = results(setup={"mock_devices": 8}, rows=24, agents=agents)
    assert len(found) == len(agents)
    for result in found[1:]:
        assert_same(found[0], result)
    trained_on = [result["trained_on"] for result in found]
    assert trained_on == [1, 8, 8, 8, 6, 1, 8]
    assert found[2]["spec"] in ([None, "fsdp"], ["fsdp", None])
    assert found[3]["spec"] == ["fsdp", "tensor"]
    assert found[4]["policy_on"] == [0, 1]
    assert found[5]["policy_on"] == [5]


@pytest.mark.timeout(300)
def test_two_processes_equal_one():
    address = f"localhost:{free_port()}"
    meshes = ("-1,1,1", "2,2,1", "1,4,1")
    agents = [{"train_devices": [0, 1], "train_mesh": mesh} for mesh in meshes]
    arguments = []
    for replica in range(2):
        hosts = {"replica": replica, "replicas": 2, "coordinator_address": address}
        setup = {**hosts, "mock_devices": 2, "expect_devices": 4}
        arguments.append((json.dumps({"setup": setup, "rows": 8, "agents": agents}),))
    printed = run_programs(RESULTS, arguments)
    single = result_of(rows=8, options={})
    for output in printed:
        found = parse(output)
        assert [result["trained_on"] for result in found] == [4, 4, 4]
        for result in found:
            assert_same(single, result)
