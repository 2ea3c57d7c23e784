"""How values are stored: as they are, or one-hot vectors as class indices. Replay."""

from __future__ import annotations

from typing import Any

import numpy as np

LATENT_PREFIX = "dyn/"
ONEHOT_SUFFIX = "/stoch"


def is_latent(key: str) -> bool:
    """Whether this is a recurrent state, which training refreshes."""
    return key.startswith(LATENT_PREFIX)


def make_codec(key: str, dtype: np.dtype, shape: tuple[int, ...]) -> Plain | OneHot:
    """Returns how values of this key, dtype and shape are stored."""
    # The floats of ml_dtypes, such as bfloat16, have kind 'V'.
    floating = dtype.kind in "fV"
    if is_latent(key) and key.endswith(ONEHOT_SUFFIX) and floating and len(shape) > 1:
        return OneHot(key, dtype, shape)
    return Plain(dtype, shape)


class Plain:
    """Stores the bytes as they are.

    NumPy copies types that are not its own one element at a time, so these are stored
    as unsigned integers of their size.
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...]):
        own = dtype.isbuiltin == 1
        self.dtype = dtype if own else np.dtype(f"u{dtype.itemsize}")
        self.shape = shape

    def pack(self, values: np.ndarray) -> np.ndarray:
        """Returns what to store for `values` [..., *shape]; shares their memory."""
        return values.view(self.dtype)

    def gather(self, stored: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """Writes the values at `rows` into `out` [*rows.shape, *shape]."""
        _take(stored, rows, out.view(self.dtype))


class OneHot:
    """Stores one-hot vectors [..., C] as class indices; C stands for all zeros."""

    def __init__(self, key: str, dtype: np.dtype, shape: tuple[int, ...]):
        *self._groups, self._classes = shape
        if not 1 <= self._classes < 1 << 16:
            raise ValueError(
                f"Expected {key} to have 1 to {(1 << 16) - 1} classes, got {shape}."
            )
        self._key = key
        self.dtype = np.dtype(np.uint8 if self._classes < 1 << 8 else np.uint16)
        self.shape = tuple(self._groups)
        table = np.zeros((self._classes + 1, self._classes), dtype)
        np.fill_diagonal(table, 1)
        self._plain = Plain(dtype, (self._classes,))
        self._table = self._plain.pack(table)

    def pack(self, values: np.ndarray) -> np.ndarray:
        """Returns the class indices [..., S] of one-hot vectors [..., S, C]."""
        hot = values != 0
        index = hot.argmax(-1)
        peak = np.take_along_axis(values, index[..., None], -1)[..., 0]
        count = hot.sum(-1)
        valid = (count == 0) | ((count == 1) & (peak == 1))
        if not valid.all():
            example = values[~valid][0]
            raise ValueError(
                f"Expected {self._key} to be one-hot in its last dimension, got "
                f"{np.array2string(example, threshold=10)}. Send samples instead of "
                "probabilities, or class indices as integers."
            )
        return np.where(count == 0, self._classes, index).astype(self.dtype)

    def gather(self, stored: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """Writes the vectors at `rows` into `out` [*rows.shape, S, C]."""
        index = np.empty((*rows.shape, *self.shape), self.dtype)
        _take(stored, rows, index)
        _take(self._table, index.astype(np.intp), out.view(self._plain.dtype))


def _take(source: np.ndarray, rows: np.ndarray, out: Any) -> None:
    # Any mode but 'raise' writes straight into `out`; the rows are known to exist.
    source.take(rows, axis=0, out=out, mode="clip")
