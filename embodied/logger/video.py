"""Encodes images as PNG and videos as GIF; in the process that logs."""

from __future__ import annotations

import io

import numpy as np


def encode_png(image: np.ndarray) -> bytes:
    """Encodes an image.

    Args:
      image: [H, W] or [H, W, C] uint8, with 1, 3 or 4 channels.
    """
    import PIL.Image

    channels = (1, 3, 4)
    valid = image.ndim == 2 or (image.ndim == 3 and image.shape[-1] in channels)
    if image.dtype != np.uint8 or not valid or image.size == 0:
        raise ValueError(
            "Expected an image [H, W] or [H, W, C] of dtype uint8 with 1, 3 or 4 "
            f"channels, got shape {image.shape} and dtype {image.dtype}."
        )
    buffer = io.BytesIO()
    PIL.Image.fromarray(_without_single_channel(image, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def encode_gif(video: np.ndarray, fps: float) -> bytes:
    """Encodes a video, to be repeated without end.

    GIF counts hundredths of a second, so that rates above 50 come out slower.

    Args:
      video: [T, H, W, C] uint8, with 1 or 3 channels.
      fps: frames per second.
    """
    import PIL.Image

    valid = video.ndim == 4 and video.shape[-1] in (1, 3)
    if video.dtype != np.uint8 or not valid or video.size == 0:
        raise ValueError(
            "Expected a video [T, H, W, C] of dtype uint8 with 1 or 3 channels, got "
            f"shape {video.shape} and dtype {video.dtype}."
        )
    if not fps > 0:
        raise ValueError(f"Expected a positive fps, got {fps}.")
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


def _without_single_channel(array: np.ndarray, ndim: int) -> np.ndarray:
    gray = array.ndim == ndim and array.shape[-1] == 1
    return array[..., 0] if gray else array
