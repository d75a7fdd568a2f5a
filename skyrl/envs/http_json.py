"""Requests to a service that the configuration names, with JSON bodies and replies."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from attrs import frozen

from skyrl.errors import ProcessError
from skyrl.processes.name_stores import located

T = TypeVar("T")

LONGEST_ANSWER = 4 << 20
"""Largest number of bytes that are read of a reply."""


class ServiceError(RuntimeError):
    """A service gave no usable reply. Does not leave the environment."""


@frozen(kw_only=True)
class ServiceReply(Generic[T]):
    """Reply of a service, with the number of retries that it took."""

    value: T
    retries: int


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the configured address is contacted."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def post(
    url: str, body: Mapping[str, Any], *, seconds: float, attempts: int, headers: Mapping[str, str] | None = None
) -> ServiceReply[Any]:
    """POST a JSON object. Transient errors (no connection, 429, 5xx) are retried after 0.1 s, then after twice as long
    each time, at most 2 s. A name (`name:NAME`) is looked up for each attempt. Raises `ServiceError`, and `UserError`
    for a name without a store.
    """
    for attempt in range(attempts):
        try:
            with _OPENER.open(_request(url, body, headers or {}), timeout=seconds) as response:
                data = response.read(LONGEST_ANSWER + 1)
            if len(data) > LONGEST_ANSWER:
                raise ServiceError(f"{url} answered with more than {LONGEST_ANSWER} bytes")
            return ServiceReply(value=json.loads(data), retries=attempt)
        except urllib.error.HTTPError as error:
            reason = f"{url} answered {error.code}"
            error.close()
            if error.code != 429 and error.code < 500:
                raise ServiceError(reason) from error
        except (OSError, ValueError, ProcessError) as error:
            reason = f"{url}: {error}"
        if attempt + 1 < attempts:
            time.sleep(min(0.1 * 2**attempt, 2.0))
    raise ServiceError(f"{reason}, {attempts} times")


def _request(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> urllib.request.Request:
    """The request, with the current address of a service name. Raises `ProcessError` if no service has that name."""
    address = located(url)
    if address is None:
        raise ProcessError("no service has this name: is it running?")
    return urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}, method="POST"
    )
