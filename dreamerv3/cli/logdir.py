"""The logdir of a run: its lock, and the configuration that it keeps. Any process.

with kept_config(config.logdir):
    prepare_logdir(config)
    ...                     # Trains, or fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

import elements

from dreamerv3.cli.config import FILENAME, ConfigError, read_config
from dreamerv3.cli.schema import ENV_SCRIPTS, OWNING_SCRIPTS

LOCK = ".lock"
MANIFEST = pathlib.Path("ckpt", "manifest.json")

_claimed: dict[pathlib.Path, int] = {}  # Descriptors of locks that this process holds.


class LogdirInUse(Exception):
    """Another program writes to a logdir."""


def prepare_logdir(config: elements.Config) -> pathlib.Path:
    """Creates the logdir and writes `config.yaml` into it.

    Only the first replica of a program that owns the run writes; hosts that merely
    step environments leave the file of the run as it is.

    Returns:
      The logdir.

    Raises:
      ConfigError: it belongs to another task, is damaged, in use, or cannot be
        written.
    """
    # Here, because help and errors should not wait for the libraries behind it.
    from embodied.checkpoint import CheckpointError, write_file
    from embodied.run.saving import config_yaml

    logdir = pathlib.Path(config.logdir)
    try:
        logdir.mkdir(parents=True, exist_ok=True)
        if (logdir / FILENAME).exists():
            task = read_config(logdir / FILENAME).task
            if task != config.task:
                raise ConfigError(
                    f"logdir: {logdir} belongs to a run of task {task!r}, not "
                    f"{config.task!r}. Choose another --logdir."
                )
        if config.replica == 0 and config.script in OWNING_SCRIPTS:
            claim(logdir)
        if config.replica == 0 and config.script not in ENV_SCRIPTS:
            write_file(logdir, FILENAME, config_yaml(config))
    except LogdirInUse as error:
        raise ConfigError(f"logdir: {error}") from error
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"logdir: expected a folder that can be written, got {logdir} ({error}). "
            f"Choose another --logdir."
        ) from error
    return logdir


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
    """Keeps the configuration of a logdir that of its newest checkpoint.

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
