"""The view beside a run, for `--run.view True`. The process that starts the run.

with background_view(config):
    ...                     # Trains; the view is a process of its own meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import elements

from dreamerv3.cli.config import ConfigError

PACKAGES = ("starlette", "uvicorn")
PRIORITY = 5  # Added to the nice value, so that the run comes first.
RESTARTS = 5
GRACE = 2.0

log = logging.getLogger("embodied.view")


def check_view() -> None:
    """Raises ConfigError if packages that the view needs are not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The view expected the package {' and '.join(missing)}, which is not "
            "installed. Run: pip install 'dreamerv3-parallel[view]'"
        )


@contextlib.contextmanager
def background_view(config: elements.Config) -> Iterator[None]:
    """Shows the run of a configuration while the body runs, if `run.view` asks for it.

    The view is restarted at the same address if it fails. If it keeps failing, that is
    logged as a warning, and the run goes on without it.

    Raises:
      ConfigError: packages that the view needs are not installed.
    """
    if not config.run.view or config.replica:
        yield
        return
    check_view()
    from embodied.rpc import free_port
    from embodied.workers import Process, RestartPolicy, Supervisor

    settings = config.view
    port = settings.port or free_port(settings.host)
    address = (settings.host, port, settings.sessions, secrets.token_urlsafe(18))
    supervisor = Supervisor(grace=GRACE)
    supervisor.add(
        "view",
        "view",
        lambda: Process(_serve, config.logdir, *address, name="view"),
        RestartPolicy(RESTARTS),
    )
    done = threading.Event()
    thread = threading.Thread(
        target=_supervise, args=(supervisor, done), name="view", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(2 * GRACE)


def _supervise(supervisor: Any, done: threading.Event) -> None:
    try:
        supervisor.run(until=done)
    except Exception as error:  # The run does not depend on the view.
        log.warning("The view has stopped: %s", error)


def _serve(logdir: str, *address: Any) -> None:
    os.nice(PRIORITY)  # Before its imports, which take a while.
    from dreamerv3.view.web_server import serve

    host, port, sessions, token = address
    serve([logdir], host, port, sessions, token)
