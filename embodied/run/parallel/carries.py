"""Keeps the policy's recurrent state of every env. Agent process, actor threads."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from embodied.base import Agent, Array, Tree

logger = logging.getLogger("embodied.run")


class HostTable:
    """Carries of any agent, as rows in this process's memory, one for each slot.

    Has the methods by which other agents keep the carries on their device. All of them
    may be called from several threads, `policy_table` with different slots. `_lock`
    guards the rows; the policy runs without it.
    """

    def __init__(self, agent: Agent):
        self._agent = agent
        self._lock = threading.Lock()
        self._rows: dict[int, Tree] = {}
        self._first = _rows(agent.init_policy(1), 1)[0]

    def init_table(self, slots: int) -> None:
        """Resets all carries; there is room for any number of slots."""
        with self._lock:
            self._rows.clear()

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Resets the carries of slots, for other envs."""
        with self._lock:
            for slot in slots:
                self._rows.pop(int(slot), None)

    def policy_table(
        self, slots: Any, obs: dict[str, Array], mode: str, envids: Any
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Runs the policy on the stacked carries, and splits the new ones into rows."""
        with self._lock:
            rows = [self._rows.get(int(slot), self._first) for slot in slots]
        carry = _map(lambda *leaves: np.stack(leaves), *rows)
        carry, actions, outputs = self._agent.policy(carry, obs, mode)
        rows = _rows(carry, len(slots))
        with self._lock:
            self._rows.update(zip(map(int, slots), rows))
        return (
            {key: np.asarray(value) for key, value in actions.items()},
            {key: np.asarray(value) for key, value in outputs.items()},
        )


def make_table(agent: Agent) -> Any:
    """Returns the agent if it keeps carries on its device, else a `HostTable`."""
    return agent if hasattr(agent, "policy_table") else HostTable(agent)


class Slots:
    """Assigns slots of the table to envs. Thread-safe: `_lock` guards all state.

    A slot that is freed during a step is given to another env only after it, since the
    step writes its carry in the end.

    Args:
      table: of the carries, from `make_table`.
      count: number of expected envs; the table grows if there are more.
    """

    def __init__(self, table: Any, count: int):
        self._table = table
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._stepping: collections.Counter[int] = collections.Counter()
        self._freed: set[int] = set()  # Of those that are stepping.
        self._away: set[int] = set()  # Envs that may come back.
        self._resize(count)

    def __len__(self) -> int:
        """Returns the number of envs that are not away."""
        with self._lock:
            return len(self._slots) - len(self._away)

    def find(self, envids: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slots of envs, and which of these envs are new.

        Call `done` with the slots after the step.
        """
        with self._lock:
            ids = list(envids)
            self._away.difference_update(ids)
            missing = [envid for envid in ids if envid not in self._slots]
            if len(missing) > len(self._free):
                self._release(list(self._away))  # Present envs come first.
            if len(missing) > len(self._free):
                self._resize(2 * (len(self._slots) + len(missing)))
                missing = ids
            for envid in missing:
                self._slots[envid] = self._free.pop()
            slots = [self._slots[envid] for envid in ids]
            self._stepping.update(slots)
            return np.array(slots, np.int32), np.isin(ids, missing)

    def done(self, slots: np.ndarray) -> None:
        """Ends a step of slots from `find`."""
        with self._lock:
            self._stepping.subtract(slots.tolist())
            self._stepping = +self._stepping  # Without those that are zero.
            if self._freed:
                late = [x for x in self._freed if x not in self._stepping]
                self._freed.difference_update(late)
                self._reuse(late)

    def leave(self, envids: Iterable[int]) -> None:
        """Marks envs as away; their slots are kept until other envs need them."""
        with self._lock:
            self._away.update(x for x in envids if x in self._slots)

    def free(self, envids: Iterable[int]) -> None:
        """Frees the slots of envs, for others to use."""
        with self._lock:
            self._release(list(envids))

    def _release(self, envids: list[int]) -> None:
        gone = [self._slots.pop(x) for x in envids if x in self._slots]
        self._away.difference_update(envids)
        self._freed.update(x for x in gone if x in self._stepping)
        self._reuse([x for x in gone if x not in self._stepping])

    def _reuse(self, slots: list[int]) -> None:
        if slots:
            self._table.reset_slots(slots)
            self._free.extend(slots)

    def _resize(self, count: int) -> None:
        if self._slots:
            logger.info(
                "There are more environments than expected: the actor makes room for "
                "%d, and the recurrent state of all of them is reset.",
                count,
            )
        count += len(self._stepping)
        self._table.init_table(count)
        self._slots = {}
        self._away = set()
        self._freed = set(self._stepping)
        self._free = [x for x in range(count)[::-1] if x not in self._freed]


def _map(function: Callable[..., Any], *trees: Tree) -> Tree:
    first = trees[0]
    if isinstance(first, dict):
        return {key: _map(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_map(function, *parts) for parts in zip(*trees)))
    if isinstance(first, list | tuple):
        return type(first)(_map(function, *parts) for parts in zip(*trees))
    return None if first is None else function(*trees)


def _rows(tree: Tree, count: int) -> list[Tree]:
    arrays = _map(np.asarray, tree)
    return [_map(lambda x, index=index: x[index], arrays) for index in range(count)]
