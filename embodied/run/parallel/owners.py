"""Ownership of envs by workers. Agent process, the loop thread of the actor's server.

Steps of one env that two workers take in turn would be stored as one episode. So every
env id has one owner: the client that named it in its HELLO. A client that names an id
of another one is let in

- at once, if both have one supervisor, which has ended the other worker before;
- when the owner has gone, if nothing is heard of it: it may have been killed;
- never, if the owner is heard of meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from embodied.rpc import WireError

ENVIDS, SUPERVISOR = "envids", "supervisor"  # Keys of what a worker tells in its HELLO.
ASKED_SECONDS = 60.0  # After which a client that was not let in is forgotten.
MAX_ENVID = 1 << 31


def worker_info(envids: Any, supervisor: str) -> dict[str, Any]:
    """Returns what a worker, or a host, tells the actor's server in its HELLO."""
    return {ENVIDS: [int(envid) for envid in envids], SUPERVISOR: supervisor}


class Owners:
    """The clients of a server by env id.

    Args:
      sessions: of the server.
      on_free: called with env ids whose owner has gone.
    """

    def __init__(self, sessions: Any, on_free: Callable[[list[int]], None]):
        self._sessions = sessions
        self._on_free = on_free
        self._owners: dict[int, Any] = {}
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
        self._owners.update(dict.fromkeys(envids, session))
        return True

    def leave(self, session: Any) -> None:
        """Frees the env ids of a client, but none that belong to another by now."""
        gone = [envid for envid, owner in self._owners.items() if owner is session]
        for envid in gone:
            del self._owners[envid]
        if gone:
            self._on_free(gone)

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
