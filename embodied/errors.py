"""What all errors have in common that a user can mend. Any process."""

from __future__ import annotations


class TaskError(Exception):
    """A task's environment cannot be used; the message says what to change."""
