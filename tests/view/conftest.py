"""Runs that several tests share."""

from __future__ import annotations

import pytest
from view_testing import make_dreamer


@pytest.fixture(scope="session")
def dreamer(tmp_path_factory):
    """The logdir of an ended run with a model and a replay."""
    folder = tmp_path_factory.mktemp("runs") / "dreamer"
    make_dreamer(folder)
    return folder
