"""A window that shows what an environment looks like. The process that evaluates."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from embodied.base import TaskError

SMALLEST = 320  # Pixels of the shorter side; smaller frames are enlarged.


class WindowError(TaskError):
    """No window can be opened; the message says what to do."""


class Window:
    """Shows frames, one after the other, until it is closed.

    Raises:
      WindowError: there is no display, or no package to draw on it.
    """

    def __init__(self, title: str):
        try:
            import tkinter

            self._root: Any = tkinter.Tk()
        except (ImportError, RuntimeError) as error:
            raise self._error(error) from error
        except Exception as error:
            if type(error).__name__ != "TclError":  # Its module may be missing.
                raise
            raise self._error(error) from error
        self._root.title(title)
        self._label = tkinter.Label(self._root)
        self._label.pack()
        self._open = True
        self._root.protocol("WM_DELETE_WINDOW", self.close)

    def show(self, frame: np.ndarray) -> None:
        """Shows a frame [H, W, C] uint8, of 1 or 3 channels, unless closed."""
        if not self._open:
            return
        from PIL import Image, ImageTk

        image = Image.fromarray(frame[..., 0] if frame.shape[2] == 1 else frame)
        factor = -(-SMALLEST // min(image.size))
        if factor > 1:
            size = (image.width * factor, image.height * factor)
            image = image.resize(size, Image.Resampling.NEAREST)
        self._picture = ImageTk.PhotoImage(image, master=self._root)
        self._label.configure(image=self._picture)
        self._root.update()

    def show_step(self, transition: dict[str, Any], worker: int) -> None:
        """Shows a step of the first environment, if it has an image."""
        frame = pick_frame(transition) if worker == 0 else None
        if frame is not None:
            self.show(frame)

    def close(self) -> None:
        """Closes the window. May be called more than once."""
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):  # The display may be gone.
                self._root.destroy()

    @staticmethod
    def _error(error: Exception) -> WindowError:
        return WindowError(
            f"run.render: expected a display to open a window on, got none ({error}). "
            "Without one, look at the video that eval_only writes."
        )


def pick_frame(transition: dict[str, Any]) -> np.ndarray | None:
    """Returns the frame to show: `log/frame`, else the first image, else None."""
    images = {
        key: value
        for key, value in transition.items()
        if isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.ndim == 3
        and value.shape[2] in (1, 3)
    }
    if not images:
        return None
    return images.get("log/frame", next(iter(images.values())))
