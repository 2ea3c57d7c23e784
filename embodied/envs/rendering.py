"""Draws MuJoCo scenes, also without a display. Env processes."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np

VARIABLE = "MUJOCO_GL"
_LIBRARIES = {
    "egl": ("libEGL.so.1", "libEGL.so"),
    "osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"),
}


class RenderingUnavailable(RuntimeError):
    """Images of a MuJoCo scene cannot be drawn on this machine."""


def choose_backend(images: bool) -> None:
    """Sets MUJOCO_GL where needed; call it before importing MuJoCo's packages.

    On Linux without a display, these need EGL or OSMesa, and fail at import if the
    library is missing. A variable that is already set is left alone.

    Args:
      images: whether images are needed; if not, no library is needed either.
    """
    if not sys.platform.startswith("linux") or os.environ.get("DISPLAY"):
        return
    if os.environ.get(VARIABLE):
        return
    found = [name for name, files in _LIBRARIES.items() if _loads(files)]
    if found:
        os.environ[VARIABLE] = found[0]
    elif not images:
        os.environ[VARIABLE] = "disable"
    else:
        raise RenderingUnavailable(
            "Expected libEGL or libOSMesa, to draw images without a display, got "
            "neither. Install one of them, such as with apt install libegl1 or "
            "libosmesa6, or turn images off."
        )


def render(physics: Any, size: tuple[int, int], camera: int | str) -> np.ndarray:
    """Draws a scene of dm_control as an image [H, W, 3] uint8."""
    height, width = size
    try:
        return physics.render(height, width, camera_id=camera)
    except (RuntimeError, ImportError, AttributeError) as error:
        raise failure(error) from error


def failure(error: BaseException) -> RenderingUnavailable:
    """Returns the error of a MuJoCo package that could not render."""
    backend = os.environ.get(VARIABLE) or "chosen by MuJoCo"
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return RenderingUnavailable(
        f"Expected MuJoCo to render with {VARIABLE} {backend}, got {reason}. "
        f"Set {VARIABLE} to egl (apt install libegl1, or the driver of the "
        "accelerator), osmesa (apt install libosmesa6) or, with a display, glfw; or "
        "turn images off."
    )


def _loads(files: tuple[str, ...]) -> bool:
    for file in files:
        try:
            ctypes.CDLL(file)
        except OSError:
            continue
        return True
    return False
