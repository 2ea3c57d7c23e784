"""Ownership of envs by workers. Agent process, the loop thread of the actor's server.

Steps of one env that two workers take in turn would be stored as one episode. So every
env id has one owner: the client that named it in its HELLO. A client that names an id
of another one is let in

- at once, if both have one supervisor, which has ended the other worker before;
- when the owner has gone, if nothing is heard of it: it may have been killed;
- never, if the owner is heard of meanwhile.

A client that was silent for a while, as one behind a network that was down, goes on
where it was if it still owns its envs: it has made no step meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from embodied.rpc import WireError

ENVIDS, SUPERVISOR = "envids", "supervisor"  # Keys of what a worker tells in its HELLO.
ASKED_SECONDS = 60.0  # After which a client that was not let in is forgotten.
MAX_ENVID = 1 << 31
NOTE_SECONDS = 10.0  # Until it is said that somebody is away; then each time twice.
LOOK_SECONDS = 1.0

logger = logging.getLogger("embodied.run")


def worker_info(envids: Any, supervisor: str) -> dict[str, Any]:
    """Returns what a worker, or a host, tells the actor's server in its HELLO."""
    return {ENVIDS: [int(envid) for envid in envids], SUPERVISOR: supervisor}


class Owners:
    """The clients of a server by env id.

    Args:
      sessions: of the server.
      on_leave: called with env ids whose owner has gone, perhaps to come back.
      on_free: called with env ids that another client has now.

    Attributes:
      absences: of the clients that have gone. Any thread.
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
        self._away: dict[int, Any] = {}  # The last owners of other env ids.
        self._asked: dict[bytes, float] = {}  # When clients that wait came first.
        sessions.admit = self.admit
        sessions.on_leave.append(self.leave)

    def admit(self, session: Any) -> bool:
        """Gives a client the env ids that it names; False if it has to wait for them.

        Raises:
          WireError: one of them belongs to a client that lives.
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
        """Tells whether a client has named an env id. Any thread."""
        return envid in self._owners

    def env_ids(self) -> list[int]:
        """Returns the env ids that clients have. Any thread."""
        envids = list(self._owners)  # Copied at once: the loop thread changes them.
        return sorted(envids)

    def leave(self, session: Any) -> None:
        """Notes that a client has gone; those of its envs that it had still are away.

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
        """Waits for a sign of life of the owner."""
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
    """Says who is away and since when, once that lasts. Threads: `_lock` guards all.

    Args:
      clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        # By env id or name: since when, and the seconds after which it is said next.
        self._away: dict[int | str, tuple[float, float]] = {}
        self._back: dict[int | str, float] = {}  # Seconds for which they were away.

    def begin(self, who: Iterable[int | str], seconds: float = 0.0) -> None:
        """Notes who is away, and for how long already."""
        with self._lock:
            for name in who:
                self._away.setdefault(name, (self._clock() - seconds, NOTE_SECONDS))

    def end(self, who: Iterable[int | str]) -> None:
        """Notes who is back."""
        with self._lock:
            for name in who:
                since, due = self._away.pop(name, (0.0, NOTE_SECONDS))
                if due > NOTE_SECONDS:  # It was said that it is away.
                    self._back[name] = self._clock() - since

    def notes(self) -> list[str]:
        """Returns what is to be said now."""
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
                    f"Nothing is heard of {_listed(late)} since {start}, {age:.0f} s "
                    "ago. The run goes on with the others, and when they are back."
                )
            if self._back:
                seconds = max(self._back.values())
                lines.append(f"Back after {seconds:.0f} s: {_listed(self._back)}.")
            self._back = {}
            return lines


def tell_absences(
    absences: Absences, clients: dict[str, Any], left: threading.Event
) -> None:
    """Logs who is away, of envs and of the roles that are called, until `left` is set.

    Args:
      absences: of the envs.
      clients: connections to other roles, by name.
      left: ends it.
    """
    connected: set[str] = set()
    while not left.wait(LOOK_SECONDS):
        for name, client in clients.items():
            if getattr(client, "connected", True):
                connected.add(name)
                absences.end([name])
            elif name in connected:  # Before, it is said by who waits for the start.
                absences.begin([name])
        for line in absences.notes():
            logger.warning(line)


def _listed(who: Iterable[int | str]) -> str:
    """Returns names, and env ids as ranges."""
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
    """Returns the env ids and the supervisor that a HELLO names; none are fine, too.

    Raises:
      WireError: it is not what `worker_info` returns.
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
