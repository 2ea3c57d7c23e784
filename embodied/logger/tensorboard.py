"""Writes TensorBoard event files without TensorFlow; in the process that logs."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import time
from typing import Any

import numpy as np

from embodied.logger.output import (
    AsyncOutput,
    Summary,
    encode_gif,
    encode_png,
    histogram_values,
)


class TensorBoardOutput(AsyncOutput):
    """Writes scalars, histograms, images, videos (as GIF) and text, in a thread.

    The event file is created at the first write. Only the synchronous writer of
    tensorboardX is used: its queued writer blocks for ever once its thread has failed.

    Args:
      logdir: folder of the event files, created if needed.
      fps: frames per second of videos.
      pattern: regular expression that a metric's whole name must match.
    """

    def __init__(
        self, logdir: str | os.PathLike[str], fps: float = 15, pattern: str = ".*"
    ):
        super().__init__(pattern)
        self._logdir = pathlib.Path(str(logdir))
        self._fps = fps
        self._writer: Any = None
        self._last_step: int | None = None  # Last to show of earlier event files.

    def rewind(self, step: int) -> None:
        """Makes TensorBoard hide later steps of earlier event files."""
        self._last_step = step

    @staticmethod
    def available() -> bool:
        """Returns whether the package tensorboardX is installed."""
        return importlib.util.find_spec("tensorboardX") is not None

    def _write(self, summaries: list[Summary]) -> None:
        from tensorboardX.proto.event_pb2 import Event

        writer = self._open()
        for step, name, value in summaries:
            summary = self._summary(name, value)
            if summary is not None:
                event = Event(step=step, wall_time=time.time(), summary=summary)
                writer.write_event(event)
        writer.flush()

    def _close(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        if self._writer is None:
            self._logdir.mkdir(parents=True, exist_ok=True)
            # The writer's file names differ only by the second, and it truncates files.
            suffix = f".{os.urandom(4).hex()}"
            self._writer = EventsWriter(str(self._logdir / "events"), suffix)
            if self._last_step is not None:
                start = SessionLog(status=SessionLog.START)
                event = Event(step=self._last_step + 1, session_log=start)
                event.wall_time = time.time()
                self._writer.write_event(event)
        return self._writer

    def _summary(self, name: str, value: str | np.ndarray) -> Any:
        from tensorboardX import summary

        if isinstance(value, str):
            return summary.text(name, value)
        if value.ndim == 0:
            return summary.scalar(name, value.item())
        if value.ndim == 1:
            values = histogram_values(value)
            return None if values is None else summary.histogram(name, values, "auto")
        if value.ndim == 4:
            return _image(name, encode_gif(value, self._fps), value.shape[1:])
        return _image(name, encode_png(value), value.shape)


def _image(name: str, encoded: bytes, shape: tuple[int, ...]) -> Any:
    from tensorboardX.proto.summary_pb2 import Summary as Proto

    height, width, *channels = shape
    image = Proto.Image(
        height=height,
        width=width,
        colorspace=channels[0] if channels else 1,
        encoded_image_string=encoded,
    )
    return Proto(value=[Proto.Value(tag=name, image=image)])
