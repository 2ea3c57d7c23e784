"""How roles find and reach each other: factories, addresses, keys. Any role."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from embodied import rpc
from embodied.checkpoint import CheckpointError, write_file
from embodied.run.settings import RunSettings

AUTO = "{auto}"
LOCAL_HOST, LOCAL_HOST_IPV6 = "localhost", "[::1]"
ADDRESSES = ("actor_addr", "replay_addr", "logger_addr")
ADDRESS_FILE = "addresses.json"  # In the logdir.

# Seconds until a role logs which role it waits for, and until it logs it again.
FIRST_NOTE, NEXT_NOTE = 5.0, 60.0
STOP_SECONDS = 1.0  # Until a role that waits notices that it is to stop.
LOOK_UP_SECONDS = 2.0  # To resolve a host's name, for the message of a wait.

logger = logging.getLogger("embodied.run")


class RoleError(ValueError):
    """A role cannot work with what it was given; the message says what to change."""


def load_factory(factory: bytes | Callable[..., Any]) -> Callable[..., Any]:
    """Returns a factory that may have been sent as cloudpickle bytes."""
    return cloudpickle.loads(factory) if isinstance(factory, bytes) else factory


def resolve_addresses(settings: RunSettings) -> RunSettings:
    """Returns the settings with `{auto}` replaced by free ports of this machine."""
    host = LOCAL_HOST_IPV6 if settings.ipv6 else LOCAL_HOST
    changes: dict[str, Any] = {}
    for key in ADDRESSES:
        address = str(getattr(settings, key))
        if AUTO in address:
            address = address.replace(AUTO, str(rpc.free_port()))
        if host != LOCAL_HOST and address.startswith(f"{LOCAL_HOST}:"):
            address = host + address.removeprefix(LOCAL_HOST)
        changes[key] = address
    return dataclasses.replace(settings, **changes)


def write_addresses(settings: RunSettings) -> None:
    """Writes the addresses of a run into its logdir, for others that join it."""
    addresses = {key: getattr(settings, key) for key in ADDRESSES}
    content = json.dumps(addresses, indent=2).encode()
    try:
        write_file(Path(settings.logdir), ADDRESS_FILE, content)
    except CheckpointError as error:  # The run itself does not need it.
        logger.warning("The addresses could not be written: %s", error)


def read_addresses(logdir: str | Path) -> dict[str, str]:
    """Returns the addresses of the last run in a logdir; empty if there are none.

    While a run is still starting, they are those of the run before.
    """
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(Path(logdir, ADDRESS_FILE).read_text())
        return {key: str(found[key]) for key in ADDRESSES if key in found}
    return {}


def check_addresses(settings: RunSettings, *keys: str) -> None:
    """Raises RoleError if a role that starts by itself does not know an address."""
    unknown = [key for key in keys if AUTO in str(getattr(settings, key))]
    if unknown:
        flags = " ".join(f"--run.{key} HOST:PORT" for key in unknown)
        raise RoleError(
            f"A role that starts by itself cannot choose ports for others: expected "
            f"{' and '.join(f'run.{key}' for key in unknown)} as HOST:PORT, got "
            f"{AUTO}. Pass {flags}, the same to every role."
        )


def check_servers(settings: RunSettings, *keys: str) -> None:
    """Raises RoleError if roles of this machine cannot listen at their addresses."""
    owners: dict[str, str] = {}
    for key in keys:
        address = str(getattr(settings, key))
        other = owners.setdefault(address, key)
        if other != key:
            raise RoleError(
                f"run.{key}: expected an address of its own, got {address}, which is "
                f"that of run.{other}, too."
            )
        try:
            server = rpc.transport(settings.transport).Server
            server.check(address, **security(settings, settings.transport))
        except (rpc.AuthError, ValueError) as error:
            raise RoleError(f"run.{key}: {error}") from error


def make_server(
    kind: str, addr: str, name: str, settings: RunSettings, **kwargs: Any
) -> Any:
    """Makes the server of a role; `kind` is 'Server' or 'BatchServer'."""
    make = getattr(rpc.transport(settings.transport), kind)
    return make(addr, name, **security(settings, settings.transport), **kwargs)


def make_client(
    addr: str, name: str, settings: RunSettings, kind: str = "", **kwargs: Any
) -> Any:
    """Makes a client of a role over the transport `kind`, or that of the settings."""
    kind = kind or settings.transport
    make = rpc.transport(kind).Client
    return make(addr, name, link=settings.link, **security(settings, kind), **kwargs)


def connect(
    client: Any,
    who: str,
    whom: str,
    stopped: Callable[[], bool],
    quiet: bool = False,
) -> bool:
    """Waits until a role can be reached, and logs a message if it takes long.

    Args:
      client: connection to the role.
      who: the role that waits.
      whom: the role that it waits for.
      stopped: whether to give up.
      quiet: logs nothing, since others log the same.

    Returns:
      Whether the role was reached; False if the wait was given up.

    Raises:
      AuthError: the role refuses this role's key.
      RoleError: the role refuses this role for another reason.
    """

    def is_there(seconds: float) -> bool:
        try:
            client.connect(timeout=seconds)
        except rpc.RemoteError as error:
            raise RoleError(f"The {whom} refuses this role. {error}") from error
        except TimeoutError:
            return False
        return True

    def tell() -> None:
        if quiet:
            return
        note = f"{who} waits for the {whom} at {client.addr}."
        if reason := _unresolved(client.addr):
            # No error: the name may resolve later, as that of a host that starts.
            logger.warning("%s Its name does not resolve: %s.", note, reason)
        else:
            logger.info(note)

    return wait_until(is_there, tell, stopped)


def wait_until(
    is_there: Callable[[float], bool],
    tell: Callable[[], None],
    stopped: Callable[[], bool],
) -> bool:
    """Waits for something, and calls `tell` from time to time if it takes long.

    Args:
      is_there: waits for up to so many seconds; returns whether it is there.
      tell: logs who waits for what.
      stopped: whether to give up.

    Returns:
      Whether it is there; False if the wait was given up.
    """
    noted = time.monotonic() + FIRST_NOTE
    while not stopped():
        if is_there(STOP_SECONDS):
            return True
        if time.monotonic() >= noted:
            tell()
            noted = time.monotonic() + NEXT_NOTE
    return False


class PendingCalls:
    """Futures whose results are not read, but whose errors are reported.

    Bounded by the number of open calls that a client allows. Belongs to one thread.
    """

    def __init__(self, on_error: Callable[[Any, Exception], None]):
        self._on_error = on_error
        self._open: list[tuple[Any, Any]] = []

    def add(self, future: Any, context: Any = None) -> None:
        """Keeps a future until it is done; `context` is for the error."""
        self._open.append((future, context))
        self.check()

    def check(self) -> None:
        """Drops futures that are done, and reports their errors."""
        calls, self._open = self._open, []
        for future, context in calls:
            if not future.done():
                self._open.append((future, context))
            elif (error := future.exception(0)) is not None:
                self._on_error(context, error)

    @property
    def all_done(self) -> bool:
        """Whether all futures were done at the last `check`."""
        return not self._open


class TimeShare:
    """Measures the share of time that threads spend inside. Any one thread reads.

    with watch:
      wait()
    share = watch.share()     # Since the last call.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()  # Guards what is below.
        self._spent = 0.0
        self._inside = 0
        self._since = clock()
        self._began = self._since

    def __enter__(self) -> None:
        with self._lock:
            self._advance()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._advance()
            self._inside -= 1

    def share(self) -> float:
        """Returns the share since the last call; above 1 for several threads."""
        with self._lock:
            self._advance()
            elapsed = self._since - self._began
            share = self._spent / elapsed if elapsed > 0 else 0.0
            self._spent, self._began = 0.0, self._since
            return share

    def _advance(self) -> None:
        now = self._clock()
        self._spent += self._inside * (now - self._since)
        self._since = now


def prefixed(prefix: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns metrics under a prefix."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def security(settings: RunSettings, kind: str) -> dict[str, Any]:
    """Returns the security arguments of servers and clients of a transport."""
    if kind == "portal":  # It has no keys.
        return {"insecure": settings.insecure}
    return {"keys": rpc.Keys.load(settings.keyfile) if settings.keyfile else None}


def _unresolved(address: str) -> str:
    """Returns why the name in an address does not resolve; empty if it does."""
    host = address.rpartition(":")[0].strip("[]")
    reasons: list[str] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            reasons.append(f"{host} ({getattr(error, 'strerror', None) or error})")

    # In a thread, since name servers that do not answer take long, and the caller may
    # be told to stop.
    thread = threading.Thread(target=look_up, name="look up", daemon=True)
    thread.start()
    thread.join(LOOK_UP_SECONDS)
    return reasons[0] if reasons else ""
