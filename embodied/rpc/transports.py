"""The transports to choose from (`run.transport`), under one interface. Any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAMES = ("zmq", "portal")


@dataclass(frozen=True)
class Transport:
    """The classes of one transport, which take the same arguments."""

    name: str
    Server: Any
    BatchServer: Any
    Client: Any


def transport(name: str) -> Transport:
    """Returns a transport by its name, 'zmq' or 'portal'.

    Raises:
      ValueError: there is none of that name.
      ImportError: its package is not installed.
    """
    # Imported here, so that a process loads only the transport that it uses.
    if name == "zmq":
        from embodied.rpc.batching import BatchServer
        from embodied.rpc.client import Client
        from embodied.rpc.server import Server

        return Transport(name, Server, BatchServer, Client)
    if name == "portal":
        from embodied.rpc import portal_backend

        portal_backend.import_portal()
        return Transport(
            name,
            portal_backend.PortalServer,
            portal_backend.PortalBatchServer,
            portal_backend.PortalClient,
        )
    raise ValueError(
        f"Expected a transport among {', '.join(NAMES)}, got {name!r}. Set "
        "--run.transport to one of them."
    )
