"""Processes, threads and the calls between them.

Names are imported on first use, so that a process that only needs `Process` does not
load the transport.
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
    "Policy": "policy",
    "Process": "workers",
    "Progress": "progress",
    "RemoteError": "calls",
    "RunFailed": "policy",
    "RunStalled": "policy",
    "Server": "server",
    "Supervisor": "supervisor",
    "Thread": "workers",
    "Unanswered": "server",
    "WireError": "wire",
    "WorkerError": "workers",
    "free_port": "sockets",
    "run": "workers",
    "stop": "workers",
    "transport": "transports",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    return getattr(module, name)
