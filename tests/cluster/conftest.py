"""Fixtures for runs on clusters."""

import importlib.util
import pathlib
import sys

import pytest

# The helpers that start runs are in tests/integration.
sys.path.append(str(pathlib.Path(__file__).parent.with_name("integration")))


@pytest.fixture
def ray_installed():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: the extra `ray` has it.")


@pytest.fixture
def cluster(tmp_path, ray_installed):
    """An empty Ray cluster on this machine, which ends with the test."""
    from cluster_testing import LocalCluster

    with LocalCluster(tmp_path) as made:
        yield made
