"""Who writes to a logdir, and which configuration it keeps. Any process.

with kept_config(logdir):
    claim(logdir)
    ...                     # Trains, or fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

FILENAME = "config.yaml"
LOCK = ".lock"
MANIFEST = pathlib.Path("ckpt", "manifest.json")

_claimed: dict[pathlib.Path, int] = {}  # Descriptors of locks that this process holds.


class LogdirInUse(Exception):
    """Another program writes to a logdir."""


def claim(logdir: pathlib.Path) -> None:
    """Keeps other programs out of a logdir, until `kept_config` or this process ends.

    Raises:
      LogdirInUse: another one has claimed it.
    """
    logdir = logdir.resolve()
    if logdir in _claimed:
        return
    lock = os.open(logdir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 200).decode(errors="replace") or "another program"
        os.close(lock)
        raise LogdirInUse(
            f"{logdir} is in use by {holder}. Wait until it has ended, or choose "
            "another --logdir."
        ) from None
    except OSError:  # A file system without locks.
        os.close(lock)
        return
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} of {socket.gethostname()}".encode())
    _claimed[logdir] = lock


@contextlib.contextmanager
def kept_config(logdir: str) -> Iterator[None]:
    """Lets the configuration of a logdir stay that of its newest checkpoint.

    A program that ends without a checkpoint of its own, since it could not continue the
    run or has other business there, leaves the configuration as it found it.
    """
    config, manifest = (pathlib.Path(logdir, x) for x in (FILENAME, MANIFEST))
    before, saved = _read(config), _read(manifest)
    try:
        yield
    finally:
        while _claimed:
            os.close(_claimed.popitem()[1])
        same = _read(manifest) == saved
        if before and saved and same and _read(config) != before:
            # Here, because help and errors should not wait for the libraries behind it.
            from embodied.checkpoint import write_file

            write_file(config.parent, FILENAME, before)


def _read(path: pathlib.Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
