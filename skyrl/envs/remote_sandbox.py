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
"""Time that a program may wait at the service for its turn."""


class RunsPrograms(Protocol):
    """A sandbox, here or elsewhere."""

    def run(self, program: str, stdin: bytes = b"", limits: ResourceLimits | None = None) -> Ran:
        """Run Python source and return when it has ended."""


class RemoteSandbox:
    """The sandbox behind an address, or behind a name (`name:code`). Safe to use from several threads."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """`token` is what the service wants to see, if it wants one."""
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"} if token else {}

    def run(self, program: str, stdin: bytes = b"", limits: ResourceLimits | None = None) -> Ran:
        """Run it there. Raises `ServiceError` where the service gives no answer that can be used."""
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
            message = f"the code service's answer has not the form that is expected: {found!r:.200}"
            raise ServiceError(message) from error
