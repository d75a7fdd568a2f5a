"""Agents: programs and functions of the user, which reach the policy through an address and a key.

    function    await solve(task={"messages": [...], ...}, base_url="http://.../v1", api_key="...", model="...")
    command     the task as JSON on standard input; OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
                ANTHROPIC_API_KEY and MODEL in its environment, with PATH, HOME and LANG and nothing else

A command runs in a new session, whose processes are killed when it ends or reaches its deadline. An untrusted one runs
in a sandbox whose only network is the policy's endpoint: each trajectory gets a new process tree and a new empty
folder, which end with it, and it can read the files that its command and `readable` name.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from attrs import evolve, frozen

from skyrl.config.settings.environment import AgentConfig
from skyrl.envs.coroutines import awaited
from skyrl.errors import RewardError, TaskError, WorkerEnded
from skyrl.rollout.env_calls import EnvCalls, Pace
from skyrl.sandbox.commands import located_command
from skyrl.sandbox.fork_client import Command
from skyrl.sandbox.fork_server import SERVICE_PORT
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from skyrl.sandbox.tiers import Tier, has_namespaces
from skyrl.tree import thaw
from skyrl.tree.imports import import_object

if TYPE_CHECKING:
    from skyrl.endpoint.trajectories import Trajectories

LONGEST_OUTPUT = 1 << 20
"""Maximum number of bytes that a command may print to standard output; more is a failure."""

_SHOWN = 400
_FOREVER = 10.0**6
_INSIDE = f"http://127.0.0.1:{SERVICE_PORT}"
"""Address of the endpoint inside a sandbox."""


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


class RunningEndpoint(Protocol):
    """The endpoint that agents call."""

    url: str
    trajectories: Trajectories


class AgentRunner:
    """Runs a limited number of agents at a time, each with a deadline."""

    def __init__(
        self,
        config: AgentConfig,
        endpoint: Callable[[], RunningEndpoint | None],
        model: str,
        tier: Tier | Literal["auto"] = "auto",
    ) -> None:
        """`endpoint` is called when an agent starts; `tier` is the sandbox tier of an isolated agent. Raises
        `TaskError` if the agent does not exist, and `UserError` if it cannot be isolated.
        """
        self.config, self._endpoint, self.model = config, endpoint, model
        self._agent = agent_of(config, tier)
        self._calls = EnvCalls(
            config.max_concurrent,
            config.timeout_seconds,
            field="environment.agent.timeout_seconds",
            limit="environment.agent.max_concurrent",
            pace=Pace(config.max_starts_per_second),
        )

    @property
    def endpoint(self) -> RunningEndpoint:
        """The endpoint of the run."""
        endpoint = self._endpoint()
        assert endpoint is not None, "the endpoint is opened before anything is sampled"
        return endpoint

    async def __call__(self, subject: str, call: AgentCall) -> tuple[Returned, float]:
        """Run the agent; its result and its run time in seconds. Raises `EpisodeError`, which begins with `subject`."""
        return await self._calls(subject, self._agent, call)


def agent_of(config: AgentConfig, tier: Tier | Literal["auto"]) -> Agent:
    """The agent that the configuration names. Raises `TaskError` if it does not exist, and `UserError` if it cannot be
    isolated.
    """
    if config.function is not None:
        return _function_agent(import_object(config.function, TaskError), config.function, config.kwargs)
    program = config.command[0]
    if shutil.which(program) is None:
        words = program.split()
        hint = f": write each argument as an item, {json.dumps(words)}" if len(words) > 1 else ""
        raise TaskError(f"the program {program} does not exist, or cannot be run{hint}")
    if config.isolate:
        return IsolatedAgent(config, tier)
    return lambda call: _run(config.command, call)


def _function_agent(function: object, name: str, settings: Mapping[str, Any]) -> Agent:
    if not callable(function):
        raise TaskError(f"{name} is not a function")
    parameters = inspect.signature(function).parameters
    known = ("task", "base_url", "api_key", "model")
    if reserved := sorted({*settings} & {*known}):
        raise TaskError(f"environment.agent.kwargs: {', '.join(reserved)} is passed to every agent already: remove it")
    takes_all = any(entry.kind is inspect.Parameter.VAR_KEYWORD for entry in parameters.values())
    unknown = [
        item.name
        for item in parameters.values()
        if item.name not in (*known, *settings)
        and item.default is inspect.Parameter.empty
        and item.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    if unknown:
        raise TaskError(f"{name} requires {', '.join(unknown)}, but an agent is given only {', '.join(known)}")

    if not takes_all and (surplus := sorted({*settings} - {*parameters})):
        raise TaskError(f"environment.agent.kwargs: {name} has no parameter {', '.join(surplus)}")

    def agent(call: AgentCall) -> Returned:
        arguments = {"task": call.task, "base_url": f"{call.url}/v1", "api_key": call.key, "model": call.model}
        chosen = arguments if takes_all else {key: value for key, value in arguments.items() if key in parameters}
        return Returned(value=awaited(function(**chosen, **thaw(settings))))

    return agent


async def _run(command: tuple[str, ...], call: AgentCall) -> Returned:
    """Result of a command. Raises `RewardError` if it prints more than `LONGEST_OUTPUT` bytes."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment_of(call, ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")),
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        output, errors, _ = await asyncio.gather(
            _read_stream(process.stdout),
            _read_stream(process.stderr),
            _write(process, json.dumps(call.task, default=str)),
        )
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including what it started and left running
    return returned_by(code, output, errors)


async def _read_stream(stream: asyncio.StreamReader) -> bytes:
    content = b""
    while piece := await stream.read(1 << 16):
        content += piece
        if len(content) > LONGEST_OUTPUT:
            raise RewardError(f"printed more than {LONGEST_OUTPUT} bytes")
    return content


async def _write(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it does not read its task
        process.stdin.write(text.encode(errors="replace"))
        await process.stdin.drain()
    process.stdin.close()


class IsolatedAgent:
    """Runs one command, each time in a new sandbox and an empty folder. Its words that name existing files become
    absolute paths.
    """

    def __init__(self, config: AgentConfig, tier: Tier | Literal["auto"]) -> None:
        """Raises `TaskError` for missing files, and `UserError` if the machine lacks the tier or programs in the
        sandbox could not read the files.
        """
        located = located_command(config.command, config.readable, "environment.agent")
        self._arguments = located.arguments
        self._sandbox = _sandbox(tier, located.files)
        if not has_namespaces(self._sandbox.tier):
            raise TaskError(
                "environment.agent.isolate needs the sandbox tier namespace or bwrap, which this machine lacks: the "
                f"tier {self._sandbox.tier!r} gives a program no network of its own"
            )
        seconds = _FOREVER if config.timeout_seconds is None else config.timeout_seconds
        self._limits = ResourceLimits(
            seconds=seconds,
            cpu_seconds=int(seconds) + 1,
            memory_bytes=int(config.memory_gb * 1e9),
            file_bytes=256 << 20,
            folder_bytes=512 << 20,
            open_files=512,
            output_bytes=LONGEST_OUTPUT,
        )

    def __call__(self, call: AgentCall) -> Returned:
        """Play one trajectory. Raises `RewardError` for a program that prints too much, and `WorkerEnded` for one that
        does not end in time.
        """
        service = urlsplit(call.url)
        assert service.hostname is not None and service.port is not None, "the endpoint's address has both"
        command = Command(
            arguments=self._arguments,
            environment=environment_of(evolve(call, url=_INSIDE), ("PATH", "LANG", "VIRTUAL_ENV", "PYTHONPATH")),
            service=(service.hostname, service.port),
        )
        ran = self._sandbox.run_command(command, json.dumps(call.task, default=str).encode(), self._limits)
        if ran.ended == "output":
            raise RewardError(f"printed more than {LONGEST_OUTPUT} bytes")
        if ran.ended == "timeout":
            raise WorkerEnded("timeout", f"gave no answer within {self._limits.seconds:g} s and was ended")
        return returned_by(ran.code, ran.stdout, ran.stderr)


@cache
def _sandbox(tier: Tier | Literal["auto"], readable: tuple[Path, ...]) -> Sandbox:
    return Sandbox(tier, readable=readable)


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
