"""Sessions of the dream, each a process of its own. The view's server.

The model, JAX and the environment live in that process, which `dreamerv3.view.dream`
describes. It takes JSON requests over a pair of sockets, ends with the session, with
the server or when nobody uses it, and gives way to the run: it has a low priority and
uses no accelerator.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from embodied.workers import Process

START_SECONDS = 240.0  # To load a model and to compile its steps.
STEP_SECONDS = 60.0


class DreamError(RuntimeError):
    """A dream cannot go on; the message is for the user.

    Attributes:
      status: the HTTP status of the answer.
    """

    def __init__(self, text: str, status: int = 400):
        super().__init__(text)
        self.status = status


class Dreams:
    """All sessions, up to a limit. Any thread.

    Args:
      limit: sessions at a time.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._lock = threading.Lock()  # Guards the sessions.
        self._sessions: dict[str, _Session] = {}

    def start(self, logdir: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Begins a session; returns its first frame, with its name as `session`.

        Raises:
          DreamError: there are too many sessions, or the run has nothing to dream of.
        """
        with self._lock:
            self._forget()
            if len(self._sessions) >= self._limit:
                raise DreamError(
                    f"{self._limit} dreams at a time are allowed, and all are in use. "
                    "End one, or start the view with a larger --view.sessions.",
                    429,
                )
            name = secrets.token_urlsafe(12)
            session = self._sessions[name] = _Session(logdir)
        try:
            answer = session.call({"do": "start", **options}, START_SECONDS)
        except BaseException:
            self.end(name)
            raise
        return {**answer, "session": name}

    def call(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request to a session, and returns its answer.

        Raises:
          DreamError: there is no such session, or the request has failed.
        """
        with self._lock:
            session = self._sessions.get(name)
        if session is None:
            raise DreamError("This dream has ended. Start another one.", 404)
        try:
            return session.call(request, STEP_SECONDS)
        except DreamError:
            if not session.running:
                self.end(name)
            raise

    def end(self, name: str) -> None:
        """Ends a session, if there is one of that name."""
        with self._lock:
            session = self._sessions.pop(name, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """Ends all sessions."""
        for name in list(self._sessions):
            self.end(name)

    def _forget(self) -> None:
        """Forgets sessions whose process has ended. The lock is held."""
        for name, session in list(self._sessions.items()):
            if not session.running:
                del self._sessions[name]
                session.close()


class _Session:
    """A process with a model, which answers one request at a time."""

    def __init__(self, logdir: Path):
        self._lock = threading.Lock()  # Guards the connection.
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = Process(
                _serve,
                str(logdir),
                theirs.fileno(),
                name="dream",
                fds=[theirs.fileno()],
            )
            self._process.start()
        self._connection = Connection(ours.detach())

    @property
    def running(self) -> bool:
        """Whether its process is running."""
        return self._process.running

    def call(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        with self._lock:
            try:
                self._connection.send_bytes(json.dumps(request).encode())
                if not self._connection.poll(timeout):
                    self._process.kill()
                    raise DreamError(
                        f"The dream took longer than {timeout:.0f} s.", 504
                    )
                answer = json.loads(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                raise DreamError("The process of the dream has ended.", 410) from error
        if "error" in answer:
            raise DreamError(answer["error"])
        return answer

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError), self._lock:
            self._connection.close()


def _serve(logdir: str, fd: int) -> None:
    """Answers requests in the process of the dream."""
    from dreamerv3.view.dream import answer_requests

    answer_requests(logdir, Connection(fd))
