"""The logdir of a run: its lock, and the configuration stored in it. Any process.

with preserve_config(config.logdir):
    prepare_logdir(config)
    ...                     # Trains, or fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator

import elements

from dreamerv3.cli.config import FILENAME, ConfigError, read_config
from dreamerv3.cli.schema import ENV_SCRIPTS, OWNING_SCRIPTS
from dreamerv3.cli.task_origin import sign_task
from embodied.checkpoint import CheckpointError, write_file
from embodied.run.saving import config_yaml

LOCK = ".lock"
LOCK_SECONDS = 0.5  # Between two attempts to take it.
MANIFEST = pathlib.Path("ckpt", "manifest.json")
# Permissions that others do not have on files of a run, by `logdir_access`.
MASKS = {"user": 0o077, "group": 0o027, "umask": 0o000}

_claimed: dict[pathlib.Path, int] = {}  # Descriptors of the locks of this process.


class LogdirInUse(ConfigError):
    """Another program writes to a logdir."""


def check_logdir(config: elements.Config) -> None:
    """Raises the errors of `prepare_logdir` that can be foreseen; changes nothing.

    For programs that take a while before they write.

    Raises:
      ConfigError: see `prepare_logdir`.
    """
    logdir = pathlib.Path(config.logdir)
    with as_config_errors(logdir):
        _check_task(logdir, config)
        folder = next(path for path in (logdir, *logdir.parents) if path.exists())
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} does not let this user write")
        owns = config.replica == 0 and config.script in OWNING_SCRIPTS
        if owns and (logdir / LOCK).exists() and logdir.resolve() not in _claimed:
            os.close(_lock(logdir))


def prepare_logdir(config: elements.Config) -> pathlib.Path:
    """Creates the logdir and writes `config.yaml` into it.

    Only the first replica writes it, and only programs that own the run lock the
    logdir. Hosts that only step environments do not change the file of the run.

    Returns:
      The logdir.

    Raises:
      ConfigError: the logdir belongs to another task, is damaged, in use, or cannot be
        written.
    """
    logdir = pathlib.Path(config.logdir)
    with as_config_errors(logdir):
        logdir.mkdir(parents=True, exist_ok=True)
        _check_task(logdir, config)
        if config.replica == 0 and config.script in OWNING_SCRIPTS:
            claim(logdir)
        if config.replica == 0 and config.script not in ENV_SCRIPTS:
            write_file(logdir, FILENAME, config_yaml(config))
            sign_task(logdir, config.task)
    return logdir


def _check_task(logdir: pathlib.Path, config: elements.Config) -> None:
    if not (logdir / FILENAME).exists():
        return
    task = read_config(logdir / FILENAME).task
    if task != config.task:
        raise ConfigError(
            f"logdir: {logdir} belongs to a run of task {task!r}, not "
            f"{config.task!r}. Choose another --logdir."
        )


@contextlib.contextmanager
def as_config_errors(logdir: pathlib.Path) -> Iterator[None]:
    """Turns errors of files into errors of the configuration."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"logdir: expected a folder that can be written, got {logdir} ({error}). "
            f"Choose another --logdir."
        ) from error


@contextlib.contextmanager
def limited_access(access: str) -> Iterator[None]:
    """Limits which users may read the files that this process and its children make.

    Args:
      access: a key of `MASKS`, which is added to the umask of the process.
    """
    before = os.umask(MASKS["user"])
    os.umask(before | MASKS[access])
    try:
        yield
    finally:
        os.umask(before)


def claim(logdir: pathlib.Path) -> None:
    """Locks a logdir until `preserve_config` or the end of this process.

    Raises:
      LogdirInUse: another program has locked it.
    """
    logdir = logdir.resolve()
    if logdir in _claimed:
        return
    lock = _lock(logdir)
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} of {socket.gethostname()}".encode())
    _claimed[logdir] = lock


def wait_until_free(logdir: pathlib.Path, seconds: float) -> None:
    """Waits until no program holds the lock of a logdir, at most `seconds`.

    The lock of a lost machine is free once the file server releases it.
    """
    deadline = time.monotonic() + seconds
    while (logdir / LOCK).exists() and time.monotonic() < deadline:
        try:
            os.close(_lock(logdir))
            return
        except LogdirInUse:
            time.sleep(LOCK_SECONDS)  # The locks of others can only be polled.


def _lock(logdir: pathlib.Path) -> int:
    """Returns the descriptor of the locked file; closing it ends the lock.

    It is not locked on a file system that has no locks.
    """
    lock = os.open(logdir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 200).decode(errors="replace") or "another program"
        os.close(lock)
        raise LogdirInUse(
            f"logdir: {logdir} is in use by {holder}. Wait until it has ended, or "
            "choose another --logdir."
        ) from None
    except OSError:
        pass  # A file system without locks.
    return lock


@contextlib.contextmanager
def preserve_config(logdir: str) -> Iterator[None]:
    """Ensures that the configuration of a logdir fits its newest checkpoint.

    A program that ends without a checkpoint of its own, because it could not continue
    the run or does something else there, leaves the configuration as it found it. At
    the end, this also releases all logdirs that the process has claimed.
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
            write_file(config.parent, FILENAME, before)


def _read(path: pathlib.Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
