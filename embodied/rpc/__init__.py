"""Calls between processes: servers, clients and the keys to connect. Any process.

Names are imported on first use, so that a process loads only the modules it uses.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

_WHERE = {
    "AuthError": "auth",
    "BatchServer": "batching",
    "Client": "client",
    "Disconnected": "calls",
    "Future": "calls",
    "Keys": "auth",
    "RemoteError": "calls",
    "Server": "server",
    "Unanswered": "calls",
    "WireError": "wire",
    "free_port": "auth",
}

TRANSPORTS = ("zmq", "portal")  # Choices of `run.transport`.

__all__ = ["TRANSPORTS", "Transport", "transport", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    return getattr(module, name)


@dataclass(frozen=True)
class Transport:
    """The classes of one transport; all transports' classes take the same arguments."""

    name: str
    Server: Any
    BatchServer: Any
    Client: Any


def transport(name: str) -> Transport:
    """Returns a transport by its name, 'zmq' or 'portal'.

    Raises:
      ValueError: no transport has that name.
      ImportError: its package is not installed.
    """
    # Imported here, so that a process loads only the modules of its transport.
    if name == "zmq":
        from embodied.rpc.batching import BatchServer
        from embodied.rpc.client import Client
        from embodied.rpc.server import Server

        return Transport(name, Server, BatchServer, Client)
    if name == "portal":
        from embodied.rpc import portal_transport as portal

        portal.import_portal()
        return Transport(
            name, portal.PortalServer, portal.PortalBatchServer, portal.PortalClient
        )
    raise ValueError(
        f"Expected a transport among {', '.join(TRANSPORTS)}, got {name!r}. Set "
        "--run.transport to one of them."
    )
