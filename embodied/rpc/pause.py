"""Keeps the effects of calls and the record of them on one side of a save."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Pause:
    """Lets many threads apply calls, or one thread save, but never both at once."""

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()  # Guards everything below.
        self._applying = 0
        self._saving = False
        self._closed = False

    @contextlib.contextmanager
    def applying(self) -> Iterator[bool]:
        """Around a call that changes state, until its answer is recorded.

        Yields False if it must not be applied any more, since the server closes.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._saving or self._closed)
            allowed = not self._closed
            self._applying += allowed
        try:
            yield allowed
        finally:
            with self._changed:
                self._applying -= allowed
                self._changed.notify_all()

    @contextlib.contextmanager
    def saving(self, timeout: float) -> Iterator[None]:
        """Waits until no call is being applied, and keeps it so."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._saving, timeout):
                raise TimeoutError(f"Server {self._name} is paused by another thread.")
            self._saving = True
            if not self._changed.wait_for(lambda: not self._applying, timeout):
                self._saving = False
                self._changed.notify_all()
                raise TimeoutError(
                    f"Server {self._name}: {self._applying} calls did not end within "
                    f"{timeout} s of a pause."
                )
        try:
            yield
        finally:
            with self._changed:
                self._saving = False
                self._changed.notify_all()

    def close(self) -> None:
        """No call is applied from here on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
