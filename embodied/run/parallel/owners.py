"""Ownership of envs by workers. Agent process, the loop thread of the actor's server.

If two workers stepped the same env, their steps would be stored as one episode. So
every env id has one owner: the client that named it in its HELLO. Another client that
names the same id is admitted

- at once, if both have the same supervisor, which has ended the other worker before;
- when the owner is gone, if nothing is heard from it: it may have been killed;
- never, if the owner is heard from meanwhile.

A client that was silent for a while, for example because its network was down, goes on
where it was if it still owns its envs: it has made no step meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from embodied.rpc import WireError

ENVIDS, SUPERVISOR = "envids", "supervisor"  # Keys of a worker's info in its HELLO.
ASKED_SECONDS = 60.0  # After which a client that was not admitted is forgotten.
MAX_ENVID = 1 << 31
NOTE_SECONDS = 10.0  # Until an absence is reported; then it doubles each time.
LOOK_SECONDS = 1.0

logger = logging.getLogger("embodied.run")


def worker_info(envids: Any, supervisor: str) -> dict[str, Any]:
    """Returns the info that a worker, or a host, sends to the actor in its HELLO."""
    return {ENVIDS: [int(envid) for envid in envids], SUPERVISOR: supervisor}


class Owners:
    """The clients of a server that own env ids.

    Args:
      sessions: of the server.
      on_leave: called with env ids whose owner is gone; it may come back.
      on_free: called with env ids that another client owns now.

    Attributes:
      absences: of the clients that are gone. Any thread.
    """

    def __init__(
        self,
        sessions: Any,
        on_leave: Callable[[list[int]], None],
        on_free: Callable[[list[int]], None],
    ):
        self.absences = Absences()
        self._sessions = sessions
        self._on_leave = on_leave
        self._on_free = on_free
        self._owners: dict[int, Any] = {}
        self._away: dict[int, Any] = {}  # The last owners of env ids without one.
        self._asked: dict[bytes, float] = {}  # When waiting clients first asked.
        sessions.admit = self.admit
        sessions.on_leave.append(self.leave)

    def admit(self, session: Any) -> bool:
        """Gives a client the env ids that it names; returns False if it has to wait.

        Raises:
          WireError: one of them belongs to a client that is alive.
        """
        envids, supervisor = read_info(session.info)
        before = []
        for envid in envids:
            owner = self._owners.get(envid)
            if owner is None or owner is session:
                continue
            if not supervisor or read_info(owner.info)[1] != supervisor:
                return self._ask(session, envid, owner)
            before.append(owner)
        self._asked.pop(session.client, None)
        for owner in before:
            self._sessions.lost(owner)
        last = {envid: self._away.pop(envid, session) for envid in envids}
        if freed := [envid for envid in envids if last[envid] is not session]:
            self._on_free(freed)
        self._owners.update(dict.fromkeys(envids, session))
        self.absences.end(envids)
        return True

    def owns(self, envid: int) -> bool:
        """Returns whether a client owns an env id. Any thread."""
        return envid in self._owners

    def env_ids(self) -> list[int]:
        """Returns the env ids that clients own. Any thread."""
        envids = list(self._owners)  # Copied at once: the loop thread changes them.
        return sorted(envids)

    def leave(self, session: Any) -> None:
        """Marks the envs that a client still owned as away, since it is gone.

        They are not free yet: the client may come back.
        """
        gone = [envid for envid, owner in self._owners.items() if owner is session]
        for envid in gone:
            del self._owners[envid]
            self._away[envid] = session
        if gone:
            self.absences.begin(gone, time.monotonic() - session.heard)
            self._on_leave(gone)

    def _ask(self, session: Any, envid: int, owner: Any) -> bool:
        """Returns False until a sign of life of the owner, then raises WireError."""
        now = time.monotonic()
        self._asked = {x: t for x, t in self._asked.items() if now - t < ASKED_SECONDS}
        asked = self._asked.setdefault(session.client, now)
        if owner.heard <= asked:
            return False
        del self._asked[session.client]
        raise WireError(
            f"env {envid} is stepped by worker {owner.name} already. Every host needs "
            "env ids of its own: pass --run.env_offset with the number of envs, those "
            "that evaluate included, on the hosts before it; a worker that runs alone "
            "needs another --replica"
        )


class Absences:
    """Reports long absences of envs and roles. Thread-safe: `_lock` guards all state.

    Args:
      clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        # By env id or name: since when, and after how many seconds to report it next.
        self._away: dict[int | str, tuple[float, float]] = {}
        self._back: dict[int | str, float] = {}  # Seconds for which they were away.

    def begin(self, who: Iterable[int | str], seconds: float = 0.0) -> None:
        """Records who is away, and for how long already."""
        with self._lock:
            for name in who:
                self._away.setdefault(name, (self._clock() - seconds, NOTE_SECONDS))

    def end(self, who: Iterable[int | str]) -> None:
        """Records who is back."""
        with self._lock:
            for name in who:
                since, due = self._away.pop(name, (0.0, NOTE_SECONDS))
                if due > NOTE_SECONDS:  # Its absence was reported.
                    self._back[name] = self._clock() - since

    def notes(self) -> list[str]:
        """Returns the messages that are due now."""
        with self._lock:
            now, lines, due_now = self._clock(), [], False
            for name, (since, due) in self._away.items():
                if now - since >= due:
                    self._away[name] = (since, 2 * (now - since))
                    due_now = True
            if due_now:
                ages = {name: now - since for name, (since, _) in self._away.items()}
                late = {x: age for x, age in ages.items() if age >= NOTE_SECONDS}
                age = max(late.values())
                start = time.strftime("%H:%M:%S", time.localtime(time.time() - age))
                lines.append(
                    f"No contact with {_listed(late)} since {start}, {age:.0f} s ago. "
                    "The run goes on with the others until they are back."
                )
            if self._back:
                seconds = max(self._back.values())
                lines.append(f"Back after {seconds:.0f} s: {_listed(self._back)}.")
            self._back = {}
            return lines


def tell_absences(
    absences: Absences, clients: dict[str, Any], left: threading.Event
) -> None:
    """Logs which envs and which called roles are away, until `left` is set.

    Args:
      absences: of the envs; those of the roles are added.
      clients: connections to other roles, by name.
      left: ends the loop.
    """
    connected: set[str] = set()
    while not left.wait(LOOK_SECONDS):
        for name, client in clients.items():
            if getattr(client, "connected", True):
                connected.add(name)
                absences.end([name])
            elif name in connected:  # Before, whoever waits for its start logs it.
                absences.begin([name])
        for line in absences.notes():
            logger.warning(line)


def _listed(who: Iterable[int | str]) -> str:
    """Returns a list of names, and of env ids as ranges, as text."""
    names = sorted(x for x in who if isinstance(x, str))
    ranges: list[list[int]] = []
    for envid in sorted(x for x in who if not isinstance(x, str)):
        if ranges and envid == ranges[-1][1] + 1:
            ranges[-1][1] = envid
        else:
            ranges.append([envid, envid])
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in ranges]
    return ", ".join(names + ([f"envs {', '.join(texts)}"] if texts else []))


def read_info(info: Any) -> tuple[list[int], str]:
    """Returns the env ids and the supervisor in a HELLO; both may be missing.

    Raises:
      WireError: the info is not what `worker_info` returns.
    """
    if info is None:
        return [], ""
    envids = info.get(ENVIDS, []) if isinstance(info, dict) else None
    supervisor = info.get(SUPERVISOR, "") if isinstance(info, dict) else None
    if not (
        isinstance(envids, list)
        and all(type(x) is int and 0 <= x < MAX_ENVID for x in envids)
        and isinstance(supervisor, str)
    ):
        raise WireError(
            f"expected the info of a worker as {{'{ENVIDS}': [0, 1], '{SUPERVISOR}': "
            f"'NAME'}}, got {info!r:.200}"
        )
    return envids, supervisor
