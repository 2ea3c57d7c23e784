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
from typing import IO

FILENAME = "config.yaml"
LOCK = ".lock"
MANIFEST = pathlib.Path("ckpt", "manifest.json")

_claimed: dict[pathlib.Path, IO[str]] = {}  # Locks of this process.


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
    file = (logdir / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another program"
        file.close()
        raise LogdirInUse(
            f"{logdir} is in use by {holder}. Wait until it has ended, or choose "
            "another --logdir."
        ) from None
    except OSError:  # A file system without locks.
        file.close()
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} of {socket.gethostname()}")
    file.flush()
    _claimed[logdir] = file


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
        for file in _claimed.values():
            file.close()
        _claimed.clear()
        same = _read(manifest) == saved
        if before and saved and same and _read(config) != before:
            # Here, because help and errors should not wait for the libraries behind it.
            from embodied.checkpoint import write_file

            write_file(config.parent, FILENAME, before)


def _read(path: pathlib.Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
