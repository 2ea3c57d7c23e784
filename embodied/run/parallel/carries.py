"""Keeps the policy's recurrent state of every env. Agent process, actor threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from embodied.base import Agent, Array, Tree

logger = logging.getLogger("embodied.run")


class Table(Protocol):
    """Carries by slot; all methods may be called from several threads."""

    def resize(self, slots: int) -> None:
        """Makes room for so many envs; all of them begin anew."""

    def reset(self, slots: Sequence[int]) -> None:
        """Lets slots begin anew, for other envs."""

    def step(
        self, slots: Any, obs: dict[str, Array], mode: str, envids: Any
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Steps the policy of different slots; returns actions and outputs [B, ...]."""


class DeviceTable:
    """Carries that an agent keeps on its device (`init_table`, `policy_table`)."""

    def __init__(self, agent: Any):
        self._agent = agent

    def resize(self, slots: int) -> None:
        """Makes room for so many envs; all of them begin anew."""
        self._agent.init_table(slots)

    def reset(self, slots: Sequence[int]) -> None:
        """Lets slots begin anew, for other envs."""
        self._agent.reset_slots(slots)

    def step(
        self, slots: Any, obs: dict[str, Array], mode: str, envids: Any
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Steps the policy in one call of the device."""
        return self._agent.policy_table(slots, obs, mode, envids)


class HostTable:
    """Carries of any agent, as rows in this process's memory.

    `_lock` guards the rows; the policy runs without it.
    """

    def __init__(self, agent: Agent):
        self._agent = agent
        self._lock = threading.Lock()
        self._rows: dict[int, Tree] = {}
        self._first = _rows(agent.init_policy(1), 1)[0]

    def resize(self, slots: int) -> None:
        """Lets all envs begin anew."""
        with self._lock:
            self._rows.clear()

    def reset(self, slots: Sequence[int]) -> None:
        """Lets slots begin anew, for other envs."""
        with self._lock:
            for slot in slots:
                self._rows.pop(int(slot), None)

    def step(
        self, slots: Any, obs: dict[str, Array], mode: str, envids: Any
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Steps the policy, with carries stacked and taken apart again."""
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


def make_table(agent: Agent) -> Table:
    """Makes the table that suits an agent."""
    on_device = all(hasattr(agent, x) for x in ("init_table", "policy_table"))
    return DeviceTable(agent) if on_device else HostTable(agent)


class Slots:
    """Slots of the table by env. Threads: `_lock` guards all.

    Args:
      table: of the carries.
      count: envs that are expected; the table grows if there are more.
    """

    def __init__(self, table: Table, count: int):
        self._table = table
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._away: set[int] = set()  # Envs that may come back.
        self._resize(count)

    def __len__(self) -> int:
        """Returns the number of envs that are not away."""
        with self._lock:
            return len(self._slots) - len(self._away)

    def find(self, envids: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slots of envs, and which of these envs are new."""
        with self._lock:
            ids = list(envids)
            self._away.difference_update(ids)
            missing = [envid for envid in ids if envid not in self._slots]
            if len(missing) > len(self._free):
                self._release(list(self._away))  # Those that are there come first.
            if len(missing) > len(self._free):
                self._resize(2 * (len(self._slots) + len(missing)))
                missing = ids
            for envid in missing:
                self._slots[envid] = self._free.pop()
            slots = [self._slots[envid] for envid in ids]
            return np.array(slots, np.int32), np.isin(ids, missing)

    def leave(self, envids: Iterable[int]) -> None:
        """Notes envs that are away; their slots are kept while nobody needs them."""
        with self._lock:
            self._away.update(x for x in envids if x in self._slots)

    def free(self, envids: Iterable[int]) -> None:
        """Gives the slots of envs that are gone to others."""
        with self._lock:
            self._release(list(envids))

    def _release(self, envids: list[int]) -> None:
        gone = [self._slots.pop(x) for x in envids if x in self._slots]
        self._away.difference_update(envids)
        if gone:
            self._table.reset(gone)
            self._free.extend(gone)

    def _resize(self, count: int) -> None:
        if self._slots:
            logger.info(
                "There are more environments than expected: the actor makes room for "
                "%d, and all of them begin with an empty memory.",
                count,
            )
        self._table.resize(count)
        self._slots = {}
        self._away = set()
        self._free = list(range(count))[::-1]


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
