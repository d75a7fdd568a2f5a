"""Inputs and results of agents."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

LONGEST_OUTPUT = 1 << 20
"""Maximum number of bytes that a command may print to standard output; more is a failure."""

_SHOWN = 400


@frozen(kw_only=True)
class AgentCall:
    """Inputs of one agent."""

    task: Mapping[str, Any]
    """The row's columns, with `messages`, the conversation that the environment begins with."""

    url: str
    """Address of the endpoint, without `/v1`."""

    key: str
    model: str


@frozen(kw_only=True)
class Returned:
    """Result of an agent."""

    value: object
    """Return value of a function, or standard output of a program."""

    exit_code: int | None = None


Agent = Callable[[AgentCall], Awaitable[Returned] | Returned]


def environment_of(call: AgentCall, kept: Sequence[str]) -> dict[str, str]:
    """Environment variables of a command: those in `kept` of this process, and address, key and name of the policy."""
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "OPENAI_BASE_URL": f"{call.url}/v1",
        "OPENAI_API_KEY": call.key,
        "ANTHROPIC_BASE_URL": call.url,
        "ANTHROPIC_API_KEY": call.key,
        "MODEL": call.model,
    }


def returned_by(code: int, output: bytes, errors: bytes) -> Returned:
    """The result of a command: its standard output, or the end of its standard error if it failed and wrote some."""
    text, error = output.decode(errors="replace"), errors.decode(errors="replace")
    return Returned(value=error[-_SHOWN:] if code and error else text, exit_code=code)
