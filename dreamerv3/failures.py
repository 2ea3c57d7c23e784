"""What the command line says of environments that have failed. The main process."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import textwrap
import traceback

import embodied
from embodied.driver import EnvError

# Types of errors that come from a wrong command line, rather than on the way.
MISTAKES = (
    *("UnknownTask", "MissingExtra", "UnusableEnv", "UnsupportedSpace"),
    *("ObservationError", "ReplayMemoryError"),
)
CLEAR = (*MISTAKES, "SpaceError")  # Their message says all.

_OURS = tuple(
    f"{path}/"
    for path in (
        pathlib.Path(embodied.__file__).parent,
        pathlib.Path(__file__).parent,
    )
)
_PASSED_ON = (*_OURS, contextlib.__file__)  # Whose frames only call or pass errors on.
_FRAME = r'  File "(?P<path>.*?)", line \d+.*\n(?:    .*\n|  \[.*\n)*'
_FRAMES = re.compile(rf"(?:{_FRAME.replace('?P<path>', '?:')})+")


def env_failure(error: EnvError) -> str:
    """Returns what to show of the failure of an environment of this process's."""
    where = error.traceback
    if not where and error.__cause__ is not None:
        where = "".join(traceback.format_exception(error.__cause__))
    text = f"Env {error.index} {error.reason}"
    return with_traceback(text, error.kind, foreign_part(where))


def with_traceback(text: str, kind: str, where: str) -> str:
    """Adds a traceback, unless there is none or the text says all.

    Args:
      text: what happened.
      kind: name of the error's type.
      where: the traceback.
    """
    if kind in CLEAR or not where:
        return text
    return f"{text}\n\n{textwrap.indent(where.rstrip(), '  ')}"


def foreign_part(where: str) -> str:
    """Returns a traceback without our frames above the first one of somebody else.

    One that has only ours remains as it is: the mistake is there.
    """
    return _FRAMES.sub(_without_our_calls, where)


def _without_our_calls(match: re.Match[str]) -> str:
    frames = list(re.finditer(_FRAME, match[0]))
    foreign = itertools.dropwhile(
        lambda frame: frame["path"].startswith(_PASSED_ON), frames
    )
    return "".join(frame[0] for frame in foreign) or match[0]
