"""Keys of a run on a cluster: made by the driver, kept off the network. Any process.

The key file lies in the logdir, readable by this user alone, and nodes that see it
read it there. A node that sees it also has the same logdir as the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping

from dreamerv3.cli.config import ConfigError
from embodied.rpc import Keys

PATTERN = ".ray-keys-*.json"
_TRUE = ("1", "true")


@dataclasses.dataclass(frozen=True)
class RunKeys:
    """The keys of a run, and how nodes get them.

    Attributes:
      path: of the key file.
      digest: of its content.
      keys: for nodes that do not see the file.
      sent: whether the keys may be sent through Ray.
    """

    path: str
    digest: str
    keys: Keys = dataclasses.field(repr=False)
    sent: bool

    def for_node(self, sees: bool, node: str, logdir: str) -> Keys | None:
        """Returns the keys that a node has to be sent; None if it reads the file.

        Args:
          sees: whether the node sees the file.
          node: its name.
          logdir: of the run.

        Raises:
          ConfigError: the keys would cross the network in the clear.
        """
        if sees:
            return None
        if self.sent:
            return self.keys
        raise ConfigError(
            f"logdir: expected a folder that all nodes share, got {logdir}, which "
            f"{node} does not see: the keys of the run would cross the network in the "
            "clear. Mount the folder there, switch on Ray's TLS (RAY_USE_TLS=1), or "
            "declare the network trusted: --ray.trusted_network True."
        )


@contextlib.contextmanager
def make_keys(
    logdir: pathlib.Path, keyfile: str, trusted: bool, environ: Mapping[str, str]
) -> Iterator[RunKeys]:
    """Makes the keys of a run and removes their file after the body.

    Args:
      logdir: of the run.
      keyfile: key file of the user, which is used instead and kept; may be empty.
      trusted: whether the user trusts the network.
      environ: environment variables, which tell whether Ray encrypts.
    """
    path = pathlib.Path(keyfile)
    if not keyfile:
        path = logdir / PATTERN.replace("*", secrets.token_hex(8))
        Keys.generate().save(path)
    try:
        encrypted = environ.get("RAY_USE_TLS", "").lower() in _TRUE
        keys = Keys.load(path)
        yield RunKeys(str(path), digest(path), keys, trusted or encrypted)
    finally:
        if not keyfile:
            path.unlink(missing_ok=True)


def digest(path: str | os.PathLike[str]) -> str:
    """Returns the digest of a file, or an empty text if it cannot be read."""
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def remove_keyfiles(logdir: pathlib.Path) -> None:
    """Removes the key files of a logdir, which no run may be using any more."""
    for path in logdir.glob(PATTERN):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def private_keyfile(keys: Keys | None, path: str) -> Iterator[str]:
    """Yields the path of a key file for this process and its descendants.

    Args:
      keys: the keys that were sent to this node; None if it sees the key file.
      path: of that file.
    """
    if keys is None:
        yield path
        return
    # In memory, so that nothing is left on this node, however its processes end.
    with open(os.memfd_create("keys"), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        json.dump(dataclasses.asdict(keys), file)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
