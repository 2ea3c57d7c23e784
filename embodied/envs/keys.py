"""Keys and spaces that environments have in common; in the process that steps them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from embodied.base import Array, TaskError
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


class UnusableEnv(TaskError, TypeError):
    """The task is not a usable environment."""


class UnsupportedSpace(TaskError, TypeError):
    """A foreign space cannot be converted to arrays of fixed shape by unique keys."""


def signals(
    reward: Any, is_first: Any = False, is_last: Any = False, is_terminal: Any = False
) -> dict[str, Array]:
    """Returns the part of observations [...] whose spaces are `SIGNALS`."""
    return {
        "reward": np.float32(reward),
        "is_first": np.bool_(is_first),
        "is_last": np.bool_(is_last),
        "is_terminal": np.bool_(is_terminal),
    }


def check_at_least(least: int, **options: int) -> None:
    """Raises ValueError unless all options are at least `least`."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"Expected {name} of at least {least}, got {value}.")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless an option is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"Expected {name} to be one of {allowed}, got {value!r}.")


def hash_words(text: str | bytes | np.ndarray) -> np.ndarray:
    """Returns the class of each word [WORDS] int32, with zeros after the last one."""
    text = text.item() if isinstance(text, np.ndarray) else text
    text = text.decode() if isinstance(text, bytes) else text
    words = np.zeros(WORDS, np.int32)
    for index, word in enumerate(text.lower().split()[:WORDS]):
        words[index] = zlib.crc32(word.encode()) % (WORD_CLASSES - 1) + 1
    return words
