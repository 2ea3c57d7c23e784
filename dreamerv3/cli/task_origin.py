"""Tasks that name code, and proof that this user has chosen them. Any process.

Making an environment of the task `my_env:MyEnv` imports `my_env` and calls something in
it. A folder from somebody else names its task, too, so such a task is taken from a
folder only if this user has started the run. The logdir then has a proof that was made
with the user's own key, which never leaves the machine.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pathlib

from embodied.checkpoint import write_file

PROOF = ".started"  # In the logdir.
_PURPOSE = b"this user has started a run of the task "


def names_code(task: str) -> bool:
    """Returns whether a task names a module to import, such as `module:Name`.

    The suites `gym` and `dm` also import the part before a colon.
    """
    return ":" in task


def suite_of(task: str) -> str:
    """Returns the suite whose block of `env` a task has.

    Tasks that name code have that of Gymnasium, whatever their module is called.
    """
    return "gym" if names_code(task) else task.partition("_")[0]


def sign_task(logdir: pathlib.Path, task: str) -> None:
    """Writes a proof into a logdir that this user has chosen its task.

    Writes nothing for a task that does not name code.

    Raises:
      OSError, CheckpointError: the proof cannot be written.
    """
    if not names_code(task):
        return
    if proof := _proof(task):
        write_file(logdir, PROOF, proof)


def started_by_user(logdir: str | os.PathLike[str], task: str) -> bool:
    """Returns whether a logdir has the proof that this user has chosen its task."""
    with contextlib.suppress(OSError):
        found = pathlib.Path(logdir, PROOF).read_bytes()
        proof = _proof(task)
        return bool(proof) and hmac.compare_digest(found, proof)
    return False


def find_task_problem(
    logdir: str | os.PathLike[str], task: str, remedy: str = "--task {task!r}"
) -> str:
    """Returns why the task of a folder must not be used; empty if it may.

    Nothing that the task names is imported.

    Args:
      logdir: logdir of the run that has the task.
      task: the task in its configuration.
      remedy: the argument that names the task; {task} is filled in.
    """
    if not names_code(task) or started_by_user(logdir, task):
        return ""
    return (
        f"task: {logdir} is of task {task!r}, which names code that would be imported "
        "and called, and there is no proof that you have started that run on this "
        f"machine. If you trust this code, pass {remedy.format(task=task)}."
    )


def _proof(task: str) -> bytes:
    """Returns a digest that only this user can compute; empty if there is no key."""
    from embodied.rpc import AuthError, Keys

    try:
        secret = Keys.default().server_secret.encode()
    except AuthError:
        return b""
    return hmac.digest(secret, _PURPOSE + task.encode(), "sha256").hex().encode()
