"""Programs run by `skyrl serve-code`, on other machines."""

from __future__ import annotations

import base64
from typing import Protocol

import attrs

from skyrl.envs.http_json import ServiceError, post
from skyrl.sandbox.sandbox import Ran, ResourceLimits

TOKEN_VARIABLE = "SKYRL_CODE_TOKEN"
"""Environment variable with the token of a code service, for its server and its clients."""

ATTEMPTS = 5
WAITING_SECONDS = 120.0
"""Seconds that a program may wait in the service's queue."""


class RunsPrograms(Protocol):
    """A local or remote sandbox."""

    def run(self, program: str, stdin: bytes = b"", limits: ResourceLimits | None = None) -> Ran:
        """Run Python source; returns when it has ended."""


class RemoteSandbox:
    """Sandbox of a remote service, given by an address or a service name (`name:code`). Thread-safe."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """`token` is the token that the service requires, if any."""
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"} if token else {}

    def run(self, program: str, stdin: bytes = b"", limits: ResourceLimits | None = None) -> Ran:
        """Run Python source on the service. Raises `ServiceError` if the service gives no usable answer."""
        limits = limits or ResourceLimits()
        body = {"program": program, "stdin": base64.b64encode(stdin).decode(), "limits": attrs.asdict(limits)}
        seconds = limits.seconds + WAITING_SECONDS
        found = post(self._url, body, seconds=seconds, attempts=ATTEMPTS, headers=self._headers).value
        try:
            out, err = (base64.b64decode(found[name], validate=True) for name in ("stdout", "stderr"))
            if found["ended"] not in ("exit", "timeout", "output"):
                raise ValueError(found["ended"])
            return Ran(ended=found["ended"], code=int(found["code"]), stdout=out, stderr=err)
        except (KeyError, TypeError, ValueError) as error:
            message = f"the code service's answer does not have the expected form: {found!r:.200}"
            raise ServiceError(message) from error
