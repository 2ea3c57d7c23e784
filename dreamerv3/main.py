"""The command line: runs the program of `--script`, in the main process.

    python -m dreamerv3.main --configs demo --logdir logdir/demo

`dreamerv3.cli.scripts` has the programs. Heavy modules are imported where they are
used, so that help and errors appear at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading

TYPE_CHECKING = False  # Without `typing`, whose import is slow.
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

    import elements

    from dreamerv3.cli.config import load_config
    from dreamerv3.cli.factories import (
        make_agent,
        make_env,
        make_logger,
        make_replay,
        make_stream,
    )

__all__ = [
    "load_config",
    "main",
    "make_agent",
    "make_env",
    "make_logger",
    "make_replay",
    "make_stream",
]


def __getattr__(name: str) -> Any:
    # Imported here, so that Ctrl-C during the imports shows no traceback.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dreamerv3.cli import config, factories

    return getattr(config if name == "load_config" else factories, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program that the arguments select.

    Args:
      argv: see `dreamerv3 --help`; by default the arguments of the process.

    Returns:
      The exit code: 2 if the configuration cannot be used; 1 if checkpoints cannot be
      used, or an environment or a role has failed; 75 if another replica is lost and
      all have to be started again; 130 after a second Ctrl-C, or a first one before the
      run has begun; else 0.
    """
    try:
        if argv is None:
            _import_from_here()
        code = _main(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        code = _fail(["interrupted, without saving."], code=130)
    if argv is None and code and threading.active_count() > 1:
        # A thread that is compiling would abort the interpreter while that ends.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    return code


def _interruptible(program: Callable[[], None]) -> Callable[[], None]:
    """Makes a program raise KeyboardInterrupt if it fails in any way after Ctrl-C.

    For example, C extensions raise ImportError if their import is interrupted.
    """
    pressed = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    def run() -> None:
        # Only in the main thread, and only if nothing else handles the signal.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGINT, on_signal)
        try:
            program()
        except Exception as error:
            if pressed:
                raise KeyboardInterrupt from error
            raise
        finally:
            if signal.getsignal(signal.SIGINT) is on_signal:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    return run


def _main(argv: list[str]) -> int:
    def start() -> None:
        from dreamerv3.cli.config import load_config
        from dreamerv3.cli.help_pages import help_text

        topics = _help_topics(argv)
        if topics is not None:
            print(help_text(topics), end="")
        elif "--version" in argv:
            from dreamerv3.cli.texts import package_version

            print(f"dreamerv3 {package_version()}")
        else:
            config = load_config(argv)
            run_script(config, functools.partial(_find_script(config, argv), config))

    return exit_code(_interruptible(start))


def exit_code(
    program: Callable[[], None], show: Callable[[Sequence[str]], None] | None = None
) -> int:
    """Runs a program; prints why it fails, if it does, and returns the exit code.

    See `main` for the codes. Errors that users cannot do anything about are raised.

    Args:
      program: the program to run.
      show: also called with the messages that are printed.
    """
    try:
        program()
    except Exception as error:
        problems, code = _explain(error)
        if not problems:
            raise
        if show is not None:
            show(problems)
        return _fail(problems, code)
    return 0


def _explain(error: Exception) -> tuple[Sequence[str], int]:
    """Returns messages and exit code of an error that users can do something about."""
    # Imported here, so that a program that does not fail does not wait for them.
    from dreamerv3.cli import texts
    from dreamerv3.cli.config import ConfigError
    from dreamerv3.cli.scripts import RunError
    from embodied.base import TaskError
    from embodied.checkpoint import CheckpointError
    from embodied.driver import EnvError
    from embodied.logger import MissingPackageError
    from embodied.replay import ReplayMemoryError

    match error:
        case ConfigError():
            return error.problems, 2
        case TaskError() | MissingPackageError():
            return [str(error)], 2
        case ReplayMemoryError():
            flags = "The capacity is --replay.size, and bytes is --replay.bytes."
            return [f"{error} {flags}"], 2
        case CheckpointError():
            return [str(error)], 1
        case RunError():
            return [str(error)], error.code
        case EnvError():
            code = 2 if error.kind in texts.USAGE_ERRORS else 1
            return [texts.env_failure(error)], code
    return [], 1


def run_script(config: elements.Config, script: Callable[[], None]) -> None:
    """Runs a program with the file access and messages of its configuration."""
    from dreamerv3.cli.logdir import limited_access, preserve_config
    from embodied.run.console import show_messages

    access = limited_access(config.logdir_access)
    with show_messages(), access, preserve_config(config.logdir):
        script()


def _find_script(config: elements.Config, argv: Sequence[str]) -> Callable[..., None]:
    if config.script == "suite":  # It passes the arguments on to its runs.
        from dreamerv3.suite.runner import run_suite

        return functools.partial(run_suite, argv=argv)
    if config.script == "ray":
        from dreamerv3.cluster.ray_driver import run_ray

        return run_ray
    from dreamerv3.cli.scripts import SCRIPTS

    return SCRIPTS[config.script]


def _help_topics(argv: Sequence[str]) -> list[str] | None:
    """Returns the requested topics of help; None if no help is requested."""
    if not argv:
        return []
    for index, argument in enumerate(argv):
        if argument in ("--help", "-h"):
            rest = argv[index + 1 :]
            ends = [i for i, word in enumerate(rest) if word.startswith("-")]
            return list(rest[: ends[0] if ends else None])
    return None


def _import_from_here() -> None:
    """Adds the current folder to the import path, for the user's own environments.

    For an installed script, Python adds the folder of the script instead. Processes
    that are started inherit the path.
    """
    here = os.getcwd()
    if here not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, here)


def _fail(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        print(f"dreamerv3: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
