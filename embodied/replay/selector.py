"""The interface of selectors, and what most of them share. The buffer's process."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import numpy as np

from embodied.base import Tree


class Selector:
    """Draws slots. An empty selector is true: it is still the one that was given.

    `uses_priorities` says whether the buffer has to keep priorities of steps and to
    call `prioritize`.
    """

    uses_priorities: bool = False

    def insert(self, slots: np.ndarray) -> None:
        """Adds slots [n], the oldest first. They must not be present."""
        raise NotImplementedError(f"{type(self).__name__}.insert")

    def remove(self, slots: np.ndarray) -> None:
        """Removes slots [n]. They must be present."""
        raise NotImplementedError(f"{type(self).__name__}.remove")

    def sample(self, amount: int, peek: bool = False) -> np.ndarray:
        """Draws slots [amount] int64, or raises LookupError if there are none.

        With `peek`, for reports, nothing changes that a call without it could see:
        neither priorities nor cursors, nor the random state it draws from.
        """
        raise NotImplementedError(f"{type(self).__name__}.sample")

    def prioritize(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities [n], or [n, T] for the T steps of each slot's sequence."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def __bool__(self) -> bool:
        return True

    def save(self) -> Tree:
        """Returns the slots and all other state, the random state included."""
        raise NotImplementedError(f"{type(self).__name__}.save")

    def load(self, data: Tree) -> None:
        """Restores what `save` returned: the same samples follow."""
        raise NotImplementedError(f"{type(self).__name__}.load")

    def _check_amount(self, amount: int) -> None:
        if operator.index(amount) < 0:
            raise ValueError(f"Expected to sample 0 slots or more, got {amount}.")
        if amount and not len(self):
            raise LookupError(
                f"Cannot sample {amount} slots: this {type(self).__name__} selector "
                "is empty. Wait until the replay buffer holds a full sequence."
            )

    def _saved(self, **entries: Tree) -> Tree:
        return {"kind": type(self).__name__, **entries}

    def _check_saved(self, data: Tree, *keys: str) -> None:
        kind = type(self).__name__
        found = data.get("kind") if isinstance(data, Mapping) else type(data).__name__
        if found != kind or not all(key in data for key in keys):
            raise ValueError(
                f"Expected the saved state of a {kind} selector with {list(keys)}, "
                f"got one of {found}. Use the selectors that the run was started with."
            )


class SeededSelector(Selector):
    """A selector with random states: one for samples, one for peeks."""

    def __init__(self, seed: int):
        # The name is part of the seed because a Mixture and its members may have
        # equal ones: from the same numbers, which member is chosen would decide
        # which of its slots is drawn.
        name = type(self).__name__.encode()
        self._rngs = [
            np.random.default_rng([operator.index(seed), purpose, *name])
            for purpose in (0, 1)
        ]

    def _rng(self, peek: bool) -> np.random.Generator:
        return self._rngs[1 if peek else 0]

    def _save_random(self) -> Tree:
        return [dict(rng.bit_generator.state) for rng in self._rngs]

    def _load_random(self, states: Tree) -> None:
        for rng, state in zip(self._rngs, states, strict=True):
            rng.bit_generator.state = state
