"""Agents: programs and functions of the user, which reach the policy through an address and a key.

    function    await solve(task={"messages": [...], ...}, base_url="http://.../v1", api_key="...", model="...")
    command     the task as JSON on standard input; OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
                ANTHROPIC_API_KEY and MODEL in its environment, with PATH, HOME and LANG and nothing else

A command runs in a new session, whose processes are killed when it ends or reaches its deadline; `isolated_agent.py`
runs untrusted commands.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

from skyrl.config.settings.environment import AgentConfig
from skyrl.envs.coroutines import awaited
from skyrl.errors import RewardError, TaskError
from skyrl.rollout.agent_calls import LONGEST_OUTPUT, Agent, AgentCall, Returned, environment_of, returned_by
from skyrl.rollout.env_calls import EnvCalls, Pace
from skyrl.rollout.isolated_agent import IsolatedAgent
from skyrl.sandbox.tiers import Tier
from skyrl.tree import thaw
from skyrl.tree.imports import import_object

if TYPE_CHECKING:
    from skyrl.endpoint.trajectories import Trajectories

_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")


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
        field = "environment.agent.timeout_seconds"
        pace = Pace(config.max_starts_per_second)
        self._calls = EnvCalls(
            config.max_concurrent,
            config.timeout_seconds,
            field=field,
            limit="environment.agent.max_concurrent",
            pace=pace,
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
        env=environment_of(call, _KEPT_VARIABLES),
        start_new_session=True,
    )
    try:
        out, _ = await asyncio.gather(_read_outputs(process), _write(process, json.dumps(call.task, default=str)))
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including what it started and left running
    return returned_by(code, *out)


async def _read_outputs(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    assert process.stdout is not None and process.stderr is not None
    output, errors = await asyncio.gather(_read_stream(process.stdout), _read_stream(process.stderr))
    return output, errors


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
