"""The service of `skyrl view`: pages for the browser of the user who started it, which change nothing.

A request must name this machine as its host, so that no other site can reach the samples through DNS rebinding, and
carry a key that the command printed, so that no other user of the machine can reach them. No route writes; scripts and
styles are served only from here.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import adler32

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from skyrl.errors import RequestError
from skyrl.processes.service_app import service_app
from skyrl.tracking.run_progress import now_in
from skyrl.viewer.pages import Pages
from skyrl.viewer.run_card import state_of
from skyrl.viewer.run_metrics import RunMetrics
from skyrl.viewer.sample_filter import SampleFilter
from skyrl.viewer.sample_index import SampleIndex

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PAUSE = 0.5
"""Seconds between two checks of files without new lines. Pages ask every second (`static/view.js`), so what the run has
written is shown within two."""


class RunFollower:
    """Keeps the index and the metrics of a run up to date on a separate thread, until it is closed."""

    def __init__(self, index: SampleIndex, metrics: RunMetrics, run: Path) -> None:
        self._index, self._metrics, self._closed = index, metrics, threading.Event()
        self.folder = run
        self._thread = threading.Thread(target=self._run, name="skyrl-index", daemon=True)
        self.complete = False
        """Whether all lines were indexed at the last check of the file."""

        self.samples = 0
        self.state = ""
        """How the run ended, or that it continues."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._closed.set()
        self._thread.join()

    def look(self) -> None:
        """Read what the run has written since the last call, at most some hundred lines of each file."""
        new = self._index.update()
        if new or not self.complete:
            self.samples = self._index.count(SampleFilter())
        steps = self._metrics.look()
        self.state = self.state_now()
        self.complete = new == steps == 0

    def state_now(self) -> str:
        """How the run ended, or that it continues."""
        return state_of(now_in(self.folder), self._metrics.last_step)[0]

    @property
    def version(self) -> str:
        """A text that changes with everything that a page shows of the run."""
        return f'"{self.samples}-{self._metrics.lines}-{int(self.complete)}-{adler32(self.state.encode()):x}"'

    def _run(self) -> None:
        while not self._closed.is_set():
            self.look()
            if self.complete:
                self._closed.wait(PAUSE)


class OneUser:
    """Admits requests with the key. It is sent once in the address and then kept in a cookie, because addresses are
    stored and shown.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._cookie = f"skyrl_view_{sha256(key.encode()).hexdigest()[:8]}"  # cookies are shared by all ports of a host

    def __call__(self, request: Request) -> Response | None:
        """The response that stores the cookie; None for a request that has it. Raises `RequestError` for neither."""
        if self._is_key(request.cookies.get(self._cookie, "")):
            return None
        if not self._is_key(request.query_params.get("key", "")):
            raise RequestError("Open the address that `skyrl view` printed, with its key.", status=403)
        answer = RedirectResponse(str(request.url.remove_query_params("key")), 303)
        answer.set_cookie(self._cookie, self._key, httponly=True, samesite="strict")
        return answer

    def _is_key(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._key.encode())


def view_app(pages: Pages, follower: RunFollower, key: str) -> Starlette:
    """The service, for any ASGI server; a browser must send `key`, as `?key=...`."""

    def page(path: str, make: Callable[[Mapping[str, Any], Mapping[str, str]], str | None]) -> Route:
        """The route of a page, which `make` makes from the parts of its path and its query, in a thread."""

        async def answer(request: Request) -> Response:
            try:
                html = await run_in_threadpool(make, request.path_params, request.query_params)
            except ValueError as error:
                return HTMLResponse(pages.mistake(str(error)), 400)
            except OverflowError:
                html = None
            return HTMLResponse(html or pages.mistake("There is no such sample (any more)."), 200 if html else 404)

        return Route(path, answer, methods=["GET"])

    async def status(request: Request) -> Response:
        """Number of samples and state of the run, without reading a file; 304 for a page that shows them already."""
        version = follower.version
        if request.headers.get("if-none-match") == version:
            return Response(status_code=304, headers={"ETag": version})
        known = {"samples": follower.samples, "complete": follower.complete, "state": follower.state}
        return JSONResponse(known, headers={"ETag": version})

    routes = [
        page("/", lambda _, query: pages.samples(query)),
        page("/sample/{number:int}", lambda path, query: pages.sample(path["number"], query)),
        page("/group/{number:int}", lambda path, _: pages.group(path["number"])),
        page("/run", lambda *_: pages.run()),
        page("/model/{name}", lambda path, _: pages.model(path["name"])),
        page("/prompt", lambda _, query: pages.prompt(query.get("id", ""))),
        Route("/status", status, methods=["GET"]),
        Mount("/static", StaticFiles(directory=Path(__file__).with_name("static"))),
    ]

    def refusal(error: RequestError) -> Response:
        return PlainTextResponse(f"{error}\n", error.status)

    return service_app(routes, token=None, admit=OneUser(key), refusal=refusal, headers=HEADERS)
