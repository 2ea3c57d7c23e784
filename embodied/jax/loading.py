"""Chooses what to load of a checkpoint, and says what was not. Agent process."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

SHOWN = 8  # Names in a message; the others are counted.


def choose(
    given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], regex: str | None
) -> dict[str, Any]:
    """Returns the arrays to load, by flat name.

    Args:
      given: what there is to load.
      shapes: what the agent has.
      regex: see `matches`. Names that exist only here or only there are reported
        with it; without it they are an error.

    Raises:
      ValueError: shapes differ, names differ, or nothing matches.
    """
    chosen = {name: value for name, value in given.items() if matches(regex, name)}
    known = {name: value for name, value in chosen.items() if name in shapes}
    wanted = {name for name in shapes if matches(regex, name)}
    absent, unknown = sorted(wanted - set(chosen)), sorted(set(chosen) - set(shapes))
    wrong = [
        f"{name} (expected {shapes[name]}, got {np.shape(value)})"
        for name, value in sorted(known.items())
        if np.shape(value) != shapes[name]
    ]
    problems = _listing(" Other shapes: {}.", wrong)
    if regex is None:
        problems += _listing(" Missing: {}.", absent)
        problems += _listing(" Not in this agent: {}.", unknown)
    if problems:
        # Without a regex, as for a run that continues, the caller knows what to do.
        advice = (
            " Use the same task and sizes, or leave these names out with "
            "run.from_checkpoint_regex."
        )
        raise ValueError(
            "The arrays to load expected the agent that they were saved from."
            f"{problems}{'' if regex is None else advice}"
        )
    if not known:
        raise ValueError(
            "run.from_checkpoint_regex: expected to match names such as "
            f"{min(shapes)!r}, got {regex!r}, which matches none."
        )
    logger.info(
        "Loaded %d of the agent's %d arrays.%s%s%s",
        len(known),
        len(shapes),
        _listing(" Not in what was loaded: {}.", absent),
        _listing(" Not in this agent: {}.", unknown),
        _listing(" Left out: {}.", sorted(set(given) - set(chosen))),
    )
    return known


def matches(regex: str | None, name: str) -> bool:
    """Whether a regex matches the beginning of a name; None matches all names."""
    return regex is None or re.match(regex, name) is not None


def _listing(text: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return text.format(", ".join(names[:SHOWN]) + more)
