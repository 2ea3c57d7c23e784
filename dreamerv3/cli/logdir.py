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
import time
from collections.abc import Iterator

import elements

from dreamerv3.cli.config import FILENAME, ConfigError, read_config
from dreamerv3.cli.schema import ENV_SCRIPTS, OWNING_SCRIPTS
from dreamerv3.cli.task_origin import sign_task

LOCK = ".lock"
LOCK_SECONDS = 0.5  # Between two questions whether it is free.
MANIFEST = pathlib.Path("ckpt", "manifest.json")
# What others may not do with files of a run, by `logdir_access`.
MASKS = {"user": 0o077, "group": 0o027, "umask": 0o000}

_claimed: dict[pathlib.Path, int] = {}  # Descriptors of locks that this process holds.


class LogdirInUse(Exception):
    """Another program writes to a logdir."""


def check_logdir(config: elements.Config) -> None:
    """Raises what `prepare_logdir` would, as far as it can be known; changes nothing.

    For programs that take a while before they write.

    Raises:
      ConfigError: see `prepare_logdir`.
    """
    logdir = pathlib.Path(config.logdir)
    with _clear_errors(logdir):
        _check_task(logdir, config)
        folder = next(path for path in (logdir, *logdir.parents) if path.exists())
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} does not let this user write")
        owns = config.replica == 0 and config.script in OWNING_SCRIPTS
        if owns and (logdir / LOCK).exists() and logdir.resolve() not in _claimed:
            with contextlib.suppress(NotImplementedError):
                os.close(_lock(logdir))


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
    from embodied.checkpoint import write_file
    from embodied.run.saving import config_yaml

    logdir = pathlib.Path(config.logdir)
    with _clear_errors(logdir):
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
def _clear_errors(logdir: pathlib.Path) -> Iterator[None]:
    """Turns errors of files into errors of the configuration."""
    from embodied.checkpoint import CheckpointError

    try:
        yield
    except LogdirInUse as error:
        raise ConfigError(f"logdir: {error}") from error
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"logdir: expected a folder that can be written, got {logdir} ({error}). "
            f"Choose another --logdir."
        ) from error


@contextlib.contextmanager
def limited_access(access: str) -> Iterator[None]:
    """Decides who may read the files that this process and its children make.

    Args:
      access: a key of `MASKS`. The umask of the process holds in any case.
    """
    before = os.umask(MASKS["user"])
    os.umask(before | MASKS[access])
    try:
        yield
    finally:
        os.umask(before)


def claim(logdir: pathlib.Path) -> None:
    """Keeps other programs out of a logdir, until `kept_config` or this process ends.

    Raises:
      LogdirInUse: another one has claimed it.
    """
    logdir = logdir.resolve()
    if logdir in _claimed:
        return
    try:
        lock = _lock(logdir)
    except NotImplementedError:  # A file system without locks.
        return
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} of {socket.gethostname()}".encode())
    _claimed[logdir] = lock


def wait_until_free(logdir: pathlib.Path, seconds: float) -> None:
    """Waits until no program holds a logdir, or for so many seconds.

    The lock of a machine that is lost goes when the file server gives it up.
    """
    deadline = time.monotonic() + seconds
    while (logdir / LOCK).exists() and time.monotonic() < deadline:
        try:
            os.close(_lock(logdir))
            return
        except NotImplementedError:
            return
        except LogdirInUse:
            time.sleep(LOCK_SECONDS)  # Locks that others hold can only be asked for.


def _lock(logdir: pathlib.Path) -> int:
    """Returns the descriptor of the locked file; closing it ends the lock."""
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
    except OSError as error:
        os.close(lock)
        raise NotImplementedError("The file system has no locks.") from error
    return lock


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
