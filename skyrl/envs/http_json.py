"""Requests to a service that the configuration names, with JSON bodies and replies."""

from __future__ import annotations

import logging
import time
import urllib.error
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Generic, TypeVar

from attrs import frozen

from skyrl.errors import ProcessError, ServiceGone
from skyrl.processes.answers import BadAnswer, asked_to_wait, posted
from skyrl.processes.naming.stores import located

T = TypeVar("T")

LONGEST_ANSWER = 4 << 20
"""Largest number of bytes that are read of a reply."""

ATTEMPTS = 5
"""Largest number of requests that may fail while the service is there."""

PATIENCE = 240.0
"""Seconds for which a service that is away is waited for, unless `environment.skyrl_gym` says otherwise."""

_PATIENCE = "environment.skyrl_gym.service_patience_seconds"

TOLD_AFTER = 10.0
"""Seconds after which it is logged that a service is waited for, once until it answers."""

_AWAY = frozenset({429, 502, 503, 504})
"""Status codes of a service that may take the same request later."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0

_log = logging.getLogger(__name__)


class ServiceError(RuntimeError):
    """A service gave no usable reply. Does not leave the environment."""


@frozen(kw_only=True)
class ServiceReply(Generic[T]):
    """Reply of a service, with the number of retries that it took."""

    value: T
    retries: int


def post(
    url: str,
    body: Mapping[str, object],
    reads: Callable[[object], T],
    *,
    setting: str,
    seconds: float,
    patience: float = PATIENCE,
    token: str | None = None,
) -> ServiceReply[T]:
    """POST a JSON object, and read the reply with `reads`, which raises `BadAnswer`. Each request carries the
    `token`, if there is one, and may take `seconds`. `setting` is the path of the setting that has the address.

    A service that cannot be reached, or answers 429, 502, 503 or 504, is waited for: `patience` seconds in all, with
    pauses from 0.1 s to 2 s, or of the length that it asks for. A name (`name:NAME`) is looked up for each request.

    Raises `ServiceGone` when the patience is over, `ServiceError` after a refusal or `ATTEMPTS` other failures, and
    `UserError` for a name without a store.
    """
    away = _Away(url, setting, patience)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    failed, retries = 0, 0
    try:
        while True:
            wait, is_away = 0.0, False
            try:
                address = located(url)
                if address is None:
                    raise ProcessError("no service has this name: is it running?")
                answer = posted(address, body, headers, seconds=seconds, longest=LONGEST_ANSWER)
                _TOLD.discard(url)
                return ServiceReply(value=reads(answer), retries=retries)
            except BadAnswer as error:
                reason = f"{url} answered {error}"
            except urllib.error.HTTPError as error:
                reason, is_away = f"{url} answered {error.code}", error.code in _AWAY
                wait = asked_to_wait(error.headers.get("Retry-After", ""))
                error.close()
                if error.code < 500 and not is_away:
                    raise ServiceError(reason) from error
            except (OSError, ProcessError) as error:
                reason, is_away = f"{url}: {error}", _is_away(error)
            if is_away:
                away.noticed(reason)
            else:
                failed += 1
                if failed == ATTEMPTS:
                    raise ServiceError(f"{reason}, {ATTEMPTS} times")
            retries += 1
            away.sleep(max(wait, min(_FIRST_PAUSE * 2 ** min(retries - 1, 8), _LONGEST_PAUSE)))
    finally:
        away.over()


class Outages:
    """Time for which a call has waited for services that were away, in which its own deadline does not run."""

    def __init__(self) -> None:
        self._over = 0.0
        self._since: float | None = None

    def seconds(self, now: float) -> float:
        """Length of all outages so far; `now` is by the clock of `time.monotonic`."""
        since = self._since
        return self._over + (0.0 if since is None else now - since)

    def began(self, now: float) -> None:
        """A service is away from now on."""
        self._since = now

    def ended(self, now: float) -> None:
        """No service is away any more."""
        self._over, self._since = self.seconds(now), None


OUTAGES: ContextVar[Outages | None] = ContextVar("OUTAGES", default=None)
"""The outages of the call that this thread runs, for a caller with a deadline."""


_TOLD: set[str] = set()
"""Addresses of services of which it is logged that they are away, and which have not answered since."""


class _Away:
    """The time for which a service has been away during one request."""

    def __init__(self, url: str, setting: str, patience: float) -> None:
        self._url, self._setting, self._patience = url, setting, patience
        self._since: float | None = None
        self._outages = OUTAGES.get() or Outages()

    def noticed(self, reason: str) -> None:
        """Note that the service is away. Raises `ServiceGone` when the patience is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._outages.began(now)
        waited = now - self._since
        if waited >= self._patience:
            raise ServiceGone(
                f"the service {self._url} ({self._setting}) has been away for {self._patience:g} s ({_PATIENCE}): "
                f"{reason}"
            )
        if waited >= TOLD_AFTER and self._url not in _TOLD:
            _TOLD.add(self._url)
            left = self._patience - waited
            _log.warning(
                "the service %s (%s) is away: it is tried for another %.0f s (%s): %s",
                *(self._url, self._setting, left, _PATIENCE, reason),
            )

    def over(self) -> None:
        """Note that the request has ended, however that was."""
        if self._since is not None:
            self._outages.ended(time.monotonic())

    def sleep(self, seconds: float) -> None:
        """Wait before the next request, at most until the patience is over."""
        left = seconds if self._since is None else self._since + self._patience - time.monotonic()
        time.sleep(max(min(seconds, left), 0.0))


def _is_away(error: OSError | ProcessError) -> bool:
    """Whether no connection was made, or no service has the name."""
    if isinstance(error, urllib.error.URLError):
        return not isinstance(error.reason, ConnectionResetError | BrokenPipeError)  # it was connected
    return isinstance(error, ProcessError)
