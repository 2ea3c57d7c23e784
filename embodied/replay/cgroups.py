"""What the control groups of this process leave it of the memory. Any process.

Containers, Slurm and systemd limit memory by control groups. A process is in one of
them, and the limits of all groups above that one hold as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_FILES = ("memory.max", "memory.current")  # Limit and use in bytes, of version 2.
_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def bytes_left(membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> float:
    """Returns the bytes until the first limit is reached; infinite without a limit.

    Args:
      membership: lists the groups of the process.
      root: folder of all groups; version 1 has one in it for each kind of resource.
    """
    return min(
        (
            _left(folder / limit, folder / used)
            for folder, (limit, used) in _groups(membership, root)
        ),
        default=math.inf,
    )


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yields the folders of groups that may limit memory, with their file names."""
    # The roots always: inside a container they are the container's own groups, also
    # where the list has names from outside, which have no folder here.
    yield root, _FILES
    yield root / "memory", _FILES_V1
    for controllers, path in _memberships(membership):
        if not controllers:
            yield from ((x, _FILES) for x in _with_parents(root, path))
        elif "memory" in controllers.split(","):
            yield from ((x, _FILES_V1) for x in _with_parents(root / "memory", path))


def _memberships(membership: Path) -> list[tuple[str, str]]:
    """Returns controllers and path of each line 'number:controllers:path'."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # There are none on other systems than Linux.
        return []
    fields = [line.split(":", 2) for line in lines]
    return [(field[1], field[2]) for field in fields if len(field) == 3]


def _with_parents(root: Path, path: str) -> list[Path]:
    # With '..' it is a group beside the container's own, whose limits are not ours to
    # see.
    parts = PurePosixPath(path.lstrip("/")).parts
    if ".." in parts:
        return []
    return [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]


def _left(limit: Path, used: Path) -> float:
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # No such file, or 'max': there is no limit.
        return math.inf
