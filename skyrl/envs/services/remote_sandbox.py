"""Programs run by `skyrl serve-code`, on other machines."""

from __future__ import annotations

import base64
from typing import Protocol

import attrs
from attrs import frozen

from skyrl.envs.http_json import PATIENCE, post
from skyrl.processes.answers import BadAnswer, display_value, read
from skyrl.sandbox.sandbox import Ran, ResourceLimits

TOKEN_VARIABLE = "SKYRL_CODE_TOKEN"
"""Environment variable with the token of a code service, for its server and its clients."""

WAITING_SECONDS = 120.0
"""Seconds that a program may wait in the service's queue."""


@frozen
class _Ran:
    ended: str
    code: int
    stdout: str
    stderr: str


class RunsPrograms(Protocol):
    """A local or remote sandbox."""

    def run(self, program: str, stdin: bytes = b"", limits: ResourceLimits | None = None) -> Ran:
        """Run Python source; returns when it has ended."""


class RemoteSandbox:
    """Sandbox of a remote service, given by an address or a service name (`name:code`). Thread-safe."""

    def __init__(self, url: str, token: str | None = None, patience: float = PATIENCE) -> None:
        """`token` is the token that the service requires, if any; `patience` is in seconds."""
        self._url, self._token, self._patience = url, token, patience

    def run(self, program: str, stdin: bytes = b"", limits: ResourceLimits | None = None) -> Ran:
        """Run Python source on the service. Raises `ServiceError` if the service gives no usable answer, `ServiceGone`
        if it is away for too long.
        """
        limits = limits or ResourceLimits()
        body = {"program": program, "stdin": base64.b64encode(stdin).decode(), "limits": attrs.asdict(limits)}
        seconds = limits.seconds + WAITING_SECONDS
        return post(
            self._url,
            body,
            _ran,
            setting="environment.skyrl_gym.code_url",
            seconds=seconds,
            patience=self._patience,
            token=self._token,
        ).value


def _ran(answer: object) -> Ran:
    ran = read(answer, _Ran)
    match ran.ended:
        case "exit" | "timeout" | "output" as ended:
            return Ran(ended=ended, code=ran.code, stdout=_decoded(ran.stdout), stderr=_decoded(ran.stderr))
    raise BadAnswer(f"with {display_value(ran.ended)} for how the program ended")


def _decoded(coded: str) -> bytes:
    try:
        return base64.b64decode(coded, validate=True)
    except ValueError as error:
        raise BadAnswer(f"with {display_value(coded)} for an output in base64") from error
