"""Spaces: the dtype, shape and bounds of one observation or action key. Any process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

Bound = Any  # Anything that NumPy can broadcast to the space's shape.


class Space:
    """Dtype, shape and bounds of one array.

    The constructor and attributes match those of `elements.Space`, which users'
    environments may hold; `Space.of` converts such a space.

    Args:
      dtype: a bool, integer, float or string dtype of NumPy.
      shape: dimensions, or one integer for a vector.
      low: lowest value, inclusive. Default: no bound.
      high: highest value, inclusive for floats. For integers it is one above the
        highest value, so that `high - low` is the number of classes; a high equal
        to the dtype's maximum admits that maximum too, since many environments
        declare images as 0..255.
    """

    def __init__(
        self,
        dtype: Any,
        shape: int | tuple[int, ...] | None = (),
        low: Bound = None,
        high: Bound = None,
    ):
        self._dtype = np.dtype(dtype)
        if self._dtype.kind not in "biufU":
            # Kind 'V' covers bfloat16 and its relatives, which no environment emits.
            raise TypeError(
                "Space expected a bool, integer, float or string dtype, got "
                f"{self._dtype}. Convert the value to one of these first."
            )
        if shape is None:
            shape = np.broadcast_shapes(np.shape(low), np.shape(high))
        if isinstance(shape, int | np.integer):
            shape = (int(shape),)
        self._shape = tuple(int(size) for size in shape)
        if any(size < 1 for size in self._shape):
            raise ValueError(f"Space expected positive dimensions, got {shape}.")
        self._low: np.ndarray | None = None
        self._high: np.ndarray | None = None
        if self._dtype.kind == "U":
            if low is not None or high is not None:
                raise ValueError("A space of strings has no bounds.")
            return
        lowest, highest = _default_bounds(self._dtype)
        self._low = self._bound("low", lowest if low is None else low)
        self._high = self._bound("high", highest if high is None else high)
        empty = self._low > self._high
        if self._dtype.kind in "iu":
            empty = self._low >= self._high
        if np.any(empty):
            raise ValueError(
                f"Space expected low below high, got low {low} and high {high}."
            )

    @classmethod
    def of(cls, space: Any) -> Space:
        """Returns a Space unchanged, or converts an object with the same attributes."""
        if isinstance(space, cls):
            return space
        missing = [
            key for key in ("dtype", "shape", "low", "high") if not hasattr(space, key)
        ]
        if missing:
            raise TypeError(
                f"Expected an embodied.Space or elements.Space, got {space!r} "
                f"({type(space).__name__}) without {', '.join(missing)}."
            )
        return cls(space.dtype, tuple(space.shape), space.low, space.high)

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype of values."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of values."""
        return self._shape

    @property
    def low(self) -> np.ndarray | None:
        """Lowest values, of the space's shape; None for strings."""
        return self._low

    @property
    def high(self) -> np.ndarray | None:
        """Highest values, exclusive for integers; None for strings."""
        return self._high

    @functools.cached_property
    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest values, both inclusive, in the space's dtype."""
        if self._low is None or self._high is None:
            raise TypeError("A space of strings has no limits.")
        high = self._high
        if self._dtype.kind in "iu":
            largest = np.iinfo(self._dtype).max
            high = np.where(high >= largest, largest, high - 1)
        return self._low.astype(self._dtype), high.astype(self._dtype)

    @property
    def discrete(self) -> bool:
        """Whether values are integers or booleans."""
        return self._dtype.kind in "biu"

    @property
    def classes(self) -> int | np.ndarray:
        """Number of classes: an integer for a scalar space, else one per element."""
        if not self.discrete:
            raise TypeError(f"Only discrete spaces have classes, not {self}.")
        if self._dtype.kind == "b":
            classes = np.full(self._shape, 2, np.int64)
        else:
            assert self._low is not None
            assert self._high is not None
            # As Python integers, since a range of 64 bits overflows its own dtype.
            wide = self._high.astype(object) - self._low.astype(object)
            classes = np.array(np.asarray(wide).tolist())
        return classes if classes.ndim else int(classes)

    def sample(self, rng: np.random.Generator | int | None = None) -> np.ndarray:
        """Draws a value, the same one for the same `rng` state or integer seed.

        Values are uniform between finite bounds. A float without bounds is drawn
        from a standard normal, one with a single bound from an exponential
        distribution that starts there.
        """
        rng = np.random.default_rng(rng)
        if self._low is None or self._high is None:
            raise TypeError("A space of strings cannot be sampled.")
        if self._dtype.kind == "b":
            value = np.asarray(rng.random(self._shape) < 0.5)
            return np.asarray((value | self._low) & self._high)
        if self._dtype.kind in "iu":
            # An exclusive high may not fit 64 bits, so draw with an inclusive one.
            wide = self._low.dtype
            low, high = (limit.astype(wide) for limit in self.limits)
            value = rng.integers(low, high, self._shape, wide, endpoint=True)
            return np.asarray(value).astype(self._dtype)
        low, high = self._low.astype(np.float64), self._high.astype(np.float64)
        has_low, has_high = np.isfinite(low), np.isfinite(high)
        unit = rng.random(self._shape)
        safe_low = np.where(has_low, low, 0.0)
        safe_high = np.where(has_high, high, 0.0)
        # Interpolate, since `high - low` overflows for the widest range.
        value = np.where(
            has_low & has_high,
            safe_low * (1 - unit) + safe_high * unit,
            rng.standard_normal(self._shape),
        )
        tail = -np.log1p(-unit)
        value = np.where(has_low & ~has_high, safe_low + tail, value)
        value = np.where(~has_low & has_high, safe_high - tail, value)
        # Rounding to a smaller dtype may exceed a bound.
        value = np.asarray(value).astype(self._dtype)
        return np.asarray(np.clip(value, self._low, self._high)).astype(self._dtype)

    def __contains__(self, value: Any) -> bool:
        try:
            value = np.asarray(value)
        except ValueError:  # Nested lists of unequal lengths are no array.
            return False
        if self._low is None or self._high is None:
            return value.dtype.kind == "U" and value.shape == self._shape
        if value.shape != self._shape or value.dtype != self._dtype:
            return False
        low, high = self.limits
        # Written so that NaN, which compares false to everything, is outside.
        return bool(np.all((low <= value) & (value <= high)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Space):
            return NotImplemented
        return (
            self._dtype == other._dtype
            and self._shape == other._shape
            and np.array_equal(self._low, other._low)  # type: ignore[arg-type]
            and np.array_equal(self._high, other._high)  # type: ignore[arg-type]
        )

    def __hash__(self) -> int:
        return hash((self._dtype, self._shape))

    def __repr__(self) -> str:
        low, high = _brief(self._low), _brief(self._high)
        return f"Space({self._dtype}, shape={self._shape}, low={low}, high={high})"

    def _bound(self, name: str, value: Bound) -> np.ndarray:
        array = np.asarray(value)
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(f"Space expected numbers as {name}, got {value}.")
        if self._dtype.kind in "iu":
            array = self._integer_bound(name, array)
        elif self._dtype.kind == "b":
            array = array.astype(bool)
        else:
            # A value that a smaller dtype cannot hold becomes infinite: no bound.
            with np.errstate(over="ignore"):
                array = array.astype(self._dtype)
        try:
            array = np.broadcast_to(array, self._shape)
        except ValueError:
            raise ValueError(
                f"Space expected {name} of a shape that broadcasts to {self._shape}, "
                f"got {np.shape(value)}."
            ) from None
        return array

    def _integer_bound(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns the bound as 64-bit integers, after checking that it fits."""
        info = np.iinfo(self._dtype)
        # A high is exclusive, so it may be one above the dtype's maximum.
        lowest, highest = info.min, info.max + (name == "high")
        if array.dtype.kind == "f":
            finite = np.isfinite(array)
            if np.any(array[finite] != np.floor(array[finite])):
                raise ValueError(
                    f"Space expected whole numbers as {name} of dtype {self._dtype}, "
                    f"got {array}."
                )
            # As Python integers, which hold floats such as 2 ** 63 exactly.
            whole = [
                int(x) if np.isfinite(x) else (lowest if x < 0 else highest)
                for x in array.ravel().tolist()
            ]
            array = np.array(whole, object).reshape(array.shape)
        smallest, largest = int(array.min()), int(array.max())
        if smallest < lowest or largest > highest:
            raise ValueError(
                f"Space expected {name} of dtype {self._dtype} between {lowest} and "
                f"{highest}, got {smallest if smallest < lowest else largest}."
            )
        wide = np.uint64 if self._dtype == np.uint64 else np.int64
        if largest > np.iinfo(wide).max:
            array = np.minimum(array.astype(object), np.iinfo(wide).max)
        return np.asarray(array).astype(wide)


def _default_bounds(dtype: np.dtype) -> tuple[Bound, Bound]:
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if dtype.itemsize == 8:
            return info.min, info.max
        return info.min, info.max + 1
    return -np.inf, np.inf


def _brief(bound: np.ndarray | None) -> str:
    if bound is None:
        return "None"
    lowest, highest = bound.min(), bound.max()
    return str(lowest) if lowest == highest else f"{lowest}..{highest}"
