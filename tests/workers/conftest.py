"""Fixtures of the tests of workers."""

from __future__ import annotations

import pytest
from process_testing import Line


@pytest.fixture
def line():
    with Line() as line:
        yield line
