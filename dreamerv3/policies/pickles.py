"""Reads pickles of arrays and plain values without running their code.

Any process. A pickle is a program; this reader runs only those that build dicts, lists,
tuples, text, numbers and NumPy arrays, in three steps:

1. All instructions are read, and each must be on a list of allowed ones. This also
   checks their sizes against the file before anything is allocated.
2. They are run with stand-ins for the few functions of NumPy that arrays are pickled
   with. Stand-ins check their arguments, and make arrays that are as large as their
   data, which they do not copy.
3. The stand-ins are replaced by their arrays.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import re
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embodied.checkpoint import CheckpointError

MOST_BYTES = 1 << 36  # Per file; the largest agents need a tenth of that.
MOST_INSTRUCTIONS = 5_000_000  # A checkpoint has about twenty for each array.
MOST_DIMENSIONS = 32
MOST_DEPTH = 100

INSTRUCTIONS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK"),
        *("NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
    )
)
_PUTS = ("BINPUT", "LONG_BINPUT")

_DTYPE = re.compile(r"[<>|]?(b1|[iu][1248]|f[248])")


class UnsafePickleError(CheckpointError):
    """A pickle is damaged, or asks for more than arrays and plain values."""


def read_pickle(path: str | os.PathLike[str]) -> Any:
    """Returns the content of a pickle: dicts with text as keys, lists, tuples, arrays.

    Arrays are read-only.

    Raises:
      UnsafePickleError: it is damaged, too large, or holds anything else.
      CheckpointError: it cannot be read.
    """
    path = Path(path)
    try:
        # Opening a pipe would wait for a writer, so the kind of file comes first.
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"Expected a regular file at {path}.")
        if found.st_size > MOST_BYTES:
            raise UnsafePickleError(
                f"{path}: expected at most {MOST_BYTES} bytes, got {found.st_size}."
            )
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error
    try:
        return loads(data)
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{path}: {error}") from error


def loads(data: bytes) -> Any:
    """Returns the content of a pickle; see `read_pickle`."""
    with warnings.catch_warnings():
        # The scan also decodes the arguments of instructions that it refuses.
        warnings.simplefilter("ignore", DeprecationWarning)
        instructions = _scan(data)
    try:
        result = _Unpickler(io.BytesIO(data)).load()
    except UnsafePickleError:
        raise
    except (
        *(pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError),
        *(IndexError, KeyError, OverflowError, RecursionError, MemoryError),
    ) as error:
        raise UnsafePickleError(
            f"Expected a whole pickle, got one that cannot be read ({error})."
        ) from error
    return _ArrayBuilder(len(data), instructions).finish(result)


def _scan(data: bytes) -> int:
    """Counts instructions; raises unless every one is complete and allowed."""
    count, end = 0, -1
    try:
        instructions = enumerate(pickletools.genops(data))
        for count, (code, argument, position) in instructions:
            if code.name not in INSTRUCTIONS:
                raise UnsafePickleError(
                    f"Expected a pickle of arrays and plain values, got one with the "
                    f"instruction {code.name} at byte {position}. Nothing was run."
                )
            # The memo allocates a place for every index up to the largest.
            sparse = code.name in _PUTS and int(argument or 0) > count
            if count >= MOST_INSTRUCTIONS or sparse:
                raise UnsafePickleError(
                    f"Expected at most {MOST_INSTRUCTIONS} instructions, and as many "
                    f"places to remember values in, got more at byte {position}."
                )
            end = position or 0
    except UnsafePickleError:
        raise
    except (ValueError, OverflowError, MemoryError) as error:
        raise UnsafePickleError(
            f"Expected a whole pickle, got {len(data)} bytes that are not one, or only "
            f"a part of it ({error})."
        ) from error
    if end + 1 != len(data):
        raise UnsafePickleError(
            f"Expected one pickle, got {len(data) - end - 1} bytes behind its end."
        )
    return count


class _StandIn:
    """Base of stand-ins, which have no attributes that a pickle could set."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError(
            f"Expected state for an array or its dtype, got {_brief(state)} for "
            f"{type(self).__name__.strip('_').lower()}."
        )


class _Function(_StandIn):
    """Stands for a function of NumPy; a pickle can only call it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., _StandIn]):
        self._make = make

    def __call__(self, *arguments: Any) -> _StandIn:
        return self._make(*arguments)


class _Dtype(_StandIn):
    """Stands for a dtype; its state sets the byte order."""

    __slots__ = ("dtype",)

    def __init__(self, name: Any, align: Any = False, copy: Any = True):
        if not isinstance(name, str) or not _DTYPE.fullmatch(name):
            raise UnsafePickleError(
                f"Expected a dtype of numbers or booleans, got {_brief(name)}."
            )
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        plain = isinstance(state, tuple) and len(state) >= 5
        if not plain or state[1] not in ("<", ">", "|") or any(state[2:5]):
            raise UnsafePickleError(
                f"Expected a dtype without fields, got the state {_brief(state)}."
            )
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(_StandIn):
    """Stands for an array, once its state is set."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise UnsafePickleError(
                "Expected version, shape, dtype, order and data of an array, got "
                f"{_brief(state)}."
            )
        _, shape, dtype, fortran, data = state
        self.set(shape, dtype, "F" if fortran is True else "C", data)

    def set(self, shape: Any, dtype: Any, order: Any, data: Any) -> None:
        """Sets the contents of the array; raises unless they fit together."""
        if self.array is not None:
            raise UnsafePickleError("Expected one state for an array, got another.")
        if not isinstance(dtype, _Dtype):
            raise UnsafePickleError(
                f"Expected a dtype of numbers or booleans, got {_brief(dtype)}."
            )
        if not isinstance(data, bytes | bytearray):
            raise UnsafePickleError(
                f"Expected the bytes of an array, got {_brief(data)}. Arrays of "
                "objects are not read."
            )
        sizes = isinstance(shape, tuple) and len(shape) <= MOST_DIMENSIONS
        if not sizes or any(type(size) is not int or size < 0 for size in shape):
            raise UnsafePickleError(
                f"Expected the shape of an array, got {_brief(shape)}."
            )
        kind = dtype.dtype
        if math.prod(shape) * kind.itemsize != len(data) or order not in ("C", "F"):
            raise UnsafePickleError(
                f"Expected an array as large as its data, got shape {shape} of {kind}, "
                f"order {_brief(order)}, for {len(data)} bytes."
            )
        self.array = np.ndarray(shape, kind, data, order=order)  # Without a copy.
        self.array.flags.writeable = False


_NDARRAY = _StandIn()  # Stands for the class of arrays; a pickle can only refer to it.


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _NDARRAY or shape != (0,) or code != b"b":
        raise UnsafePickleError(
            f"Expected a plain array, got {_brief((kind, shape, code))}."
        )
    return _Array()


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.set(shape, dtype, order, data)
    return array


# Stand-ins by module and name, for NumPy 1 and 2.
_ALLOWED: dict[tuple[str, str], _StandIn] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Function(_Dtype),
    ("numpy._core.multiarray", "_reconstruct"): _Function(_reconstruct),
    ("numpy.core.multiarray", "_reconstruct"): _Function(_reconstruct),
    ("numpy._core.numeric", "_frombuffer"): _Function(_from_buffer),
    ("numpy.core.numeric", "_frombuffer"): _Function(_from_buffer),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in for a name; never imports anything."""
        if (module, name) not in _ALLOWED:
            raise UnsafePickleError(
                f"Expected a pickle of arrays and plain values, got one that asks for "
                f"{module[:100]}.{name[:100]}. Nothing was run."
            )
        return _ALLOWED[module, name]


class _ArrayBuilder:
    """Converts stand-ins to arrays, and refuses all other objects.

    A pickle may refer to one value many times, and so expand to more than the size of
    the file. A regular one has at least one instruction for each value.

    Args:
      most_bytes: limit of the bytes of all arrays together.
      most_values: limit of the number of values of all kinds.
    """

    def __init__(self, most_bytes: int, most_values: int):
        self._bytes = most_bytes
        self._values = most_values

    def finish(self, value: Any, depth: int = 0) -> Any:
        """Returns a value as it was before it was pickled."""
        self._values -= 1
        if self._values < 0 or depth > MOST_DEPTH:
            raise UnsafePickleError(
                f"Expected as many values as instructions, at most {MOST_DEPTH} levels "
                "deep, got more."
            )
        if isinstance(value, _Array):
            array = value.array
            if array is None:
                raise UnsafePickleError("Expected an array, got one without its state.")
            self._bytes -= array.nbytes
            if self._bytes < 0:
                raise UnsafePickleError(
                    "Expected arrays that are as large as the file together, got more."
                )
            return array
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise UnsafePickleError(f"Expected text as key, got {_brief(key)}.")
            return {key: self.finish(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.finish(item, depth + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        raise UnsafePickleError(
            f"Expected arrays and plain values, got {_brief(value)}."
        )


def _brief(value: Any) -> str:
    """Describes a value in a few words; the full text of nested ones could be huge."""
    if isinstance(value, str | bytes):
        return repr(value[:100])
    if isinstance(value, int | float | None):
        return repr(value)
    if isinstance(value, tuple) and len(value) < 10:
        return f"a tuple of {', '.join(type(item).__name__ for item in value)}"
    return f"a {type(value).__name__}"
