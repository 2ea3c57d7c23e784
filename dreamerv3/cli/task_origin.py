"""Tasks that name code, and who has named them: this user, or a folder. Any process.

To make an environment of the task `my_env:MyEnv` is to import `my_env` and to call
something in it. A folder that somebody gave away names its task, too, so such a task is
taken from a folder only if this user has started the run: the logdir then has a proof
that needs the user's own key, which never leaves the machine.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pathlib

PROOF = ".started"  # In the logdir.
_PURPOSE = b"this user has started a run of the task "


def names_code(task: str) -> bool:
    """Tells tasks that name a module, such as `module:Name`, from those of suites.

    The suites `gym` and `dm` import what stands before a colon, too.
    """
    return ":" in task


def sign_task(logdir: pathlib.Path, task: str) -> None:
    """Leaves a proof in a logdir that this user has named its task.

    Raises:
      OSError, CheckpointError: it cannot be written.
    """
    if not names_code(task):
        return
    # Here, because help and errors should not wait for the libraries behind it.
    from embodied.checkpoint import write_file

    if proof := _proof(task):
        write_file(logdir, PROOF, proof)


def is_own(logdir: str | os.PathLike[str], task: str) -> bool:
    """Checks the proof that this user has named the task of a logdir."""
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
      logdir: of the run that has the task.
      task: as its configuration has it.
      remedy: the argument that names the task; {task} is filled in.
    """
    if not names_code(task) or is_own(logdir, task):
        return ""
    return (
        f"task: {logdir} is of task {task!r}, which names code that would be imported "
        "and called, and it is not known that you have started that run on this "
        f"machine. If you trust this code, pass {remedy.format(task=task)}."
    )


def _proof(task: str) -> bytes:
    """Returns what only this user can compute; empty if there can be no key."""
    from embodied.rpc import AuthError, Keys

    try:
        secret = Keys.default().server_secret.encode()
    except AuthError:
        return b""
    return hmac.digest(secret, _PURPOSE + task.encode(), "sha256").hex().encode()
