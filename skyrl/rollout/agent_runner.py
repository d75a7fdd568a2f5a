"""Agents: programs and functions of the user's own, which know the policy by an address and a key.

    function    await solve(task={"messages": [...], ...}, base_url="http://.../v1", api_key="...", model="...")
    command     the task as JSON on standard input; OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
                ANTHROPIC_API_KEY and MODEL in its environment, with PATH, HOME and LANG and nothing else

A command runs in a session of its own, which is ended with it, or at its deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from skyrl.config.environment import AgentConfig
from skyrl.envs.coroutines import settled
from skyrl.errors import RewardError, TaskError
from skyrl.rollout.env_calls import EnvCalls
from skyrl.tree.imports import import_object

if TYPE_CHECKING:
    from skyrl.endpoint.trajectories import Trajectories

LONGEST_OUTPUT = 1 << 20
"""Bytes of a command's standard output that are read; more is a failure."""

_SHOWN = 400
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")


class RunningEndpoint(Protocol):
    """The endpoint that agents call."""

    url: str
    trajectories: Trajectories


@frozen(kw_only=True)
class Call:
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


Agent = Callable[[Call], Awaitable[Returned] | Returned]


class AgentRunner:
    """Runs agents, so many at a time, each with a deadline."""

    def __init__(self, config: AgentConfig, endpoint: Callable[[], RunningEndpoint | None], model: str) -> None:
        """`endpoint` is asked for when an agent starts. Raises `TaskError` for an agent that is not there."""
        self.config, self._endpoint, self.model = config, endpoint, model
        self._agent = agent_of(config)
        field = "environment.agent.timeout_seconds"
        self._calls = EnvCalls(config.max_concurrent, config.timeout_seconds, field=field)

    @property
    def endpoint(self) -> RunningEndpoint:
        """The endpoint of the run."""
        endpoint = self._endpoint()
        assert endpoint is not None, "the endpoint is opened before anything is sampled"
        return endpoint

    async def __call__(self, who: str, call: Call) -> tuple[Returned, float]:
        """The result of the agent, and the seconds that it ran. Raises `EpisodeError`; `who` begins the sentence."""
        return await self._calls(who, lambda: settled(self._agent(call)))


def agent_of(config: AgentConfig) -> Agent:
    """The agent that the configuration names. Raises `TaskError` for one that is not there."""
    if config.function is not None:
        return _of_function(import_object(config.function, TaskError), config.function)
    program = config.command[0]
    if shutil.which(program) is None:
        raise TaskError(f"there is no program {program}, or it cannot be run")
    return lambda call: _run(config.command, call)


def _of_function(function: object, name: str) -> Agent:
    if not callable(function):
        raise TaskError(f"{name} is not a function")
    wanted = inspect.signature(function).parameters
    known = ("task", "base_url", "api_key", "model")
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in wanted.values())
    unknown = [
        each.name
        for each in wanted.values()
        if each.name not in known
        and each.default is inspect.Parameter.empty
        and each.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    if unknown:
        raise TaskError(f"{name} wants {', '.join(unknown)}, and an agent is given {', '.join(known)}")

    def agent(call: Call) -> Returned:
        given = {"task": call.task, "base_url": f"{call.url}/v1", "api_key": call.key, "model": call.model}
        chosen = given if takes_all else {key: value for key, value in given.items() if key in wanted}
        return Returned(value=settled(function(**chosen)))

    return agent


async def _run(command: tuple[str, ...], call: Call) -> Returned:
    """Raises `RewardError` for a program that prints more than `LONGEST_OUTPUT`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(call),
        start_new_session=True,
    )
    try:
        out, _ = await asyncio.gather(_read(process), _write(process, json.dumps(call.task, default=str)))
        output, errors = out
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it started and left, too
    if code and errors:
        return Returned(value=errors[-_SHOWN:], exit_code=code)
    return Returned(value=output, exit_code=code)


async def _read(process: asyncio.subprocess.Process) -> tuple[str, str]:
    assert process.stdout is not None and process.stderr is not None
    found = await asyncio.gather(_all_of(process.stdout), _all_of(process.stderr))
    output, errors = (each.decode(errors="replace") for each in found)
    return output, errors


async def _all_of(stream: asyncio.StreamReader) -> bytes:
    found = b""
    while piece := await stream.read(1 << 16):
        found += piece
        if len(found) > LONGEST_OUTPUT:
            raise RewardError(f"printed more than {LONGEST_OUTPUT} bytes")
    return found


async def _write(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it does not read its task
        process.stdin.write(text.encode(errors="replace"))
        await process.stdin.drain()
    process.stdin.close()


def _environment(call: Call) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return kept | {
        "OPENAI_BASE_URL": f"{call.url}/v1",
        "OPENAI_API_KEY": call.key,
        "ANTHROPIC_BASE_URL": call.url,
        "ANTHROPIC_API_KEY": call.key,
        "MODEL": call.model,
    }
