"""Collects metrics and hands them to outputs; in the process that logs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsInt

import numpy as np

from embodied.base import Tree
from embodied.logger.output import Summary
from embodied.logger.terminal import TerminalOutput

_log = logging.getLogger(__name__)


class Logger:
    """Collects metrics at their step and writes them to all outputs.

        with Logger(step, [JSONLOutput(logdir)], multiplier=repeat) as logger:
          logger.add({'score': 1.0, 'length': 100}, prefix='episode')
          logger.write()

    Methods may be called from several threads: one lock guards the metrics, another
    one serialises the writes to outputs, in order. An output that fails affects neither
    the caller nor the other outputs: its error is reported through `logging`, once
    until it works again or fails in another way.

    Args:
      step: a counter, or anything that `int()` takes; read whenever metrics are added.
      outputs: callables that take a sequence of `Summary`, such as `Output`. Their
        methods `rewind` and `close` are called too, where they exist.
      multiplier: environment steps per agent step, by which `step` is multiplied.
    """

    def __init__(
        self,
        step: SupportsInt,
        outputs: Iterable[Callable[[Sequence[Summary]], Any]],
        multiplier: int = 1,
    ):
        self.step = step
        self.multiplier = multiplier
        outputs = list(outputs)
        # Whether a person can follow the run through this logger.
        self.has_terminal = any(isinstance(x, TerminalOutput) for x in outputs)
        self._outputs = [_Guarded(output) for output in outputs]
        self._pending: list[Summary] = []
        self._pending_lock = threading.Lock()
        self._write_lock = threading.Lock()

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, mapping: Mapping[str, Any], prefix: str | None = None) -> None:
        """Adds metrics, whose kind follows from the value's type and shape.

        Args:
          mapping: values by name: a string is text; a number a scalar; [N] a vector,
            shown as a histogram; [H, W] or [H, W, C] an image with 1, 3 or 4 channels;
            [T, H, W, C] a video with 1 or 3 channels. Floats of images and videos lie
            between 0 and 1.
          prefix: put before every name, with a slash.
        """
        items = []
        for key, value in mapping.items():
            name = f"{prefix}/{key}" if prefix else key
            items.append((name, _convert(name, value)))
        with self._pending_lock:
            step = int(self.step) * self.multiplier
            self._pending.extend((step, name, value) for name, value in items)

    def write(self) -> None:
        """Passes the metrics added since the last write to every output."""
        with self._write_lock:
            with self._pending_lock:
                summaries, self._pending = tuple(self._pending), []
            if summaries:
                for output in self._outputs:
                    output.write(summaries)

    def rewind(self) -> None:
        """Removes steps after the current one from the outputs.

        Call it before the first metric, when the step is that of the checkpoint from
        which the run continues, so that steps only increase within every file.
        """
        with self._write_lock:
            for output in self._outputs:
                output.rewind(int(self.step) * self.multiplier)

    def close(self) -> None:
        """Writes, and closes all outputs. May be called more than once."""
        self.write()
        with self._write_lock:
            for output in self._outputs:
                output.close()


class StepCount:
    """The logger's step counter, as a part of checkpoints."""

    def __init__(self, counter: Any):
        self._counter = counter

    def save(self) -> Tree:
        """Returns the number of agent steps of training environments."""
        return {"step": int(self._counter)}

    def load(self, data: Tree) -> None:
        """Continues to count from the saved step."""
        self._counter.load(int(data["step"]))


def rewind(logger: Any) -> None:
    """Removes what a logger has shown of steps after its present one.

    Does nothing for a user's logger without a method `rewind`.
    """
    getattr(logger, "rewind", lambda: None)()


class _Guarded:
    """An output whose errors are logged, not raised. The caller holds a lock."""

    def __init__(self, output: Callable[[Sequence[Summary]], Any]):
        if not callable(output):
            raise TypeError(
                "Expected outputs that can be called with summaries, got "
                f"{output!r} ({type(output).__name__})."
            )
        self._output = output
        self._name = getattr(output, "__name__", type(output).__name__)
        self._failures = 0
        self._reported: tuple[type, object] | None = None

    def write(self, summaries: Sequence[Summary]) -> None:
        try:
            self._output(summaries)
        except Exception as error:
            self._failures += 1
            self._report("write", error)
        else:
            self._recover()

    def rewind(self, step: int) -> None:
        self._attempt("rewind", step)

    def close(self) -> None:
        self._attempt("close")

    def _attempt(self, method: str, *args: Any) -> None:
        try:
            if hasattr(self._output, method):
                getattr(self._output, method)(*args)
        except Exception as error:
            self._report(method, error)

    def _report(self, method: str, error: Exception) -> None:
        # The error number tells a full disk from, say, a missing permission.
        kind = (type(error), getattr(error, "errno", None))
        if kind == self._reported:
            return
        self._reported = kind
        _log.warning(
            "Logger output %s failed to %s and metrics may be missing from it: %s: %s",
            self._name,
            method,
            type(error).__name__,
            error,
        )

    def _recover(self) -> None:
        if self._failures:
            _log.warning(
                "Logger output %s works again after %d failed writes.",
                self._name,
                self._failures,
            )
        self._failures = 0
        self._reported = None


def _convert(name: str, value: Any) -> str | np.ndarray:
    """Converts a value to a string, or to an array of a kind that outputs support."""
    if not isinstance(name, str):
        raise TypeError(f"Expected a string as name of a metric, got {name!r}.")
    if isinstance(value, str):
        return value
    array = _numeric(name, value)
    if array.ndim > 4 or array.size == 0:
        raise ValueError(
            f"Metric {name!r}: expected values of at most 4 dimensions, got "
            f"{_brief(value)}."
        )
    if array.ndim < 2:
        return array
    kind, channels = ("video", (1, 3)) if array.ndim == 4 else ("image", (1, 3, 4))
    if array.ndim > 2 and array.shape[-1] not in channels:
        raise ValueError(
            f"Metric {name!r}: expected the {kind}'s last dimension to be one of "
            f"{channels}, got {_brief(value)}."
        )
    return _pixels(name, array)


def _numeric(name: str, value: Any) -> np.ndarray:
    try:
        array = np.array(value)
        if array.dtype.kind == "V":  # bfloat16 and its relatives.
            array = array.astype(np.float32)
    except (TypeError, ValueError):
        array = np.array(None)
    if array.dtype.kind == "b":
        array = array.astype(np.int32)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"Metric {name!r}: expected numbers or a string, got {_brief(value)}."
        )
    return array


def _pixels(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise TypeError(
            f"Metric {name!r}: expected pixels as uint8 or as floats between 0 and 1, "
            f"got {array.dtype}."
        )
    return (255 * np.clip(np.nan_to_num(array), 0, 1)).astype(np.uint8)


def _brief(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"{value!r:.80} ({type(value).__name__})"
