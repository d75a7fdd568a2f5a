"""The environment `mcp`: tools of MCP servers, and a reward function or environment that judges the answer.

Each server lists its tools once in a process, when the run starts. The chat template shows the same tools in every
episode, which starts a server at its first call of one of its tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, frozen

from skyrl.config.settings.environment import McpEnvConfig, McpServerConfig
from skyrl.envs.coroutines import awaited, close_all
from skyrl.envs.env import Env, EnvStep, Message, SampleAwareEnv, SampledAnswer
from skyrl.envs.mcp.servers import McpConnection, McpServer, ServerLost, shared_connection
from skyrl.envs.tools import Tool, ToolEnv
from skyrl.errors import TaskError
from skyrl.sandbox.tiers import Tier

if TYPE_CHECKING:
    from mcp_types import Tool as McpTool

TABLE = "environment.skyrl_gym.mcp"
_MARGIN = 10.0
"""Seconds beyond the deadlines of a server after which a call that ignores them is left behind."""


@frozen
class ServerTools:
    """A server, and those of its tools that the policy is offered."""

    server: McpServer
    tools: tuple[Tool, ...]


@frozen(kw_only=True)
class McpTask:
    """Makes environments with the tools of the configured servers."""

    settings: McpEnvConfig
    tier: Tier | Literal["auto"]
    reward: Callable[[Mapping[str, Any]], Env]
    """Makes the environments that judge answers."""

    def offered(self) -> tuple[ServerTools, ...]:
        """The servers with their tools, asked for once. Raises `UserError`, in one sentence."""
        return _offered(self.settings, self.tier)

    def digest(self) -> str:
        """Digest of what the policy is shown of the tools."""
        schemas = [tool.schema for item in self.offered() for tool in item.tools]
        return sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()

    def __call__(self, extras: Mapping[str, Any]) -> Env:
        return McpEnv(extras, self)


class McpEnv(ToolEnv, SampleAwareEnv):
    """The first answer without a call is judged by `reward`, which gets the messages, sample and answer as if it were
    alone. Its metrics count calls, failed calls, and servers that were lost.
    """

    def __init__(self, extras: Mapping[str, Any], task: McpTask) -> None:
        super().__init__(extras)
        self._reward, self.shown_characters = task.reward(extras), task.settings.max_result_characters
        self._episode_connections: list[McpConnection] = []
        self._counts["servers_lost"] = 0.0
        self.tools = [tool for item in task.offered() for tool in self._connected(item)]

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        return awaited(self._reward.init(prompt))

    def set_sampled(self, sampled: SampledAnswer) -> None:
        super().set_sampled(sampled)
        if isinstance(self._reward, SampleAwareEnv):
            self._reward.set_sampled(sampled)

    def judge(self, answer: str) -> EnvStep:
        return awaited(self._reward.step(answer))

    def get_metrics(self) -> dict[str, float]:
        return {**awaited(self._reward.get_metrics()), **super().get_metrics()}

    def close(self) -> None:
        close_all(self._reward, *self._episode_connections)

    def _connected(self, offered: ServerTools) -> Iterator[Tool]:
        """The tools of a server, whose calls go to the connection of this episode or of the run."""
        if offered.server.config.scope == "run":
            connection = shared_connection(offered.server)
        else:
            connection = McpConnection(offered.server)
            self._episode_connections.append(connection)
        for tool in offered.tools:
            yield evolve(tool, run=self._calls(connection, tool.name))

    def _calls(self, connection: McpConnection, name: str) -> Callable[..., Any]:
        async def run(**arguments: object) -> str:
            try:
                return await connection.call(name, arguments)
            except ServerLost:
                self._counts["servers_lost"] += 1
                raise

        return run


@cache
def _offered(settings: McpEnvConfig, tier: Tier | Literal["auto"]) -> tuple[ServerTools, ...]:
    servers: dict[str, McpServer] = {}
    every = []
    for index, config in enumerate(settings.servers):
        server = McpServer(
            config=config,
            config_path=f"{TABLE}.servers[{index}]",
            tier=tier,
            start_seconds=settings.start_timeout_seconds,
            call_seconds=settings.call_timeout_seconds,
        )
        chosen = _chosen(config, awaited(server.offered()), server.config_path)
        tools = tuple(_tool(item, settings) for item in chosen)
        for tool in tools:
            if other := servers.get(tool.name):
                raise TaskError(
                    f"the tool {tool.name} is offered by the MCP servers {other.config.shown} and {config.shown}: "
                    f"leave it out of {other.config_path}.tools or {server.config_path}.tools"
                )
            servers[tool.name] = server
        every.append(ServerTools(server, tools))
    return tuple(every)


def _chosen(config: McpServerConfig, listed: tuple[McpTool, ...], path: str) -> list[McpTool]:
    """The listed tools that the configuration names. Raises `TaskError` if there are none."""
    known = {tool.name: tool for tool in listed}
    if not known:
        raise TaskError(f"the MCP server {config.shown} offers no tools ({path})")
    for name in config.tools:
        if name not in known:
            raise TaskError(
                f"{path}.tools names {name!r:.80}, which the MCP server {config.shown} does not offer. It offers "
                f"{', '.join(known)}"
            )
    return [known[name] for name in config.tools or known]


def _tool(listed: McpTool, settings: McpEnvConfig) -> Tool:
    """A tool in the form of `ToolEnv`. Raises `TaskError` for parameters that are no JSON schema."""
    for reference in _references(listed.input_schema):
        if not reference.startswith("#"):
            raise TaskError(f"the tool {listed.name}: its parameters refer to {reference!r:.80}, outside of them")
    return Tool(
        name=listed.name,
        description=listed.description or listed.title or "",
        parameters=listed.input_schema,
        run=_fail_unconnected,
        seconds=settings.start_timeout_seconds + settings.call_timeout_seconds + _MARGIN,
    )


def _references(schema: object) -> Iterator[str]:
    """All references in a JSON schema."""
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _fail_unconnected(**_: object) -> None:
    raise AssertionError("an episode connects its tools")
