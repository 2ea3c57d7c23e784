"""Videos of a run, from its TensorBoard files. The view's server.

These files have all videos of a run: episodes (`epstats/policy_KEY`) and open-loop
predictions (`report/openloop/KEY`). They are read as they grow, without their scalars.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import struct
import threading
from pathlib import Path
from typing import Any

from PIL import Image

PATTERN = "events.out.tfevents.*"
HEADER = 12  # Bytes before a record: its length and a checksum.
FOOTER = 4
SMALLEST = 100  # Bytes of a record with a picture.
LARGEST = 1 << 28
KEPT = 40  # Videos of each name, the newest.
MOST_VIDEOS = 1000  # Altogether.
KINDS = {b"GIF8": "image/gif", b"\x89PNG": "image/png"}


@dataclasses.dataclass(frozen=True)
class Video:
    """A video and the place of its record in a file."""

    number: int
    tag: str
    step: int
    time: float
    kind: str
    file: Path
    offset: int
    length: int


class Videos:
    """The videos of a run. Any thread.

    Args:
      logdir: of the run.
    """

    def __init__(self, logdir: Path):
        self._logdir = logdir
        self._lock = threading.Lock()  # Guards the fields below.
        self._offsets: dict[Path, int] = {}
        self._found: dict[int, Video] = {}

    def update(self) -> list[Video]:
        """Reads new records; returns all videos that are kept, the oldest first."""
        with self._lock:
            for path in sorted(self._logdir.glob(PATTERN)):
                if path.is_symlink():
                    continue
                try:
                    self._scan(path)
                except OSError:
                    continue
            self._forget()
            return sorted(self._found.values(), key=lambda video: video.time)

    def content(self, number: int) -> tuple[str, bytes] | None:
        """Returns the media type and the bytes of a video; None if it is gone."""
        with self._lock:
            video = self._found.get(number)
        if video is None:
            return None
        try:
            with video.file.open("rb") as file:
                file.seek(video.offset)
                data = file.read(video.length)
        except OSError:
            return None
        found = _picture(data)
        return (video.kind, found[1].image.encoded_image_string) if found else None

    def still(self, number: int) -> tuple[str, bytes] | None:
        """Returns the first picture of a video as PNG, like `content`."""
        found = self.content(number)
        if found is None:
            return None
        picture = io.BytesIO()
        try:
            with Image.open(io.BytesIO(found[1])) as image:
                image.convert("RGB").save(picture, "PNG")
        except (OSError, ValueError, Image.DecompressionBombError):
            return None
        return "image/png", picture.getvalue()

    def _scan(self, path: Path) -> None:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while offset + HEADER <= size:
                file.seek(offset)
                (length,) = struct.unpack("<Q", file.read(HEADER)[:8])
                if length > LARGEST or offset + HEADER + length + FOOTER > size:
                    break  # Damaged, or still being written.
                if length >= SMALLEST:
                    self._add(path, offset + HEADER, file.read(length))
                offset += HEADER + length + FOOTER
        self._offsets[path] = offset

    def _add(self, path: Path, offset: int, data: bytes) -> None:
        if not any(magic in data[:400] for magic in KINDS):
            return
        found = _picture(data)
        if found is None:
            return
        event, image = found
        kind = KINDS.get(image.image.encoded_image_string[:4])
        if kind is None:
            return
        # The same video always has the same number, so that pages can keep it.
        place = hashlib.sha256(f"{path.name} {offset}".encode()).digest()
        video = Video(
            number=int.from_bytes(place[:6]),
            tag=image.tag,
            step=event.step,
            time=event.wall_time,
            kind=kind,
            file=path,
            offset=offset,
            length=len(data),
        )
        self._found[video.number] = video

    def _forget(self) -> None:
        by_tag: dict[str, list[Video]] = {}
        for video in self._found.values():
            by_tag.setdefault(video.tag, []).append(video)
        kept = [video for videos in by_tag.values() for video in videos[-KEPT:]]
        kept = sorted(kept, key=lambda video: video.time)[-MOST_VIDEOS:]
        self._found = {video.number: video for video in kept}


def _picture(data: bytes) -> tuple[Any, Any] | None:
    """Returns the event of a record and its first value that has an image, if any."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    try:
        event = Event.FromString(data)
    except DecodeError:
        return None
    images = [value for value in event.summary.value if value.HasField("image")]
    return (event, images[0]) if images else None
