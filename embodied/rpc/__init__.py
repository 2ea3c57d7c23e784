"""Calls between processes: servers, clients, and who may connect.

Names are imported on first use, so that a process loads only the transport it uses.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "AuthError": "auth",
    "BatchServer": "batching",
    "Client": "client",
    "Disconnected": "calls",
    "Future": "future",
    "Keys": "auth",
    "RemoteError": "calls",
    "Server": "server",
    "Unanswered": "server",
    "WireError": "wire",
    "free_port": "sockets",
    "transport": "transports",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    return getattr(module, name)
