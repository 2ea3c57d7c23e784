"""Atomic writes, verified reads and names of files. Any process."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

Root = str | os.PathLike[str]
Buffer = Any  # Anything with the buffer protocol, contiguous in C order.

# With the SHA extensions of current CPUs sha256 hashes 1.7 GB/s, blake2b 0.9 GB/s.
DIGEST_PREFIX = "sha256:"
_RECORD_FIELDS = {"path": str, "size": int, "digest": str, "required": bool}
_DIGEST = re.compile(DIGEST_PREFIX + "[0-9a-f]{64}")
_TAG = re.compile(r"([0-9]{8}T[0-9]{12})-([0-9]{8})")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.partial-save")
_SLICE = 1 << 22  # Bytes that are hashed and then written while still in the cache.
# Free space that a save leaves on the disk, for metrics and for saves of other roles: a
# share of its own bytes, and at least this many bytes.
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
      path: where the file lies, relative to the root, with forward slashes.
      size: size in bytes.
      digest: 'sha256:' and 64 hexadecimal digits.
      required: whether a manifest is useless without the file. Files that are not
        required, such as replay chunks, are kept as long as a manifest lists them,
        but their reader decides what to do if one is damaged.
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
        """Returns the record that `to_json` turned into `data`; checks every field."""
        if not isinstance(data, dict) or data.keys() != _RECORD_FIELDS.keys():
            raise CheckpointError(
                f"A file record has the fields {', '.join(_RECORD_FIELDS)}, got "
                f"{data!r:.200}."
            )
        for name, kind in _RECORD_FIELDS.items():
            if type(data[name]) is not kind:
                raise CheckpointError(
                    f"A file record expected {kind.__name__} as {name}, "
                    f"got {data[name]!r:.200}."
                )
        record = cls(**data)
        check_path(record.path)
        if record.size < 0 or not _DIGEST.fullmatch(record.digest):
            raise CheckpointError(
                "A file record expected a size of at least 0 and a digest like "
                f"{DIGEST_PREFIX}…, got {record.size} and {record.digest!r:.100}."
            )
        return record


class HashedReader:
    """Reads a file once, from front to back, and hashes what it reads.

    with HashedReader(root, path) as reader:
      reader.fill(view)     # As often as needed.
      reader.check(record)  # At the end.
    """

    def __init__(self, root: Root, path: str):
        target = self.path = locate(root, path)
        try:
            # Opening a pipe would wait for a writer, so check the file type first.
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

    @property
    def digest(self) -> str:
        """The digest of what was read."""
        return DIGEST_PREFIX + self._hash.hexdigest()

    def read(self) -> bytes:
        """Returns the whole file."""
        try:
            data = self._file.readall()
        except OSError as error:
            raise CheckpointError(f"Cannot read {self.path}: {error}.") from error
        self._hash.update(data)
        self.size = self._done = len(data)  # It may have grown or shrunk meanwhile.
        return data

    def fill(self, view: memoryview) -> None:
        """Reads the next bytes, as many as `view` (of format 'B') holds."""
        start = 0
        while start < len(view):
            part = view[start : start + _SLICE]
            try:
                count = self._file.readinto(part)
            except OSError as error:
                raise CheckpointError(f"Cannot read {self.path}: {error}.") from error
            if not count:
                raise CheckpointError(
                    f"{self.path} is truncated: it ends after {self._done} bytes."
                )
            self._hash.update(part[:count])
            self._done += count
            start += count

    def check(self, record: FileRecord) -> None:
        """Reads the rest of the file; raises unless size and digest match `record`."""
        if self.size != record.size:
            raise CheckpointError(
                f"{self.path} is damaged: it has {self.size} bytes, "
                f"expected {record.size}."
            )
        rest = memoryview(bytearray(min(_SLICE, self.size - self._done)))
        while self._done < self.size:
            self.fill(rest[: self.size - self._done])
        if self.digest != record.digest:
            raise CheckpointError(
                f"{self.path} is damaged: its digest is {self.digest}, "
                f"expected {record.digest}."
            )


def write_file(
    root: Root, path: str, buffers: Buffer | Iterable[Buffer], required: bool = True
) -> FileRecord:
    """Writes a file, which gets its name only once it is whole and on disk.

    Args:
      root: folder that `path` is relative to.
      path: where to write, with forward slashes. An existing file is replaced
        atomically.
      buffers: the contents, as one buffer or an iterable of buffers, such as bytes or
        contiguous arrays; each is written without a copy.
      required: stored in the record; see `FileRecord`.

    Raises:
      CheckpointError: the file could not be written; its temporary file is removed.
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
    """Returns a new temporary path beside a file; `Checkpoint.clean` removes leftovers.

    It is in the same folder, so that `os.replace` can rename it to the file atomically.
    """
    return target.with_name(f".{secrets.token_hex(8)}.partial-save")


def read_file(root: Root, path: str, record: FileRecord | None = None) -> bytes:
    """Returns the contents of a file, checked against `record` if given."""
    with HashedReader(root, path) as reader:
        data = reader.read()
        if record is not None:
            reader.check(record)
    return data


def seal(content: Any) -> bytes:
    """Returns JSON that carries the digest of its own content."""
    # A str may hold surrogates. Escaped in JSON, the two of a pair would be read back
    # as one character, so they are encoded as they are.
    text = json.dumps(
        content, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode("utf-8", "surrogatepass")
    digest = DIGEST_PREFIX + hashlib.sha256(text).hexdigest()
    return b'{"digest":"%s","content":%s}' % (digest.encode(), text)


def unseal(path: str, data: bytes) -> Any:
    """Returns the content given to `seal`; `path` names the file in errors."""
    sealed = re.fullmatch(
        rb'\{"digest":"(sha256:[0-9a-f]{64})","content":(.*)\}', data, re.DOTALL
    )
    if not sealed:
        raise CheckpointError(
            f"{path} is damaged: expected a JSON object with digest and content, "
            f"got {data[:40]!r}."
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
    """Returns a sentence on the damage of a listed file; None if it is whole.

    Without `digest` only the size is compared, and nothing is read.
    """
    try:
        with HashedReader(root, record.path) as reader:
            if digest or reader.size != record.size:
                reader.check(record)
    except CheckpointError as error:
        return str(error)
    return None


def check_path(path: str) -> None:
    """Raises unless `path` is relative, in its shortest form, and below the root."""
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
    """Returns the absolute path; raises if a part of it below the root is a link."""
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


def find_tag(path: str) -> str | None:
    """Returns the tag that the name of a file begins with; None if there is none."""
    stem = path.rpartition("/")[2].partition(".")[0]
    return stem if _TAG.fullmatch(stem) else None


def check_tag(tag: str) -> None:
    """Raises CheckpointError unless `tag` has the format of `next_tag`."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise CheckpointError(f"Expected a tag from new_tag(), got {tag!r:.100}.")


def next_tag(previous: str | None, now: datetime.datetime) -> str:
    """Returns a tag that sorts after `previous`, even if the clock was set back."""
    time = now.astimezone(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
    count = 1
    if previous is not None:
        last_time, last_count = previous.split("-")
        time = max(time, last_time)
        count = int(last_count) + 1
    return f"{time}-{count:08d}"


def is_temporary(path: str) -> bool:
    """Whether a path is one of `temporary_beside`: a file that was not finished."""
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


def require_space(folder: Root, needed: int) -> None:
    """Raises unless the disk has room for `needed` bytes and some more.

    What must stay free is a share of `needed` (at least 1 MB), so that small disks can
    be used, too.

    Raises:
      DiskTooSmallError: the disk would be too small even if it were empty.
      CheckpointError: the disk has too little free space at present.
    """
    spare = max(_SPARE_BYTES, int(_SPARE_SHARE * needed))
    usage = disk_usage(folder)
    words = f"a part of the checkpoint needs {_megabytes(needed)}, and "
    words += f"{_megabytes(spare)} must stay free"
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
    """Returns `total` and `free` bytes of a disk; the folder need not exist yet."""
    path = Path(folder).absolute()
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path)
    except OSError as error:
        raise CheckpointError(f"Cannot look at {folder}: {error}.") from error


def find_room_problem(root: Root, folder: str, nbytes: int, keep: int) -> str:
    """Returns a warning if the disk cannot hold `keep` checkpoints, else ''.

    Args:
      root: the logdir.
      folder: of the checkpoints, relative to the root.
      nbytes: size of one checkpoint. There must be room for one more than are kept,
        since these are still there while the next is written.
      keep: how many are kept.
    """
    usage = disk_usage(root)
    held = sum(locate(root, path).stat().st_size for path in list_files(root, folder))
    room = (usage.free + held) // max(1, nbytes)
    if room > keep:
        return ""
    return (
        f"The disk that holds {root} has room for {room} checkpoints of "
        f"{nbytes / 1e6:.1f} MB, but run.keep {keep} needs room for {keep + 1} while "
        "one is written: later saves will fail. Set a smaller --run.keep, or choose "
        "another --logdir."
    )


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
        # Some network file systems cannot sync folders, but order renames themselves.
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
