"""Resizes images. Any process."""

from __future__ import annotations

import numpy as np


def resize_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes an image [H, W] or [H, W, C] uint8 to height and width, read-only."""
    # Imported here, so that importing the framework does not import Pillow.
    from PIL import Image

    if image.ndim == 3 and image.shape[2] != 3:  # Pillow takes three channels or one.
        planes = np.moveaxis(image, 2, 0)
        return np.stack([resize_image(plane, size) for plane in planes], axis=2)
    resized = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(resized)
