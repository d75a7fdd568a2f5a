"""POST requests to services that others operate, each with one deadline from the connection to the last byte.

Requests go only to the given address: redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import cast
from urllib.parse import urlsplit

from skyrl.processes.answers import BadAnswer


class _Deadline:
    """Ends a request after a number of seconds, whatever its server sends: the timeout of a socket only bounds the wait
    for the next byte.
    """

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self.connected: socket.socket | None = None
        """The connection, if it was made in time."""
        self.is_over = False

    def __enter__(self) -> _Deadline:
        _OF_THREAD.deadline = self
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        _OF_THREAD.deadline = None

    def watch(self, connected: socket.socket) -> None:
        """Close this connection at the deadline."""
        self.connected = connected
        if self.is_over:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        if self.connected is not None:
            with suppress(OSError):  # it was closed meanwhile
                socket.socket.shutdown(self.connected, socket.SHUT_RDWR)  # TLS's own would wait for the other side


_OF_THREAD = threading.local()
"""The deadline of the request that the thread is making."""


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _watched(self.sock)


class _TLSConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _watched(self.sock)


def _watched(connected: socket.socket) -> None:
    deadline = cast(_Deadline | None, getattr(_OF_THREAD, "deadline", None))
    if deadline is not None:
        deadline.watch(connected)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


_tls = cache(ssl.create_default_context)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TLSConnection, request, context=_tls())


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the configured address is contacted."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects, _Http, _Https)


def posted(url: str, body: Mapping[str, object], headers: Mapping[str, str], *, seconds: float, longest: int) -> object:
    """The decoded JSON that a service answers to a JSON object, at most `longest` bytes, within `seconds`.

    Raises `HTTPError` for a status of 300 or more, `URLError` if no connection is made, `OSError` if no whole answer
    comes in time, and `BadAnswer` for one that is not JSON or too long.
    """
    content = b""
    try:
        urlsplit(url).port  # noqa: B018  # raises for one above 65535, which would pass for a service that is away
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}, method="POST"
        )
        with _Deadline(seconds) as deadline:
            try:
                with _OPENER.open(request, timeout=seconds) as response:
                    content = response.read(longest + 1)
                    if getattr(response, "length", 0) and len(content) <= longest:  # `read` does not tell
                        raise OSError(f"its answer breaks off after {len(content)} bytes")
            except urllib.error.HTTPError:
                raise
            except OSError:
                if not deadline.is_over:
                    raise
                if deadline.connected is None:
                    raise urllib.error.URLError(f"no connection within {seconds:g} s") from None
            except http.client.HTTPException as error:
                if not deadline.is_over:
                    raise OSError(f"its answer breaks off or is not HTTP ({type(error).__name__})") from error
            if deadline.is_over:
                raise TimeoutError(f"it did not answer within {seconds:g} s")
    except (ValueError, OverflowError) as error:  # of the address, or of a header
        raise OSError(f"no request can be made: {error}") from error
    if len(content) > longest:
        raise BadAnswer(f"with more than {longest} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"with something that is not JSON ({type(error).__name__})") from error
