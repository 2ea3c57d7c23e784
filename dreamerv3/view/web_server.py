"""Serves the view: pages, curves, events and the dream, over HTTP. The view's process.

    /TOKEN/                 the page, whose scripts ask for the rest
    /TOKEN/static/NAME      its files
    /TOKEN/api/...          JSON; `api/stream` sends changes as server-sent events

Requests without the token are answered with 404. Logdirs are only read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dreamerv3.suite.curves import running_mean
from dreamerv3.view.dream_process import DreamError, Dreams
from dreamerv3.view.runs import SCORE, RunFolder, Runs
from dreamerv3.view.series import thin
from embodied.run.live import plain

STATIC = Path(__file__).with_name("static")
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
FILES = {path.name: path for path in sorted(STATIC.iterdir()) if path.suffix in KINDS}
POLL_SECONDS = 0.5
LIST_SECONDS = 2.0  # Between looks at all runs.
ALIVE_SECONDS = 15.0  # Between signs of life of a stream without news.
MOST_POINTS = 4000
MOST_RUNS = 32  # In one chart.
MOST_BODY = 1 << 16
LOOPBACK = ("127.0.0.1", "localhost", "::1")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Passes on requests that have the token, and adds headers that protect the page.

    Args:
      app: gets the requests, without the token in their path.
      token: the first part of every path.
      hosts: host names that requests may have; empty for any. A page of another name
        that resolves to this machine is refused.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str] = ()):
        self._app = app
        self._token = token.encode()
        self._hosts = tuple(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                pairs = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *pairs]}
            await send(message)

        _, _, rest = scope["path"].partition("/")
        token, slash, path = rest.partition("/")
        if not (
            self._host_allowed(scope)
            and secrets.compare_digest(token.encode(), self._token)
        ):
            text = "Not found. The address needs the token that the view has printed."
            await PlainTextResponse(text, 404)(scope, receive, guarded)
            return
        if not slash:
            headers = {"Location": f"/{token}/"}
            await Response(status_code=307, headers=headers)(scope, receive, guarded)
            return
        inner = {**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}
        await self._app(inner, receive, guarded)

    def _host_allowed(self, scope: Scope) -> bool:
        if not self._hosts:
            return True
        given = dict(scope["headers"]).get(b"host", b"").decode(errors="replace")
        host = given.rsplit(":", 1)[0] if not given.endswith("]") else given
        return host.strip("[]") in self._hosts


class Pages:
    """The handlers of all requests.

    Args:
      runs: to show.
      dreams: sessions of the dream.
    """

    def __init__(self, runs: Runs, dreams: Dreams):
        self._runs = runs
        self._dreams = dreams

    def routes(self) -> list[Route]:
        """Returns the routes, without the token in their paths."""
        post = ["POST"]
        return [
            Route("/", self.index),
            Route("/static/{name}", self.static),
            Route("/api/runs", self.list_runs),
            Route("/api/run/{run}", self.show_run),
            Route("/api/events/{run}", self.list_events),
            Route("/api/series", self.series),
            Route("/api/videos/{run}", self.list_videos),
            Route("/api/video/{run}/{number:int}", self.show_video),
            Route("/api/stream", self.stream),
            Route("/api/dream", self.start_dream, methods=post),
            Route("/api/dream/{session}", self.step_dream, methods=post),
            Route("/api/dream/{session}/end", self.end_dream, methods=post),
        ]

    def index(self, request: Request) -> Response:
        """Returns the page."""
        return _file("index.html")

    def static(self, request: Request) -> Response:
        """Returns a file of the page."""
        return _file(request.path_params["name"])

    def list_runs(self, request: Request) -> Response:
        """Returns all runs."""
        return _json(self._summaries())

    def show_run(self, request: Request) -> Response:
        """Returns everything about a run except for its curves."""
        run = self._run(request.path_params["run"])
        run.metrics.update()
        run.scores.update()
        names = sorted({*run.metrics.names(), *run.scores.names()})
        summary = run.summary()
        return _json(
            {
                "summary": summary,
                "config": run.configuration(),
                "metrics": names,
                "published": run.published(),
                "live": run.live(),
                "timed": bool(len(run.times()[0])),
            }
        )

    def list_events(self, request: Request) -> Response:
        """Returns the newest events of a run."""
        return _json(self._run(request.path_params["run"]).events())

    def series(self, request: Request) -> Response:
        """Returns a metric of some runs, thinned.

        The query has `run`, several times, `name`, `points`, `smooth` (values in a
        mean), `axis` (step or time), and `from` and `to` on that axis.
        """
        query = request.query_params
        name = query.get("name", SCORE)
        points = _clamp(query.get("points"), 800, 2, MOST_POINTS)
        window = _clamp(query.get("smooth"), 1, 1, 100_000)
        low, high = _float(query.get("from"), -np.inf), _float(query.get("to"), np.inf)
        found = []
        for identity in query.getlist("run")[:MOST_RUNS]:
            run = self._run(identity)
            x, y = self._column(run, name)
            total = len(x)
            if query.get("axis") == "time":
                x = _in_time(run, x)
            y = running_mean(y, window)
            inside = (x >= low) & (x <= high)
            x, y = thin(x[inside], y[inside], points)
            found.append(
                {"run": identity, "total": total, "x": x.tolist(), "y": y.tolist()}
            )
        return _json(found)

    def list_videos(self, request: Request) -> Response:
        """Returns the videos of a run, without their content."""
        run = self._run(request.path_params["run"])
        videos = run.videos.update()
        return _json(
            [
                {"number": x.number, "tag": x.tag, "step": x.step, "time": x.time}
                for x in videos
            ]
        )

    def show_video(self, request: Request) -> Response:
        """Returns a video, or with `still` in the query its first picture."""
        run = self._run(request.path_params["run"])
        videos, number = run.videos, request.path_params["number"]
        videos.update()
        still = "still" in request.query_params
        found = videos.still(number) if still else videos.content(number)
        if found is None:
            raise HTTPException(404, "There is no such video.")
        return Response(found[1], media_type=found[0])

    async def stream(self, request: Request) -> Response:
        """Sends a run whenever it changes, or the list's changes if none is named."""
        identity = request.query_params.get("run")
        run = None
        if identity:
            run = await run_in_threadpool(self._run, identity)
        changes = self._changes(run) if run else self._list_changes()
        return StreamingResponse(changes, media_type="text/event-stream")

    async def start_dream(self, request: Request) -> Response:
        """Begins a dream."""
        body = await _body(request)
        run = await run_in_threadpool(self._run, str(body.pop("run", "")))
        return _json(await run_in_threadpool(self._dreams.start, run.path, body))

    async def step_dream(self, request: Request) -> Response:
        """Makes a step in a dream, or restarts it."""
        body, session = await _body(request), request.path_params["session"]
        return _json(await run_in_threadpool(self._dreams.call, session, body))

    def end_dream(self, request: Request) -> Response:
        """Ends a dream."""
        self._dreams.end(request.path_params["session"])
        return _json({})

    def _run(self, identity: str) -> RunFolder:
        run = self._runs.get(identity)
        if run is None:
            raise HTTPException(404, "There is no such run.")
        return run

    def _column(self, run: RunFolder, name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == SCORE:
            run.scores.update()
            x, y = run.scores.column(name)
            if len(x) or run.live().get("scores"):
                return _with_live_scores(run, x, y)
        run.metrics.update()
        return run.metrics.column(name)

    async def _changes(self, run: RunFolder) -> AsyncIterator[str]:
        stamp, quiet = None, 0.0
        while True:
            now = await run_in_threadpool(run.stamp)
            if now != stamp or quiet >= ALIVE_SECONDS:
                stamp, quiet = now, 0.0
                yield await run_in_threadpool(_message, run)
            await asyncio.sleep(POLL_SECONDS)
            quiet += POLL_SECONDS

    async def _list_changes(self) -> AsyncIterator[str]:
        sent: dict[str, Any] = {}
        while True:
            runs = await run_in_threadpool(self._summaries)
            news = [run for run in runs if sent.get(run["id"]) != run]
            here = {run["id"] for run in runs}
            gone = [identity for identity in sent if identity not in here]
            sent = {run["id"]: run for run in runs}
            if news or gone:
                yield _event("runs", {"runs": news, "gone": gone})
            else:
                yield ": alive\n\n"
            await asyncio.sleep(LIST_SECONDS)

    def _summaries(self) -> list[dict[str, Any]]:
        return [run.summary() for run in self._runs.all()]


def make_app(
    folders: Sequence[str | Path],
    token: str,
    sessions: int = 2,
    hosts: Sequence[str] = LOOPBACK,
) -> ASGIApp:
    """Makes the application.

    Args:
      folders: runs, or folders of runs.
      token: the first part of every path.
      sessions: dreams at a time.
      hosts: see `Guard`.
    """
    dreams = Dreams(sessions)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await run_in_threadpool(dreams.close)

    pages = Pages(Runs(folders), dreams)
    app = Starlette(
        routes=pages.routes(),
        lifespan=lifespan,
        exception_handlers={HTTPException: _refuse, DreamError: _refuse_dream},
    )
    return Guard(app, token, hosts)


def serve(
    folders: Sequence[str | Path],
    host: str = "127.0.0.1",
    port: int = 0,
    sessions: int = 2,
    token: str = "",
) -> None:
    """Serves until Ctrl-C or SIGTERM, and prints the address.

    Args:
      folders: runs, or folders of runs.
      host: interface to listen at.
      port: 0 for a free one.
      sessions: dreams at a time.
      token: the first part of every path; by default a new one.

    Raises:
      OSError: it cannot listen there.
    """
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()  # So that whoever reads the address can connect.
    token = token or secrets.token_urlsafe(18)
    shown = f"[{host}]" if ":" in host else host
    hosts = LOOPBACK if host in LOOPBACK else ()
    address = f"http://{shown}:{listener.getsockname()[1]}/{token}/"
    print(f"The view is at {address}", flush=True)
    config = uvicorn.Config(
        make_app(folders, token, sessions, hosts),
        log_level="warning",
        access_log=False,  # Addresses contain the token.
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    with listener:
        uvicorn.Server(config).run(sockets=[listener])


def _file(name: str) -> Response:
    path = FILES.get(name)
    if path is None:
        raise HTTPException(404, "There is no such file.")
    return Response(path.read_bytes(), media_type=KINDS[path.suffix])


def _refuse(request: Request, error: Any) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)


def _refuse_dream(request: Request, error: Any) -> Response:
    return JSONResponse({"error": str(error)}, error.status)


def _json(content: Any) -> Response:
    # As ASCII, and with null for NaN and infinities, which JSON lacks.
    try:
        text = json.dumps(content, allow_nan=False)
    except ValueError:
        text = json.dumps(plain(content), allow_nan=False)
    return Response(text, media_type="application/json")


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {bytes(_json(content).body).decode()}\n\n"


def _message(run: RunFolder) -> str:
    latest = run.latest()
    content = {"summary": run.summary(), "live": run.live(), "latest": latest}
    return _event("run", {**content, "events": run.events()[-50:]})


async def _body(request: Request) -> dict[str, Any]:
    # The view's own page sends this type, which a form of another site cannot.
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "Expected application/json.")
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MOST_BODY:
            raise HTTPException(413, f"Expected at most {MOST_BODY} bytes.")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise HTTPException(400, "Expected JSON.") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "Expected a JSON object.")
    return body


def _with_live_scores(
    run: RunFolder, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Adds episodes that have ended since scores were written last."""
    last = x[-1] if len(x) else -np.inf
    newer = [point for point in run.live().get("scores", ()) if point[0] > last]
    if not newer:
        return x, y
    steps, values = np.array(newer, np.float64).T
    return np.concatenate([x, steps]), np.concatenate([y, values])


def _in_time(run: RunFolder, x: np.ndarray) -> np.ndarray:
    """Turns steps into seconds since 1970; NaN if the run has no times."""
    steps, times = run.times()
    if not len(steps):
        return np.full(len(x), np.nan)
    return np.interp(x, steps, times)


def _clamp(value: Any, default: int, low: int, high: int) -> int:
    try:
        return min(high, max(low, int(float(value))))
    except (TypeError, ValueError, OverflowError):
        return default


def _float(value: Any, default: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return default
    return number if np.isfinite(number) else default
