"""Settings for runs in many processes."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_key_folder(tmp_path_factory):
    """Keeps tests, and the programs that they start, from the keys of the user."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp() / "config"
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield
