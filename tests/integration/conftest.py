"""Settings for runs in many processes."""

import pytest
from parallel_testing import shared_addresses


@pytest.fixture
def addresses(tmp_path):
    """Flags that all commands of a run share: explicit addresses and a key file."""
    return shared_addresses(tmp_path)
