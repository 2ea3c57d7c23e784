"""The base of outputs, and encoders of images and videos; in the process that logs."""

from __future__ import annotations

import collections
import io
import logging
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

FFMPEG_SECONDS = 300  # For one video.

logger = logging.getLogger("embodied.logger")

# The step, the metric's name, and its value: a string, or an array that is a scalar
# [], a vector [N], an image [H, W] or [H, W, C] uint8, or a video [T, H, W, C] uint8.
Summary = tuple[int, str, str | np.ndarray]


class MissingPackageError(ImportError):
    """The optional package that an output needs is not installed."""

    def __init__(self, package: str, extra: str):
        super().__init__(
            f"The {extra} output expected the package {package!r}, which is not "
            f"installed. Run: pip install 'dreamerv3-parallel[{extra}]'"
        )


class Output:
    """One destination of metrics.

        output(summaries)    # Raises an error if they cannot be written.
        output.close()

    Args:
      pattern: regular expression that a metric's whole name must match.
    """

    def __init__(self, pattern: str = ".*"):
        self._pattern = compile_pattern(pattern)

    def __call__(self, summaries: Sequence[Summary]) -> None:
        """Writes the summaries whose name matches the pattern."""
        raise NotImplementedError(f"{type(self).__name__}.__call__")

    def rewind(self, step: int) -> None:
        """Removes later steps from the destination; called before the first write.

        A run that continues from a checkpoint repeats these steps. Outputs that cannot
        remove them show both.
        """

    def close(self) -> None:
        """Writes what is pending and frees resources. May be called more than once."""

    def selected(self, summaries: Sequence[Summary]) -> list[Summary]:
        """Returns the summaries whose name matches the pattern."""
        return [item for item in summaries if self._pattern.fullmatch(item[1])]


class AsyncOutput(Output):
    """An output that writes in a thread of its own, since it may be slow.

    A subclass implements `_write` and `_close`, which run one at a time and only in
    that thread, which owns whatever they touch. One condition variable guards all
    state that the threads share. Nothing is dropped while the output makes progress: a
    full queue blocks the caller until there is room. An error in the thread is raised
    by the caller's next call, whose summaries are still queued.

    Args:
      pattern: regular expression that a metric's whole name must match.
    """

    QUEUE_SIZE = 16  # Number of calls that may wait to be written.
    # After this long without progress, a full queue raises `TimeoutError` at once
    # instead of blocking the caller.
    STALL_SECONDS = 300.0
    CLOSE_SECONDS = 60.0  # How long `close` waits for the queue to drain.

    def __init__(self, pattern: str = ".*"):
        super().__init__(pattern)
        # The condition guards everything below.
        self._condition = threading.Condition()
        self._waiting: collections.deque[list[Summary]] = collections.deque()
        self._writing = False
        self._progress = time.monotonic()
        self._error: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def __call__(self, summaries: Sequence[Summary]) -> None:
        """Queues the summaries whose name matches the pattern."""
        selected = self.selected(summaries)
        with self._condition:
            if selected:
                self._wait_for_room()
            # Taken before the new summaries are queued, so it is of an earlier call.
            error, self._error = self._error, None
            if selected:
                self._enqueue(selected)
        if error:
            raise error

    def close(self) -> None:
        """Writes the queue and ends the thread; raises if that exceeds the timeout."""
        with self._condition:
            if self._closing:
                return
            self._closing = True
            self._condition.notify_all()
            thread = self._thread
        if thread is None:
            self._close()
            return
        thread.join(self.CLOSE_SECONDS)
        with self._condition:
            lost = len(self._waiting)
            self._waiting.clear()
            error, self._error = self._error, None
        if thread.is_alive():
            raise TimeoutError(
                f"{type(self).__name__} was not done {self.CLOSE_SECONDS:g} s after "
                f"it was closed; {lost + 1} writes may be lost."
            )
        if error:
            raise error

    def _write(self, summaries: list[Summary]) -> None:
        raise NotImplementedError(f"{type(self).__name__}._write")

    def _close(self) -> None:
        """Closes the destination."""

    def _wait_for_room(self) -> None:
        """Waits for room in the queue. The caller holds the condition."""
        while len(self._waiting) >= self.QUEUE_SIZE and not self._closing:
            remaining = self._progress + self.STALL_SECONDS - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(
                    f"{type(self).__name__} has written nothing for more than "
                    f"{self.STALL_SECONDS:g} s and {len(self._waiting)} writes wait: "
                    "this one was dropped. Check the disk or the network it "
                    "writes to."
                )
            self._condition.wait(remaining)
        if self._closing:
            raise RuntimeError(f"{type(self).__name__} is closed and takes no writes.")

    def _enqueue(self, summaries: list[Summary]) -> None:
        """Queues summaries for the writing thread. The caller holds the condition."""
        if not (self._waiting or self._writing):
            self._progress = time.monotonic()
        self._waiting.append(summaries)
        self._condition.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_thread, name=type(self).__name__, daemon=True
            )
            self._thread.start()

    def _run_thread(self) -> None:
        while True:
            with self._condition:
                self._writing = False
                self._progress = time.monotonic()
                self._condition.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                summaries = self._waiting.popleft()
                self._writing = True
                self._condition.notify_all()
            self._attempt(self._write, summaries)
        self._attempt(self._close)

    def _attempt(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            with self._condition:
                self._error = self._error or error


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern of metric names; the error for an invalid one quotes it."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"Expected a regular expression of metric names, got {pattern!r}: {error}."
        ) from None


def rows_by_step(summaries: Iterable[tuple[int, str, Any]]) -> list[dict[str, Any]]:
    """Returns `{"step": …, name: value, …}` for each step, in order.

    A name that occurs twice at one step starts another row, so that no value is lost.
    """
    rows: list[dict[str, Any]] = []
    for step, name, value in summaries:
        if name == "step":
            continue
        if not rows or rows[-1]["step"] != step or name in rows[-1]:
            rows.append({"step": step})
        rows[-1][name] = value
    return rows


def histogram_values(vector: np.ndarray) -> np.ndarray | None:
    """Returns the finite values of a vector, float64; None if there are none."""
    finite = vector[np.isfinite(vector)].astype(np.float64)
    return finite if finite.size else None


def encode_png(image: np.ndarray) -> bytes:
    """Encodes an image as PNG.

    Args:
      image: [H, W] or [H, W, C] uint8, with 1, 3 or 4 channels.
    """
    import PIL.Image

    buffer = io.BytesIO()
    PIL.Image.fromarray(_without_single_channel(image, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def encode_gif(video: np.ndarray, fps: float) -> bytes:
    """Encodes a video as a GIF that repeats for ever.

    GIF counts hundredths of a second, here two or more per frame, so that rates above
    50 come out slower.

    Args:
      video: [T, H, W, C] uint8, with 1 or 3 channels.
      fps: frames per second.
    """
    import PIL.Image

    frames = [PIL.Image.fromarray(x) for x in _without_single_channel(video, 4)]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=max(20, round(1000 / fps)),
        loop=0,
    )
    return buffer.getvalue()


def encode_video(video: np.ndarray, fps: float) -> tuple[str, bytes]:
    """Encodes a video as MP4 if ffmpeg is available, else as GIF.

    Args:
      video: [T, H, W, C] uint8, with 1 or 3 channels.
      fps: frames per second.

    Returns:
      The file name extension, `mp4` or `gif`, and the contents of the file.
    """
    program = find_ffmpeg()
    if program is not None:
        try:
            return "mp4", _encode_mp4(program, video, fps)
        except (OSError, subprocess.SubprocessError) as error:
            # For example an ffmpeg without the usual encoder.
            logger.warning("ffmpeg failed (%s); writing a GIF instead.", error)
    return "gif", encode_gif(video, fps)


def find_ffmpeg() -> str | None:
    """Returns the path of ffmpeg, of the system or of imageio-ffmpeg, or None."""
    found = shutil.which("ffmpeg")
    if found is None:
        try:
            import imageio_ffmpeg

            found = imageio_ffmpeg.get_ffmpeg_exe()
        except (ImportError, RuntimeError):
            return None
    return found


def _encode_mp4(program: str, video: np.ndarray, fps: float) -> bytes:
    frames = np.repeat(video, 3, -1) if video.shape[-1] == 1 else video
    height, width = frames.shape[1:3]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "video.mp4")  # MP4 needs a file it can seek in.
        command = [
            *(program, "-loglevel", "error", "-y", "-f", "rawvideo"),
            *("-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps)),
            # Most players need yuv420p, which requires even sides.
            *("-i", "-", "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"),
            *("-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart"),
            str(path),
        ]
        subprocess.run(
            command,
            input=np.ascontiguousarray(frames).tobytes(),
            check=True,
            capture_output=True,
            timeout=FFMPEG_SECONDS,
        )
        return path.read_bytes()


def _without_single_channel(array: np.ndarray, ndim: int) -> np.ndarray:
    gray = array.ndim == ndim and array.shape[-1] == 1
    return array[..., 0] if gray else array
