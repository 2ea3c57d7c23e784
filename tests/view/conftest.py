"""Runs that several tests look at."""

from __future__ import annotations

import pytest
from view_testing import make_dreamer


@pytest.fixture(scope="session")
def dreamer(tmp_path_factory):
    """The logdir of a run with a model and a replay, which has ended."""
    folder = tmp_path_factory.mktemp("runs") / "dreamer"
    make_dreamer(folder)
    return folder
