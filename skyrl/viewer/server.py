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

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from skyrl.errors import RequestError
from skyrl.processes.service_app import service_app
from skyrl.viewer.pages import Pages
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
PAUSE = 1.0
"""Seconds between two checks of a file without new lines."""


class IndexUpdater:
    """Keeps an index up to date on a separate thread, until it is closed."""

    def __init__(self, index: SampleIndex) -> None:
        self._index, self._closed = index, threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyrl-index", daemon=True)
        self.complete = False
        """Whether all lines were indexed at the last check of the file."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self.complete = self._index.update() == 0
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


def _refusal(error: RequestError) -> Response:
    return PlainTextResponse(f"{error}\n", error.status)


def view_app(pages: Pages, index: SampleIndex, updater: IndexUpdater, key: str) -> Starlette:
    """The service, for any ASGI server; a browser must send `key`, as `?key=...`."""

    async def samples(request: Request) -> Response:
        return await _page(pages, lambda query: pages.samples(query), request)

    async def sample(request: Request) -> Response:
        number = request.path_params["number"]
        return await _page(pages, lambda query: pages.sample(number, query), request)

    async def group(request: Request) -> Response:
        number = request.path_params["number"]
        return await _page(pages, lambda query: pages.group(number), request)

    async def prompt(request: Request) -> Response:
        return await _page(pages, lambda query: pages.prompt(query.get("id", "")), request)

    async def status(request: Request) -> Response:
        count = await run_in_threadpool(index.count, SampleFilter())
        return JSONResponse({"samples": count, "complete": updater.complete})

    routes = [
        Route("/", samples, methods=["GET"]),
        Route("/sample/{number:int}", sample, methods=["GET"]),
        Route("/group/{number:int}", group, methods=["GET"]),
        Route("/prompt", prompt, methods=["GET"]),
        Route("/status", status, methods=["GET"]),
        Mount("/static", StaticFiles(directory=Path(__file__).with_name("static"))),
    ]
    return service_app(routes, token=None, admit=OneUser(key), refusal=_refusal, headers=HEADERS)


async def _page(pages: Pages, make: Callable[[Mapping[str, str]], str | None], request: Request) -> Response:
    try:
        html: Any = await run_in_threadpool(make, request.query_params)
    except ValueError as error:
        return HTMLResponse(pages.mistake(str(error)), 400)
    except OverflowError:
        html = None
    return HTMLResponse(html or pages.mistake("There is no such sample (any more)."), 200 if html else 404)
