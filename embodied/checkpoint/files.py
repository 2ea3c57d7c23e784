"""Files that are written whole or not at all, and read with proof. Any process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

Root = str | os.PathLike[str]
Buffer = Any  # Anything with the buffer protocol, contiguous in C order.

# With the SHA extensions of current CPUs sha256 hashes 1.7 GB/s, blake2b 0.9 GB/s.
DIGEST_PREFIX = "sha256:"
_RECORD_FIELDS = {"path": str, "size": int, "digest": str, "required": bool}
_DIGEST = re.compile(DIGEST_PREFIX + "[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.partial-save")
_VERIFIED_SECONDS = 600.0  # For which another process's word is taken.
_SLICE = 1 << 22  # Bytes that are hashed and then written while still in the cache.
# What a save leaves on the disk, for metrics and for what other roles save meanwhile: a
# share of its own bytes, and this at least.
_SPARE_SHARE, _SPARE_BYTES = 0.1, 1_000_000

logger = logging.getLogger("embodied.checkpoint")


class CheckpointError(RuntimeError):
    """Something could not be saved or loaded; the message says what and why."""


class DiskTooSmallError(CheckpointError):
    """The disk would have no room for a checkpoint even if it were empty."""


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file that a manifest lists.

    Args:
      path: where it lies, relative to the root, with forward slashes.
      size: bytes.
      digest: 'sha256:' and 64 hexadecimal digits.
      required: whether a manifest is useless without it. Others, such as replay
        chunks, are kept as long as a manifest lists them, but their reader decides
        what to do when one is damaged.
    """

    path: str
    size: int
    digest: str
    required: bool = True

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain values, for JSON or a remote call."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> FileRecord:
        """Returns the record that `to_json` described; checks every field."""
        if not isinstance(data, dict) or data.keys() != _RECORD_FIELDS.keys():
            raise CheckpointError(
                f"A file record has the fields {', '.join(_RECORD_FIELDS)}, got "
                f"{data!r:.200}."
            )
        record = cls(**data)
        record.check()
        return record

    def check(self) -> None:
        """Raises CheckpointError unless every field is as it should be."""
        for name, kind in _RECORD_FIELDS.items():
            if type(getattr(self, name)) is not kind:
                raise CheckpointError(
                    f"A file record expected {kind.__name__} as {name}, "
                    f"got {getattr(self, name)!r:.200}."
                )
        check_path(self.path)
        if self.size < 0 or not _DIGEST.fullmatch(self.digest):
            raise CheckpointError(
                "A file record expected a size of at least 0 and a digest like "
                f"{DIGEST_PREFIX}…, got {self.size} and {self.digest!r:.100}."
            )


class HashedReader:
    """Reads a file once, from front to back, and hashes what it reads.

    with HashedReader(root, path) as reader:
      reader.fill(view)     # As often as needed.
      reader.check(record)  # At the end.
    """

    def __init__(self, root: Root, path: str):
        self._path = path
        target = locate(root, path)
        try:
            # Opening a pipe would wait for a writer, so look at what it is first.
            if not stat.S_ISREG(target.stat().st_mode):
                raise CheckpointError(f"Expected a regular file at {target}.")
            self._file = open(target, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            raise CheckpointError(f"{target} is missing.") from None
        except OSError as error:
            raise CheckpointError(f"Cannot read {target}: {error}.") from error
        self.size = os.fstat(self._file.fileno()).st_size
        self._hash = hashlib.sha256()
        self._done = 0

    def __enter__(self) -> HashedReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def fill(self, view: memoryview) -> None:
        """Reads the next bytes, as many as `view` (of format 'B') holds."""
        start = 0
        while start < len(view):
            part = view[start : start + _SLICE]
            try:
                count = self._file.readinto(part)
            except OSError as error:
                raise CheckpointError(f"Cannot read {self._path}: {error}.") from error
            if not count:
                raise CheckpointError(
                    f"{self._path} is truncated: it ends after {self._done} bytes."
                )
            self._hash.update(part[:count])
            self._done += count
            start += count

    def check(self, record: FileRecord) -> None:
        """Raises if the file is not the one of `record`; reads what is left of it."""
        if self.size != record.size:
            raise CheckpointError(
                f"{self._path} is damaged: it has {self.size} bytes, "
                f"expected {record.size}."
            )
        rest = memoryview(bytearray(min(_SLICE, self.size - self._done)))
        while self._done < self.size:
            self.fill(rest[: self.size - self._done])
        found = DIGEST_PREFIX + self._hash.hexdigest()
        if found != record.digest:
            raise CheckpointError(
                f"{self._path} is damaged: its digest is {found}, "
                f"expected {record.digest}."
            )


def write_file(
    root: Root, path: str, buffers: Buffer | Iterable[Buffer], required: bool = True
) -> FileRecord:
    """Writes a file that appears under its name only when it is whole and on disk.

    Args:
      root: folder that `path` is relative to.
      path: where to write, with forward slashes. A file there is replaced at once.
      buffers: the contents, as one or as an iterable of buffers, such as bytes or
        contiguous arrays; each is written without a copy.
      required: goes into the record.

    Raises:
      CheckpointError: it could not be written; nothing is left behind.
    """
    if isinstance(buffers, bytes | bytearray | memoryview):
        buffers = [buffers]
    target = locate(root, path)
    temporary = temporary_beside(target)
    try:
        _make_folder(target.parent)
        try:
            size, digest = _write_synced(temporary, buffers)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(_explain(error, target)) from error
    return FileRecord(path, size, digest, required)


def temporary_beside(target: Path) -> Path:
    """Returns a new name in a file's folder, of a kind that `Checkpoint.clean` removes.

    The folder is the file's, so that `os.replace` can give it its name at once.
    """
    return target.with_name(f".{secrets.token_hex(8)}.partial-save")


def read_file(root: Root, path: str, record: FileRecord | None = None) -> bytearray:
    """Returns the contents of a file, checked against `record` where given."""
    with HashedReader(root, path) as reader:
        data = bytearray(reader.size)
        reader.fill(memoryview(data))
        if record is not None:
            reader.check(record)
    return data


def seal(content: Any) -> bytes:
    """Returns JSON that carries the digest of its own content."""
    # Surrogates are legal in a str, and this is how the two of a pair stay two.
    text = json.dumps(
        content, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode("utf-8", "surrogatepass")
    digest = DIGEST_PREFIX + hashlib.sha256(text).hexdigest()
    return b'{"digest":"%s","content":%s}' % (digest.encode(), text)


def unseal(path: str, data: bytes | bytearray) -> Any:
    """Returns the content that `seal` was given; `path` is for the error."""
    sealed = re.fullmatch(
        rb'\{"digest":"(sha256:[0-9a-f]{64})","content":(.*)\}', data, re.DOTALL
    )
    if not sealed:
        raise CheckpointError(
            f"{path} is damaged: expected a JSON object with digest and content, "
            f"got {bytes(data[:40])!r}."
        )
    found = DIGEST_PREFIX + hashlib.sha256(sealed[2]).hexdigest()
    if found.encode() != sealed[1]:
        raise CheckpointError(
            f"{path} is damaged: its digest does not fit its content."
        )
    try:
        return json.loads(sealed[2].decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold JSON: {error}.") from error


def find_damage(root: Root, record: FileRecord, digest: bool = True) -> str | None:
    """Returns what is wrong with a listed file; None where it is whole.

    Without `digest` only the size is compared, which reads nothing.
    """
    try:
        with HashedReader(root, record.path) as reader:
            if digest or reader.size != record.size:
                reader.check(record)
    except CheckpointError as error:
        return str(error)
    return None


class SharedVerification:
    """Verifies files once for all processes that start together. Any process.

        with SharedVerification(root, path) as verification:
          problem = verification.find_damage(record)

    The first process reads the files and notes which are whole; the others wait for
    it and take its word for files of the same size, time and inode. Rot on the disk
    changes none of these, so a note is only taken for a while, and whoever reads a
    file verifies it once more. The kernel unlocks the notes of a process that dies.

    Args:
      root: folder that paths are relative to.
      path: of the notes.
    """

    def __init__(self, root: Root, path: str):
        self._root = root
        self._path = Path(root, path)
        self._fd = -1
        self._notes: dict[str, list[Any]] = {}

    def __enter__(self) -> SharedVerification:
        # Where there can be no notes, every process reads all files itself.
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._notes = self._read()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def find_damage(self, record: FileRecord) -> str | None:
        """Returns what is wrong with a listed file; None where it is whole."""
        facts = self._facts(record)
        if facts is not None:
            noted, seconds = self._notes.get(record.path, (None, 0.0))
            if noted == facts and abs(time.time() - seconds) < _VERIFIED_SECONDS:
                return None
        damage = find_damage(self._root, record)
        if damage is None and facts is not None:
            self._notes[record.path] = [facts, time.time()]
            self._write()
        return damage

    def _facts(self, record: FileRecord) -> list[Any] | None:
        try:
            status = locate(self._root, record.path).stat()
        except (OSError, CheckpointError):
            return None
        return [record.digest, status.st_size, status.st_mtime_ns, status.st_ino]

    def _read(self) -> dict[str, list[Any]]:
        try:
            notes = json.loads(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
            return {
                str(path): [facts, float(at)] for path, (facts, at) in notes.items()
            }
        except (AttributeError, TypeError, ValueError):  # A kill came while it wrote.
            return {}

    def _write(self) -> None:
        if self._fd < 0:
            return
        now = time.time()
        recent = {
            path: note
            for path, note in self._notes.items()
            if abs(now - note[1]) < _VERIFIED_SECONDS
        }
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(recent).encode(), 0)


def check_path(path: str) -> None:
    """Raises unless `path` is relative, in its shortest form, and stays inside."""
    plain = (
        path not in ("", ".")
        and "\0" not in path
        and not path.startswith("/")
        and ".." not in path.split("/")
        and str(PurePosixPath(path)) == path
    )
    if not plain:
        raise CheckpointError(
            f"Expected a path relative to the root, without '..', got {path!r:.200}."
        )


def locate(root: Root, path: str) -> Path:
    """Returns where `path` lies; no part of it below the root may be a link."""
    check_path(path)
    try:
        target = Path(root).resolve() / path
        linked = target.resolve() != target
    except (OSError, RuntimeError, UnicodeError) as error:  # E.g. a loop of links.
        raise CheckpointError(f"Cannot use the path {path!r}: {error}.") from error
    if linked:
        raise CheckpointError(
            f"{path!r} passes through a symbolic link below {root}. Links could lead "
            "anywhere, so use the folder itself, or link the whole root."
        )
    return target


def is_temporary(path: str) -> bool:
    """Whether this is a file that `write_file` has not finished."""
    return _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None


def list_files(root: Root, folder: str = "") -> list[str]:
    """Returns all files below `folder`, relative to the root; follows no links."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise CheckpointError(f"Cannot list a folder: {error}.") from error

    found = []
    for base, _, names in os.walk(Path(root, folder), onerror=refuse):
        below = Path(base).relative_to(root)
        found += [(below / name).as_posix() for name in names]
    return found


def delete(root: Root, path: str) -> bool:
    """Removes a file; returns whether it is gone, and warns if it is not."""
    try:
        locate(root, path).unlink(missing_ok=True)
    except (OSError, CheckpointError) as error:
        logger.warning("Cannot remove %s: %s", path, error)
        return False
    return True


def require_space(folder: Root, needed: int, spare: int | None = None) -> None:
    """Raises unless the disk has room for `needed` bytes and `spare` more.

    By default these are in proportion to what is needed, so that small disks can be
    used, too.

    Raises:
      DiskTooSmallError: there could never be room.
      CheckpointError: there is none now.
    """
    if spare is None:
        spare = max(_SPARE_BYTES, int(_SPARE_SHARE * needed))
    usage = disk_usage(folder)
    words = f"a part of the checkpoint needs {_megabytes(needed)} and is to leave "
    words += _megabytes(spare)
    if usage.total < needed + spare:
        raise DiskTooSmallError(
            f"The disk that holds {folder} has {_megabytes(usage.total)} in all, while "
            f"{words}: the run could never be saved there. Choose another --logdir."
        )
    if usage.free < needed + spare:
        raise CheckpointError(
            f"Too little space on the disk that holds {folder}: "
            f"{_megabytes(usage.free)} are free, while {words}. Free some space, or "
            "keep fewer checkpoints."
        )


def disk_usage(folder: Root) -> Any:
    """Returns `total` and `free` bytes of the disk that a folder is on, or will be."""
    path = Path(folder).absolute()
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path)
    except OSError as error:
        raise CheckpointError(f"Cannot look at {folder}: {error}.") from error


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.{0 if count >= 1e7 else 1}f} MB"


def _write_synced(path: Path, buffers: Iterable[Buffer]) -> tuple[int, str]:
    hasher = hashlib.sha256()
    size = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        for buffer in buffers:
            view = memoryview(buffer)
            if not view.nbytes:
                continue  # A view with a zero in its shape cannot be cast.
            view = view.cast("B")
            for start in range(0, len(view), _SLICE):
                part = view[start : start + _SLICE]
                hasher.update(part)
                while part:
                    part = part[os.write(descriptor, part) :]
            size += len(view)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, DIGEST_PREFIX + hasher.hexdigest()


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot, and order renames by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _explain(error: OSError, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk that holds {target.parent} is full: {target.name} could not be "
            "written. Free some space there."
        )
    return (
        f"Cannot write {target}: {error.strerror or error}. Check that it is in a "
        "folder on a healthy disk that this user may write to."
    )
