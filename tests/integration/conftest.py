"""Settings for runs in many processes."""

import pytest

from embodied.rpc import Keys, free_port


@pytest.fixture(autouse=True, scope="session")
def own_key_folder(tmp_path_factory):
    """Keeps tests, and the programs that they start, from the keys of the user."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp() / "config"
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield


@pytest.fixture
def addresses(tmp_path):
    """Flags that all commands of a run share: explicit addresses and a key file."""
    Keys.generate().save(tmp_path / "keys.json")
    flags = ["--run.keyfile", tmp_path / "keys.json"]
    for role in ("actor", "replay", "logger"):
        flags += [f"--run.{role}_addr", f"localhost:{free_port()}"]
    return list(map(str, flags))
