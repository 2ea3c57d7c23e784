"""Keys and spaces that environments have in common; in the process that steps them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from embodied.base import Array, Spaces, TaskError
from embodied.space import Space

# Keys about the episode, which every environment has besides its own observations.
SIGNALS = {
    "reward": Space(np.float32),
    "is_first": Space(bool),
    "is_last": Space(bool),
    "is_terminal": Space(bool),
}
# Keys of a transition that are not observations or actions.
RESERVED = (
    *SIGNALS,
    *("reset", "consec", "stepid", "seed", "envid", "is_eval"),
)
RESERVED_PREFIXES = ("log/", "dyn/")

WORDS = 16  # Number of words of a text that are observed.
WORD_CLASSES = 256  # Number of classes of hashed words; 0 means no word.

Path = tuple[Any, ...]  # Keys and indices that lead to an element of a nested value.


class UnusableEnv(TaskError, TypeError):
    """The task is not a usable environment."""


class UnsupportedSpace(TaskError, TypeError):
    """A foreign space cannot be converted to arrays of fixed shape by unique keys."""


def signals(
    reward: Any,
    is_first: bool = False,
    is_last: bool = False,
    is_terminal: bool = False,
) -> dict[str, Array]:
    """Returns the part of an observation whose spaces are `SIGNALS`."""
    return {
        "reward": np.float32(reward),
        "is_first": np.bool_(is_first),
        "is_last": np.bool_(is_last),
        "is_terminal": np.bool_(is_terminal),
    }


def class_action(classes: int) -> Spaces:
    """Returns the action space of environments whose only action is a class."""
    return {"reset": Space(bool), "action": Space(np.int32, (), 0, classes)}


def check_at_least(least: int, **options: int) -> None:
    """Raises ValueError unless all options are at least `least`."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"Expected {name} of at least {least}, got {value}.")


def check_keys(
    name: str, obs_keys: Iterable[str], act_keys: Iterable[str], advice: str
) -> None:
    """Raises UnsupportedSpace unless all keys are free and unique.

    Args:
      name: name of the environment.
      obs_keys: keys of its observations.
      act_keys: keys of its actions.
      advice: how to rename a key, as a sentence.
    """
    taken: set[str] = set()
    for kind, keys in (("observation", obs_keys), ("action", act_keys)):
        for key in keys:
            if key in RESERVED or key.startswith(RESERVED_PREFIXES):
                problem = "is reserved"
            elif key in taken:
                problem = "occurs twice"
            else:
                taken.add(key)
                continue
            raise UnsupportedSpace(
                f"Expected {kind} keys of env {name} that are free and unique, got "
                f"{key!r}, which {problem}. {advice}"
            )


def flatten(space: Any, key: str) -> Iterator[tuple[str, Path, Any]]:
    """Yields key, path and leaf of every element of a nested space or spec.

    Keys are the parts of the path, joined with slashes; `key` comes first where the
    outermost space is not a mapping.
    """
    root = () if isinstance(space, Mapping) else (key,)
    for path, leaf in _walk(space, ()):
        yield "/".join((*root, *map(str, path))), path, leaf


def unflatten(space: Any, values: Iterator[Any]) -> Any:
    """Builds a nested value of `space` from its leaves, in the order of `flatten`."""
    if isinstance(space, Mapping):
        return {part: unflatten(child, values) for part, child in space.items()}
    if isinstance(space, Sequence):
        children = [unflatten(child, values) for child in space]
        return children if isinstance(space, list) else tuple(children)
    return next(values)


def hash_words(text: str | bytes | np.ndarray) -> np.ndarray:
    """Returns the class of each word [WORDS] int32, with zeros after the last one."""
    text = text.item() if isinstance(text, np.ndarray) else text
    text = text.decode() if isinstance(text, bytes) else text
    words = np.zeros(WORDS, np.int32)
    for index, word in enumerate(text.lower().split()[:WORDS]):
        words[index] = zlib.crc32(word.encode()) % (WORD_CLASSES - 1) + 1
    return words


def is_image(space: Any) -> bool:
    """Returns whether a space or spec is 3-dimensional and uint8."""
    shape = getattr(space, "shape", None) or ()
    return len(shape) == 3 and space.dtype == np.uint8


def _walk(space: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(space, Mapping):
        children: Iterable[tuple[Any, Any]] = space.items()
    elif isinstance(space, Sequence):
        children = enumerate(space)
    else:
        yield path, space
        return
    for part, child in children:
        yield from _walk(child, (*path, part))
