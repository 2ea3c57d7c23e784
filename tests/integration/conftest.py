"""Settings for runs in many processes."""

import pytest
from parallel_testing import shared_addresses
from program_testing import own_key_folder  # noqa: F401


@pytest.fixture
def addresses(tmp_path):
    """Flags that all commands of a run share: explicit addresses and a key file."""
    return shared_addresses(tmp_path)
