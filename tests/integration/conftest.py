"""Settings for runs in many processes."""

import pytest
from program_testing import own_key_folder  # noqa: F401

from embodied.rpc import Keys, free_port


@pytest.fixture
def addresses(tmp_path):
    """Flags that all commands of a run share: explicit addresses and a key file."""
    Keys.generate().save(tmp_path / "keys.json")
    flags = ["--run.keyfile", tmp_path / "keys.json"]
    for role in ("actor", "replay", "logger"):
        flags += [f"--run.{role}_addr", f"localhost:{free_port()}"]
    return list(map(str, flags))
